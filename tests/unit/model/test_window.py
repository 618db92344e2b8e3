"""Attention within a sliding window equals attention under an explicit mask, in every core, forward and backward."""

import math
import time
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from megatron_sp.layout.masks.attention_mask import AttentionMask
from megatron_sp.model.attention.block_kernels import CPUFlashBlockKernel, UnfusedBlockKernel
from megatron_sp.model.attention.cores import AttentionCore, FlashCore, SDPACore, UnfusedCore
from megatron_sp.model.attention.flash import FlashAttention, torch_flash
from megatron_sp.model.attention.unfused import AttentionDropout, attend_in_query_blocks
from megatron_sp.model.attention.window import WindowAttention, groups_of, places_of
from megatron_sp.parallel.random import Dropout
from tests.unit.model.test_cores import inputs, one_after_another

TOKENS = 24
MASKS = [AttentionMask(window=window) for window in (1, 2, 5, 8, 23, 30)] + [
    AttentionMask(((0, 7, 8), (0,)), window=5), AttentionMask(((0, 1, 2, 3, 23), (0, 12)), window=4)]
FLASH = FlashAttention("flash", torch_flash)
CORES: dict[str, AttentionCore] = {
    "unfused": UnfusedCore(), "query blocks": SDPACore(), "one kernel": SDPACore(varlen=one_after_another),
    "blocks": SDPACore(windowed=WindowAttention(CPUFlashBlockKernel())),
    "unfused blocks": SDPACore(windowed=WindowAttention(UnfusedBlockKernel())),
    "flash": FlashCore(FLASH, WindowAttention(CPUFlashBlockKernel()))}


def hidden(mask: AttentionMask) -> torch.Tensor:
    """Return which pairs of query and key may not meet, bool [2, 1, s, s]; from the words of the rule."""
    place = torch.arange(TOKENS)
    distance = place.unsqueeze(1) - place
    outside = (distance < 0) | (distance >= mask.window)
    rows = []
    for starts in mask.documents or ((0,), (0,)):
        number = (place.unsqueeze(1) >= torch.tensor(starts)).sum(1)
        rows.append(outside | (number.unsqueeze(1) != number))
    return torch.stack(rows).unsqueeze(1)


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
    k, v = (x.repeat_interleave(2, dim=2) for x in (k, v))
    scores = torch.einsum("bqnd,bknd->bnqk", q, k) / math.sqrt(8)
    return torch.einsum("bnqk,bknd->bqnd", scores.masked_fill(hidden(mask), -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("name", CORES)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_window_equals_an_explicit_mask(name: str, mask: AttentionMask) -> None:
    q, k, v = inputs()
    expected = written_out(q, k, v, mask)
    weight = torch.randn_like(expected)
    want = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    actual = CORES[name](q, k, v, mask=mask)
    torch.testing.assert_close(actual, expected)
    for x, y in zip(torch.autograd.grad((actual * weight).sum(), (q, k, v)), want):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("name", CORES)
@pytest.mark.parametrize("queries", [1, 7])
def test_fewer_queries_than_keys_are_the_last_tokens(name: str, queries: int) -> None:
    q, k, v = inputs()
    for mask in MASKS[:4]:
        last = CORES[name](q[:, -queries:], k, v, mask=mask)
        torch.testing.assert_close(last, written_out(q, k, v, mask)[:, -queries:])


def test_groups_are_small_and_no_token_is_twice_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_sp.model.attention.window.QUERIES_AT_ONCE", 10)
    for mask in MASKS:
        for group in groups_of(places_of(mask, 2, TOKENS, torch.device("cpu"))):
            for places in (group.queries, group.keys):
                assert len(places.unique()) == places.numel()
            assert len(group.queries) == 1 or group.queries.numel() <= 10
    test_a_window_equals_an_explicit_mask("blocks", MASKS[2])


def test_values_outside_the_window_change_no_bit() -> None:
    for core in CORES.values():
        q, k, v = (x.detach().float() for x in inputs())
        before = core(q, k, v, mask=AttentionMask(window=4))
        for x in (q, k, v):
            x[0, 9] += 100.0
        same = (before == core(q, k, v, mask=AttentionMask(window=4))).flatten(2).all(-1)
        assert same[1].all() and same[0, :9].all() and same[0, 13:].all() and not same[0, 9:13].any()


def test_dropout_masks_do_not_depend_on_the_keys_that_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs()
    dropout = AttentionDropout(Dropout(0.5, 1, "0/attention"), torch.tensor((3, 4)), 0)
    mask = AttentionMask(window=5)
    keep = dropout.keep(0, TOKENS, TOKENS, 4, q.device)
    k_all, v_all = (x.repeat_interleave(2, dim=2) for x in (k, v))
    scores = torch.einsum("bqnd,bknd->bnqk", q, k_all) / math.sqrt(8)
    p = scores.masked_fill(hidden(mask), -torch.inf).softmax(-1) * keep / 0.5
    torch.testing.assert_close(attend_in_query_blocks(q, k, v, mask, dropout),
                               torch.einsum("bnqk,bknd->bqnd", p, v_all))
    without = AttentionDropout(dropout.dropout, dropout.samples, 0, earlier=10)
    torch.testing.assert_close(without.keep(6, 8, 14, 4, q.device), dropout.keep(16, 8, 24, 4, q.device)[..., 10:])


def test_time_grows_with_the_pairs_and_not_with_their_square() -> None:
    """Eight times the tokens at one window are eight times the pairs; the whole triangle would be 64 times."""
    def seconds(tokens: int) -> float:
        q, k, v = (torch.randn(1, tokens, 2, 16, requires_grad=True) for _ in range(3))
        core, best = CORES["blocks"], math.inf
        for _ in range(3):
            start = time.process_time()
            core(q, k, v, mask=AttentionMask(window=128)).sum().backward()
            best = min(best, time.process_time() - start)
        return best

    assert seconds(16384) / seconds(2048) < 20


@pytest.mark.parametrize("name", ["blocks", "one kernel"])
def test_recomputation_finds_its_own_mask_after_another_microbatch(name: str) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
        return CORES[name](q, k, v, mask=mask.within(5))

    masks = [AttentionMask(((0, 7, 8), (0,))), AttentionMask(((0, 1, 2, 3, 23), (0, 12)))]
    q, k, v = inputs()
    want = [torch.autograd.grad(attend(q, k, v, mask).sum(), (q, k, v)) for mask in masks]
    masks = [AttentionMask(mask.documents) for mask in masks]
    keep = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    outputs = []
    for mask in masks:
        attend(q, k, v, mask)  # an earlier layer, which is not recomputed
        outputs.append(checkpoint(attend, q, k, v, mask, use_reentrant=False, context_fn=keep))
    for o, expected in zip(outputs, want):
        for x, y in zip(torch.autograd.grad(o.sum(), (q, k, v)), expected):
            torch.testing.assert_close(x, y)
