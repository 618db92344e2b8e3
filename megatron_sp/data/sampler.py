"""Compute which samples a data-parallel rank reads, from the number of samples consumed so far."""

from __future__ import annotations

from collections.abc import Sequence


class GlobalBatchSampler:
    """Megatron's rule: the ids of a global batch are consecutive, and data-parallel ranks take microbatches in turn."""

    @staticmethod
    def microbatches(consumed_samples: int, global_batch_size: int, micro_batch_size: int,
                     dp_rank: int, dp_size: int) -> list[list[int]]:
        """Return the global sample ids of each microbatch of one rank.

        The global batch has the ids ``[consumed_samples, consumed_samples + global_batch_size)``; microbatch ``j`` of
        rank ``r`` takes ``consumed_samples + (j * dp_size + r) * micro_batch_size + [0, micro_batch_size)``.

        Returns:
            ``global_batch_size / (micro_batch_size * dp_size)`` lists of ``micro_batch_size`` ids.
        """
        step = micro_batch_size * dp_size
        if global_batch_size <= 0 or global_batch_size % step:
            raise ValueError(f"global batch size {global_batch_size} is not a multiple of micro batch size "
                             f"{micro_batch_size} x data-parallel size {dp_size}")
        first = consumed_samples + dp_rank * micro_batch_size
        return [list(range(start, start + micro_batch_size))
                for start in range(first, first + global_batch_size, step)]

    @staticmethod
    def balanced(first: int, work: Sequence[int], micro_batch_size: int, dp_rank: int, dp_size: int) -> list[list[int]]:
        """Return the global sample ids of each microbatch of one rank, with nearly equal work on all ranks.

        The samples of a global batch are sorted by their work and dealt out from the largest: those of similar work
        make up the same microbatch of all ranks, so that ranks that wait for each other in every microbatch wait little
        too. Within a microbatch each sample goes to the rank that has the least work so far. Where all samples have the
        same work, the result is that of ``microbatches``.

        Args:
            first: id of the first sample.
            work: work of each sample of the global batch, in the order of the samples' ids.
        """
        if len(set(work)) == 1:
            return GlobalBatchSampler.microbatches(first, len(work), micro_batch_size, dp_rank, dp_size)
        order = sorted(range(len(work)), key=lambda sample: -work[sample])
        totals, mine, step = [0] * dp_size, [], micro_batch_size * dp_size
        for start in range(0, len(order), step):
            dealt: list[list[int]] = [[] for _ in range(dp_size)]
            for sample in order[start:start + step]:
                rank = min((rank for rank in range(dp_size) if len(dealt[rank]) < micro_batch_size),
                           key=totals.__getitem__)
                dealt[rank].append(first + sample)
                totals[rank] += work[sample]
            mine.append(sorted(dealt[dp_rank]))
        return mine
