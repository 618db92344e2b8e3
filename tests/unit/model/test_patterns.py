"""Attention under a pattern of blocks equals attention under a dense mask, in every core, forward and backward."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_sp.config.schema import Model
from megatron_sp.layout.masks.attention_mask import PATTERN, AttentionMask
from megatron_sp.layout.patterns.choice import layer_patterns
from megatron_sp.model.attention.block_kernels import CPUFlashBlockKernel, UnfusedBlockKernel
from megatron_sp.model.attention.cores import AttentionCore, FlashCore, SDPACore, UnfusedCore
from megatron_sp.model.attention.flash import FlashAttention, torch_flash
from megatron_sp.model.attention.patterns import NumberedHeads, PatternAttention
from megatron_sp.model.attention.unfused import AttentionDropout, attend_in_query_blocks
from megatron_sp.parallel.random import Dropout
from megatron_sp.parallel.sequence import match_heads
from megatron_sp.proof.reference_masks import visible_keys

TOKENS, WIDTH = 29, 8
BLOCKS = PatternAttention(CPUFlashBlockKernel())
CORES: dict[str, AttentionCore] = {
    "unfused": UnfusedCore(), "query blocks": SDPACore(), "blocks": SDPACore(patterned=BLOCKS),
    "unfused blocks": SDPACore(patterned=PatternAttention(UnfusedBlockKernel())),
    "flash": FlashCore(FlashAttention("flash", torch_flash), patterned=BLOCKS)}
MODELS = [Model(num_layers=1, num_attention_heads=6, attention_block_size=4, attention_local_blocks=2,
                attention_pattern=name, attention_blocks_by_head=differs, attention_stride=3)
          for name in ("fixed", "longformer", "bigbird", "strided") for differs in (False, True)
          if name != "longformer" or not differs]
DOCUMENTS = [(), ((0, 6, 7, 21), (0, 8))]


def named(model: Model) -> str:
    return model.attention_pattern + ", by head" * model.attention_blocks_by_head


def mask_of(model: Model, documents: tuple[tuple[int, ...], ...] = ()) -> AttentionMask:
    return AttentionMask(documents).within(0, layer_patterns(model)[0])


def hidden(model: Model, documents: tuple[tuple[int, ...], ...] = ()) -> torch.Tensor:
    """Return which pairs of query and key may not meet, bool [2, n, s, s]; from the definition."""
    visible, place = visible_keys(model, 0, TOKENS), torch.arange(TOKENS)
    assert visible is not None
    rows = []
    for starts in documents or ((0,), (0,)):
        number = (place.unsqueeze(1) >= torch.tensor(starts)).sum(1)
        rows.append(~visible | (number.unsqueeze(1) != number) | (place > place.unsqueeze(1)))
    return torch.stack(rows)


def inputs(groups: int = 3, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, TOKENS, heads, WIDTH, generator=generator, dtype=torch.float64).to(dtype
                             ).requires_grad_() for heads in (6, groups, groups))


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, model: Model,
                documents: tuple[tuple[int, ...], ...] = (), kv: list[int] | None = None) -> torch.Tensor:
    index = torch.tensor(kv or [head * k.shape[2] // 6 for head in range(6)])
    k, v = k[:, :, index], v[:, :, index]
    scores = torch.einsum("bqnd,bknd->bnqk", q, k) / math.sqrt(WIDTH)
    p = scores.masked_fill(hidden(model, documents), -torch.inf).softmax(-1)
    return torch.einsum("bnqk,bknd->bqnd", p, v)


@pytest.mark.parametrize("name", CORES)
@pytest.mark.parametrize("model", MODELS, ids=named)
@pytest.mark.parametrize("documents", DOCUMENTS, ids=str)
def test_a_pattern_equals_a_dense_mask(name: str, model: Model, documents: tuple[tuple[int, ...], ...]) -> None:
    for groups in (6, 3, 1):
        q, k, v = inputs(groups)
        expected = written_out(q, k, v, model, documents)
        weight = torch.randn(expected.shape, dtype=expected.dtype)
        want = torch.autograd.grad((expected * weight).sum(), (q, k, v))
        actual = CORES[name](q, k, v, mask=mask_of(model, documents))
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
        for x, y in zip(torch.autograd.grad((actual * weight).sum(), (q, k, v)), want):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_other_types(dtype: torch.dtype, tolerance: float) -> None:
    for model in MODELS:
        (q, k, v), ours = inputs(), inputs(dtype=dtype)
        want, found = written_out(q, k, v, model), CORES["blocks"](*ours, mask=mask_of(model))
        assert found.dtype == dtype
        gradients = zip(torch.autograd.grad(found.sum(), ours), torch.autograd.grad(want.sum(), (q, k, v)))
        for x, y in ((found, want), *gradients):
            torch.testing.assert_close(x.double(), y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("model", MODELS, ids=named)
def test_heads_are_those_of_the_model(model: Model) -> None:
    """A rank that attends with heads 2 to 4 computes what all heads together compute for them, unequal groups too."""
    q, k, v = inputs(2)
    kv = [0, 0, 1, 1, 1, 1]
    whole = written_out(q, k, v, model, kv=kv)[:, :, 2:5]
    for name in CORES:
        core = NumberedHeads(match_heads(CORES[name], (0, 0, 0)), 2)
        part = core(q[:, :, 2:5], k[:, :, 1:], v[:, :, 1:], mask=mask_of(model))
        torch.testing.assert_close(part, whole, msg=name)
        first = NumberedHeads(match_heads(CORES[name], (0, 0, 1)), 0)(q[:, :, :3], k, v, mask=mask_of(model))
        torch.testing.assert_close(first, written_out(q, k, v, model, kv=kv)[:, :, :3], msg=name)


@pytest.mark.parametrize("name", CORES)
@pytest.mark.parametrize("queries", [1, 7])
def test_fewer_queries_than_keys_are_the_last_tokens(name: str, queries: int) -> None:
    q, k, v = inputs()
    for model in MODELS:
        last = CORES[name](q[:, -queries:], k, v, mask=mask_of(model))
        torch.testing.assert_close(last, written_out(q, k, v, model)[:, -queries:])


@pytest.mark.parametrize("documents", DOCUMENTS, ids=str)
def test_dropout(documents: tuple[tuple[int, ...], ...]) -> None:
    dropout = AttentionDropout(Dropout(0.5, 1, "0/attention"), torch.tensor((3, 4)), 0)
    for model in MODELS:
        q, k, v = inputs(6)
        scores = torch.einsum("bqnd,bknd->bnqk", q, k) / math.sqrt(WIDTH)
        p = scores.masked_fill(hidden(model, documents), -torch.inf).softmax(-1)
        p = p * dropout.keep(0, TOKENS, TOKENS, 6, q.device) / 0.5
        found = attend_in_query_blocks(q, k, v, mask_of(model, documents), dropout)
        torch.testing.assert_close(found, torch.einsum("bnqk,bknd->bqnd", p, v))


def test_hidden_values_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_sp.model.attention.patterns.KEYS_AT_ONCE", 10)  # several calls for pieces of one size
    for model in MODELS:
        q, k, v = (x.detach().float() for x in inputs())
        before = CORES["blocks"](q, k, v, mask=mask_of(model))
        for x in (k, v):
            x[0, 9] += 100.0
        same = (before == CORES["blocks"](q, k, v, mask=mask_of(model))).all(-1)  # [b, s, n]
        assert same[1].all() and torch.equal(same[0].T, hidden(model)[0, :, :, 9])


def test_a_mask_says_what_it_needs() -> None:
    mask = mask_of(MODELS[0])
    assert mask.needs == {PATTERN} and mask.of_heads(3).first_head == 3
    assert AttentionMask().of_heads(3) == AttentionMask()
    with pytest.raises(AssertionError):
        mask.pieces(0, (0, 4), (0, 4))
