"""Which chunks of a sequence keep their keys and values, where every layer attends within a window. Pure arithmetic.

A chunk then sees only the few chunks before it that the window reaches. So the first pass over a long sequence keeps
the keys and values of few chunks: those of the last segment, and before each segment those that its first chunk sees.
When the second pass comes to a segment, it first computes the keys and values of the segment again::

    chunk            0  1  2  3  4  5  6  7  8        segments of 3 chunks, the window reaches 1 chunk
    first pass       .  .  k  .  .  k  k  k           k: kept at its end; the last chunk has no first pass
    second pass                          <- 8 7 6     backward
                              k  k                    forward of the segment again: keeps 3 and 4
                              <- 5  4  3              backward, and so on

With n chunks and segments of about the root of n chunks, about two roots of n chunks are kept at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_sp.config.schema import Run
from megatron_sp.layout.masks.windows import layer_windows


@dataclass(frozen=True)
class Segments:
    """How the chunks of a sequence are cut into segments.

    Attributes:
        count: number of chunks of the sequence.
        size: chunks of a segment; ``count`` where all keys and values are kept.
        reach: how many chunks before a chunk the windows reach.
    """

    count: int
    size: int
    reach: int

    @classmethod
    def of(cls, count: int, reach: int | None) -> Segments:
        """Return the segments of a sequence; one segment, unless several keep at most half as many chunks.

        Args:
            reach: None where a layer attends to all earlier chunks.
        """
        if reach is None:
            return cls(count, count, count)
        found = cls(count, max(1, round(math.sqrt(count * max(1, reach)))), reach)
        return found if 2 * found.most_kept <= count else cls(count, count, reach)

    @property
    def starts(self) -> range:
        """Return the numbers of the first chunks of all segments."""
        return range(0, self.count, self.size)

    @property
    def most_kept(self) -> int:
        """Return how many chunks are kept at most at a time."""
        if self.size >= self.count:
            return self.count - 1
        return self.size + self.reach * len(self.starts)

    def outlives(self, chunk: int) -> bool:
        """Return whether the first pass keeps a chunk to its end."""
        return chunk >= self.starts[-1] or any(start - self.reach <= chunk < start for start in self.starts)

    def freed_by(self, chunk: int) -> tuple[int, ...]:
        """Return the chunks that nobody needs any more in the first pass when a chunk is computed."""
        last = chunk - self.reach - 1
        return (last,) if last >= 0 and not self.outlives(last) else ()


def window_reach(run: Run) -> int | None:
    """Return how many earlier chunks the windows of a run reach; None where a layer sees all of them.

    A pipeline keeps all chunks: computing segments again would leave its other stages without work.
    """
    windows, size = layer_windows(run.model), run.memory.sequence_chunk_size
    if size < 1 or not windows or not all(windows) or run.parallel.pp > 1:
        return None
    return -(-(max(windows) - 1) // size)
