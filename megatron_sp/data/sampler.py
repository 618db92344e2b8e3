"""Compute which samples a data-parallel rank reads, from the number of samples consumed so far."""

from __future__ import annotations


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
