"""With selective recomputation every kind of attention runs once, keeps one output and log-sum-exp, changes no bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_sp.activations.recompute import KEPT_OPERATORS, recompute
from megatron_sp.activations.results import KeptResults, ResultsOnHost
from megatron_sp.layout.masks.attention_mask import CAUSAL, AttentionMask
from megatron_sp.layout.patterns.blocks import Longformer
from megatron_sp.model.attention.block_kernels import CPUFlashBlockKernel, UnfusedBlockKernel
from megatron_sp.model.attention.cores import AttentionCore, FlashCore, SDPACore
from megatron_sp.model.attention.flash import FlashAttention, torch_flash
from megatron_sp.model.attention.flex import FlexAttention
from megatron_sp.model.attention.patterns import PatternAttention
from megatron_sp.model.attention.unfused import AttentionDropout
from megatron_sp.model.attention.window import WindowAttention
from megatron_sp.parallel.random import Dropout
from megatron_sp.parallel.ring import Once
from tests.helpers.storage import StorageTracker

BATCH, TOKENS, HEADS, GROUPS, WIDTH = 2, 40, 4, 2, 8
DOCUMENTS = ((0, 6, 7, 21), (0, 8))
DROPOUT = AttentionDropout(Dropout(0.3, 1, "attention"), torch.arange(BATCH), 0)


def with_blocks(once: Once, kernel_type: Any = CPUFlashBlockKernel) -> AttentionCore:
    kernel = kernel_type()
    return SDPACore(windowed=WindowAttention(kernel, once), patterned=PatternAttention(kernel, once), once=once)


def flash(once: Once) -> AttentionCore:
    return FlashCore(FlashAttention("flash", torch_flash), once=once)


def with_a_kernel_of_its_own(once: Once) -> AttentionCore:
    """FlexAttention with a kernel whose node in the graph saves q, k, v, o and the log-sum-exp."""
    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return SDPACore(patterned=FlexAttention(lambda q, k, v, mask: q, kernel, once=once), once=once)


@dataclass(frozen=True)
class Kind:
    """A kind of attention, and whether its log-sum-exp is kept."""

    core: Callable[[Once], AttentionCore]
    mask: AttentionMask = CAUSAL
    dropout: AttentionDropout | None = None
    keeps_lse: bool = True


KINDS = {
    "one kernel": Kind(with_blocks),
    "documents, one call for each": Kind(with_blocks, AttentionMask(DOCUMENTS)),
    "window": Kind(with_blocks, AttentionMask(window=9)),
    "window inside documents": Kind(with_blocks, AttentionMask(DOCUMENTS, 9)),
    "window, unfused blocks": Kind(partial(with_blocks, kernel_type=UnfusedBlockKernel), AttentionMask(window=9)),
    "pattern": Kind(with_blocks, AttentionMask(pattern=Longformer(4, local=2, first=1))),
    "FlexAttention": Kind(with_a_kernel_of_its_own, AttentionMask(pattern=Longformer(128, local=2, first=1))),
    "window in query blocks": Kind(lambda once: SDPACore(once=once), AttentionMask(window=9), keeps_lse=False),
    "pattern of flash attention in query blocks": Kind(
        flash, AttentionMask(pattern=Longformer(4, local=2, first=1)), keeps_lse=False),
    "dropout": Kind(with_blocks, dropout=DROPOUT, keeps_lse=False),
}


class Calls(TorchDispatchMode):
    """Counts forward calls of fused attention, and blocks of which unfused attention forms the probabilities."""

    number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        self.number += function in (aten._scaled_dot_product_flash_attention_for_cpu.default, aten.logsumexp.default)
        return function(*args, **(kwargs or {}))


def two_microbatches(kind: Kind, how: str) -> tuple[list[torch.Tensor], int, float]:
    """Compute two layers for two microbatches, both forwards before the backwards.

    Args:
        how: "" without recomputation, "full", "device" and "host" with it; the last two keep results there.
    Returns:
        the gradients, the calls of attention, and the bytes that one layer and microbatch keeps beside its output:
        those of fp32 values, without tables of places, which all layers share
    """
    results, on_host = KeptResults(), ResultsOnHost()
    core = kind.core(results.once)

    def layer(x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x * 2).split((HEADS, GROUPS, GROUPS), dim=2)
        o = core(q.sin(), k.cos(), v.exp(), mask=kind.mask, dropout=kind.dropout)
        return torch.cat((o, o), dim=2).tanh()

    def run(x: torch.Tensor) -> torch.Tensor:
        if not how:
            return layer(x)
        if how == "full":
            return recompute(layer, x)
        return recompute(layer, x, keep=KEPT_OPERATORS, results=results, on_host=on_host if how == "host" else None)

    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(BATCH, TOKENS, HEADS + 2 * GROUPS, WIDTH, generator=generator).requires_grad_()
              for _ in range(2)]
    with Calls() as calls, StorageTracker() as tracker:
        outputs = [run(run(x)) for x in inputs]
        numbers = sum(size for _, _, dtype, size in tracker._made.values() if dtype == "torch.float32")
        kept = (numbers - 4 * outputs[0].nbytes) / 4
        for y in outputs:
            y.square().sum().backward()
    gradients = [x.grad for x in inputs if x.grad is not None]
    assert len(gradients) == 2
    return gradients, calls.number, kept


@pytest.mark.parametrize("name", KINDS)
def test_attention_runs_once_and_keeps_one_result(name: str) -> None:
    kind = KINDS[name]
    expected, once, _ = two_microbatches(kind, "")
    o, lse = BATCH * TOKENS * HEADS * WIDTH * 4, BATCH * HEADS * TOKENS * 4
    for place in ("device", "host"):
        found, calls, kept = two_microbatches(kind, place)
        assert calls == once
        assert kept == o + (lse if kind.keeps_lse else 0)
        for got, want in zip(found, expected):
            assert torch.equal(got, want)
    assert two_microbatches(kind, "full")[1] > once
