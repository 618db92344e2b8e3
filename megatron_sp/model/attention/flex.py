"""Attention under a pattern of blocks by torch's FlexAttention, for GPUs.

FlexAttention compiles a kernel that visits the blocks that tables name. The tables are made from the lists of the
pattern: for each block of queries the blocks of keys, and for backward the reverse. No mask of s x s tokens is formed,
as torch does when it makes the tables from a function of two positions::

    block of queries      0     1     2     3
    partial (causal)      0     1     2     3         the own block
    full                  -     0     1     0 2       the earlier ones

A table has as many columns as its longest list. So the table for backward has (s/B)^2 numbers where all later blocks
see one block, as they do under ``longformer``.

Letters: s tokens, B tokens of a block, H heads of the tables (1 where all heads see the same).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from megatron_sp.activations.kept_graph import keep_graph
from megatron_sp.layout.masks.attention_mask import DOCUMENTS, AttentionMask
from megatron_sp.layout.patterns.blocks import Longformer
from megatron_sp.model.attention.documents import Windowed
from megatron_sp.model.attention.patterns import hidden_keys
from megatron_sp.model.attention.unfused import block_attention
from megatron_sp.model.kernel_trial import same_results
from megatron_sp.parallel.ring import Once, every_time

#: FlexAttention's kernels take blocks of multiples of this many tokens.
TILE = 128
Lists = list[list[list[int]]]  # numbers of blocks, by head and block


def causal(b: Any, h: Any, query: Any, key: Any) -> Any:
    """Return whether a query sees a key of its own block. All other blocks are seen whole."""
    return query >= key


def block_mask(mask: AttentionMask, heads: int, tokens: int, device: torch.device, *, trim: bool = True) -> BlockMask:
    """Return the tables of a pattern.

    Args:
        heads: query heads that attention is given.
        tokens: s.
        trim: give each table only as many columns as its longest list needs. Otherwise tables have s/B columns, which
            kernels for CPUs expect.
    """
    pattern = mask.pattern
    assert pattern is not None
    count = -(-tokens // pattern.block)
    whose = range(mask.first_head, mask.first_head + heads) if pattern.by_head else (0,)
    by_kind = {kind: [pattern.earlier(kind, block) for block in range(count)]
               for kind in dict.fromkeys(map(pattern.kind, whose))}
    full = [by_kind[pattern.kind(head)] for head in whose]
    reverse = {kind: _reversed(lists) for kind, lists in by_kind.items()}
    full_of_keys = [reverse[pattern.kind(head)] for head in whose]
    own = [[[block] for block in range(count)]] * len(full)
    least = 0 if trim else count
    (partial_counts, partial), (full_counts, earlier), (key_counts, later) = (
        _table(lists, least, device) for lists in (own, full, full_of_keys))
    return BlockMask((tokens, tokens), partial_counts, partial, full_counts, earlier, partial_counts, partial,
                     key_counts, later, BLOCK_SIZE=(pattern.block, pattern.block), mask_mod=causal)


def _reversed(lists: list[list[int]]) -> list[list[int]]:
    """Return for each block of keys the blocks of queries that list it, ascending."""
    found: list[list[int]] = [[] for _ in lists]
    for block, earlier in enumerate(lists):
        for number in earlier:
            found[number].append(block)
    return found


def _table(lists: Lists, least: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many blocks each list has, int32 [1, H, s/B], and the lists, filled up with 0, [1, H, s/B, columns].

    Args:
        least: columns at least.
    """
    counts = torch.tensor([[len(found) for found in head] for head in lists], dtype=torch.int32)
    columns = max(1, least, int(counts.max()))
    table = torch.zeros(*counts.shape, columns, dtype=torch.int32)
    filled = torch.arange(columns) < counts.unsqueeze(-1)
    table[filled] = torch.tensor([number for head in lists for found in head for number in found], dtype=torch.int32)
    return counts.unsqueeze(0).to(device), table.unsqueeze(0).to(device)


class FlexAttention:
    """Attention under a pattern to whole sequences: (q [b, s, n, d], k, v [b, s, g, d], mask) -> o [b, s, n, d].

    Args:
        otherwise: attends where sequences hold several documents, and where a block is no multiple of ``TILE`` tokens.
        kernel: FlexAttention, compiled. Not compiled, it would form the probabilities of all pairs, and
            apply only ``causal``, so that queries would see all earlier keys.
        once: runs attention, or takes its result where recomputation kept it; see ``ring.Once``.
    """

    description = "FlexAttention (blocks of the pattern)"

    def __init__(self, otherwise: Windowed, kernel: Callable[..., Any] | None = None, *,
                 once: Once = every_time):
        self.once = once
        # Without ``fullgraph`` torch would give up compiling after several shapes and run the function as it is, which
        # ignores the tables. With it torch raises an error.
        self.otherwise = otherwise
        self.kernel = kernel or torch.compile(flex_attention, dynamic=False, fullgraph=True)
        self._masks: dict[tuple[Any, ...], BlockMask] = {}  # one for each pattern of the layers and group of heads

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
        """Attend."""
        assert mask.pattern is not None
        if DOCUMENTS in mask.needs or mask.pattern.block % TILE:
            return self.otherwise(q, k, v, mask)
        key = mask.pattern, mask.first_head, q.shape[2], q.shape[1], q.device
        if key not in self._masks:
            self._masks[key] = block_mask(mask, q.shape[2], q.shape[1], q.device)
        return keep_graph(partial(self._attend, self._masks[key]), self.once, q, k, v)

    def _attend(self, tables: BlockMask, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [b, s, n, d] -> [b, n, s, d]
        o = self.kernel(q, k, v, block_mask=tables, enable_gqa=q.shape[1] != k.shape[1])
        return o.transpose(1, 2)  # type: ignore[no-any-return]


def passes_flex_trial(attend: Windowed, device: torch.device, dtype: torch.dtype, head_dim: int, heads: int,
                      kv_heads: int) -> bool:
    """Return whether FlexAttention equals unfused attention under a small pattern, forward and backward.

    Compiling the kernel takes a minute.

    Args:
        attend: a ``FlexAttention``.
        heads, kv_heads: heads that attention is given.
    """
    tokens, mask = 5 * TILE - 9, AttentionMask(pattern=Longformer(TILE, local=2, first=1))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, tokens, count, head_dim, generator=generator).to(device, dtype).requires_grad_()
               for count in (heads, kv_heads, kv_heads))
    hidden = hidden_keys(mask, heads, (0, tokens), tokens)
    return same_results(lambda: attend(q, k, v, mask),
                        lambda: block_attention(q, k, v, 0, True, None, None, hidden)[0], (q, k, v))
