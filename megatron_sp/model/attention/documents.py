"""Attention inside documents, with memory and work that grow with the documents and not with the whole sequence.

Several documents lie in one sequence one after another, and tokens attend only to their own. The sequences of a
microbatch are laid end to end too, so that there is one row of documents::

    sequence 0      sequence 1          one kernel for all, with cumulative lengths 0 3 7 12 16,
    [0 1 2|3 4 5 6] [7 8 9 10 11|12 ..  or one call of a causal kernel for each document

Letters: b batch, s tokens, n query heads, g key/value heads, d head width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_sp.layout.masks.attention_mask import AttentionMask

#: Causal attention of whole sequences: (q [b, s, n, d], k, v [b, s, g, d]) -> o [b, s, n, d].
Causal = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
#: Causal attention of each document of a row: (q [b*s, n, d], k, v [b*s, g, d], cumulative lengths int32
#: [documents + 1], longest document, tokens of the window or 0) -> o [b*s, n, d].
Varlen = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int], torch.Tensor]
#: Attention of whole sequences within a window: (q [b, s, n, d], k, v [b, s, g, d], mask) -> o [b, s, n, d].
Windowed = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionMask], torch.Tensor]

#: A variable-length kernel takes the places of documents as int32.
MOST_TOKENS = 2**31


def send(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on the device of a tensor in host memory. The host does not wait for it."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


class DocumentAttention:
    """Attends inside documents and windows, with one call of a kernel for all documents or one call for each.

    Args:
        causal: attends to whole sequences.
        windowed: attends within a window where ``varlen`` is None.
        varlen: attends to all documents of a row at once; None: ``causal`` is called for each document.
    """

    def __init__(self, causal: Causal, windowed: Windowed, varlen: Varlen | None = None):
        self.causal, self.windowed, self.varlen = causal, windowed, varlen

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
        """q [b, s, n, d], k, v [b, s, g, d] -> o [b, s, n, d]"""
        if mask.window and (self.varlen is None or q.shape[0] * q.shape[1] >= MOST_TOKENS):
            return self.windowed(q, k, v, mask)
        row_q, row_k, row_v = (x.flatten(0, 1) for x in (q, k, v))  # [b, s, n, d] -> [b*s, n, d]
        if self.varlen is not None and len(row_q) < MOST_TOKENS:
            batch, tokens = q.shape[:2]
            how = (*mask.remember(("lengths", batch, tokens, q.device),
                                  lambda: cumulative_lengths(mask, batch, tokens, q.device)), mask.window)
            return self.varlen(row_q, row_k, row_v, *how).unflatten(0, q.shape[:2])
        lengths = mask.lengths(*q.shape[:2])
        # One split and one concatenation, whose backward touches each token once. A slice for each document would
        # give a gradient of the size of the whole sequence for each document.
        parts = zip(*(x.unsqueeze(0).split(lengths, dim=1) for x in (row_q, row_k, row_v)))
        return torch.cat([self.causal(*part) for part in parts], dim=1).reshape(q.shape)


def cumulative_lengths(mask: AttentionMask, batch: int, tokens: int, device: torch.device) -> tuple[torch.Tensor, int]:
    """Return the cumulative lengths of the documents, int32 [documents + 1] on the device, and the longest length."""
    lengths = torch.tensor([0, *mask.lengths(batch, tokens)])
    return send(lengths.cumsum(0, dtype=torch.int32), device), int(lengths.max())


def first_keys(mask: AttentionMask, batch: int, tokens: int) -> torch.Tensor:
    """Return for each position the first one that its query sees, int64 [b, s] on the CPU."""
    lengths = torch.tensor(mask.lengths(batch, tokens))
    starts = lengths.cumsum(0) - lengths  # in the row of all sequences
    first = starts.repeat_interleave(lengths).view(batch, tokens) % tokens
    return first.maximum(torch.arange(tokens) - mask.window + 1) if mask.window else first
