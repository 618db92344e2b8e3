"""How many tokens a computation takes at a time: the model computes with these sizes, the plan predicts with them."""

from __future__ import annotations

from megatron_sp.config.schema import Run

#: Queries whose attention probabilities exist at once, where a kernel has to form probabilities.
QUERY_BLOCK = 512
#: Logits of a tile whose size ``--loss-tile-size`` leaves open. A CPU tile stays in a core's cache from its first use
#: to its last; a GPU tile is large enough to keep the GPU busy.
CPU_TILE_LOGITS, GPU_TILE_LOGITS = 1 << 21, 1 << 27
LEAST_LOSS_TILE = 128
#: On a GPU a tile is a multiple of this: matrix products compute blocks of 128 rows, and would fill up the last one.
GPU_TILE_MULTIPLE = 128


def loss_tile(columns: int, *, on_cpu: bool) -> int:
    """Return the number of tokens whose logits exist at once when the user names none.

    Args:
        columns: logits of a token on this rank, v/tp.
    """
    tile = max(LEAST_LOSS_TILE, (CPU_TILE_LOGITS if on_cpu else GPU_TILE_LOGITS) // columns)
    return tile if on_cpu else tile // GPU_TILE_MULTIPLE * GPU_TILE_MULTIPLE


def tokens_at_once(run: Run) -> int:
    """Return how many tokens of a sequence the model computes at once, of all ranks together: a chunk, or all."""
    return run.memory.sequence_chunk_size or run.data.seq_length


def num_chunks(run: Run) -> int:
    """Return into how many chunks each sequence is cut."""
    return max(1, run.data.seq_length // max(1, tokens_at_once(run)))
