"""All cores agree with softmax attention written out, forward and backward."""

import math

import pytest
import torch

from megatron_sp.layout.masks.attention_mask import CAUSAL, AttentionMask
from megatron_sp.model.attention.cores import AttentionCore, FlashCore, SDPACore, UnfusedCore
from megatron_sp.model.attention.flash import FlashAttention, torch_flash
from megatron_sp.model.attention.unfused import AttentionDropout, attend_in_query_blocks, block_attention
from megatron_sp.parallel.random import Dropout
from megatron_sp.parallel.sequence import match_heads


def inputs(n: int = 4, g: int = 2, s: int = 24) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, s, n, 8), (2, s, g, 8), (2, s, g, 8)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: list[int]) -> torch.Tensor:
    heads = []
    for head, kv in enumerate(groups):
        scores = q[:, :, head] @ k[:, :, kv].transpose(1, 2) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        heads.append(scores.softmax(-1) @ v[:, :, kv])
    return torch.stack(heads, dim=2)


@pytest.mark.parametrize("n,g", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("core", [UnfusedCore(), SDPACore()], ids=["unfused", "sdpa"])
def test_core_equals_attention_written_out(core: UnfusedCore | SDPACore, n: int, g: int) -> None:
    q, k, v = inputs(n, g)
    expected = written_out(q, k, v, [head * g // n for head in range(n)])
    weight = torch.randn_like(expected)
    want = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    actual = core(q, k, v)
    torch.testing.assert_close(actual, expected)
    for x, y in zip(torch.autograd.grad((actual * weight).sum(), (q, k, v)), want):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("core", [UnfusedCore(), SDPACore(), FlashCore(FlashAttention("flash", torch_flash))],
                         ids=["unfused", "sdpa", "flash"])
def test_fewer_queries_than_keys_are_the_last_tokens(core: UnfusedCore | SDPACore | FlashCore, queries: int) -> None:
    q, k, v = inputs()
    torch.testing.assert_close(core(q[:, -queries:], k, v), core(q, k, v)[:, -queries:])


def test_query_blocks_equal_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_sp.model.attention.unfused.QUERY_BLOCK", 7)
    q, k, v = inputs()
    want = torch.autograd.grad(UnfusedCore()(q, k, v).square().sum(), (q, k, v))
    got = torch.autograd.grad(attend_in_query_blocks(q, k, v, CAUSAL, None).square().sum(), (q, k, v))
    for x, y in zip(got, want):
        torch.testing.assert_close(x, y)


def test_unevenly_grouped_heads_are_paired_by_index() -> None:
    q, k, v = inputs(n=3, g=2)
    groups = (0, 0, 1)
    torch.testing.assert_close(match_heads(SDPACore(), groups)(q, k, v), written_out(q, k, v, list(groups)))


def test_evenly_grouped_heads_keep_the_core() -> None:
    core = SDPACore()
    assert match_heads(core, (0, 0, 1, 1)) is core


def test_lse_is_that_of_the_scaled_scores() -> None:
    q, k, v = inputs(n=2, g=2)
    o, lse = block_attention(q, k, v, 0, False, None)
    scores = torch.einsum("bqnd,bknd->bnqk", q, k) / math.sqrt(8)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(o, torch.einsum("bnqk,bknd->bqnd", scores.softmax(-1), v))


def test_dropout_is_replayed_in_backward_and_does_not_depend_on_the_head_split() -> None:
    q, k, v = inputs(n=4, g=4)
    dropout = Dropout(0.5, 1, "0/attention")

    def attend(first: int, last: int) -> torch.Tensor:
        how = AttentionDropout(dropout, torch.tensor((3, 4)), first)
        return SDPACore()(q[:, :, first:last], k[:, :, first:last], v[:, :, first:last], dropout=how)

    whole = attend(0, 4)
    torch.testing.assert_close(torch.cat((attend(0, 2), attend(2, 4)), dim=2), whole)
    assert not torch.allclose(whole, SDPACore()(q, k, v))
    # A finite difference shows that backward used the same dropout mask as forward.
    gradient, = torch.autograd.grad(whole.sum(), v)
    with torch.no_grad():
        v[0, 0, 0, 0] += 1e-4
        slope = (attend(0, 4).sum() - whole.sum()) / 1e-4
    torch.testing.assert_close(slope, gradient[0, 0, 0, 0], rtol=1e-6, atol=1e-6)


DOCUMENT_MASKS = [AttentionMask(((0, 7, 8), (0,))), AttentionMask(((0, 1, 2, 3, 23), (0, 12)))]


def hidden_by_documents(mask: AttentionMask, tokens: int) -> torch.Tensor:
    """Return which pairs of query and key are not of one document, bool [b, 1, s, s]; from the words of the rule."""
    rows = []
    for starts in mask.documents:
        number = torch.tensor([sum(start <= place for start in starts) for place in range(tokens)])
        rows.append(number.unsqueeze(1) != number.unsqueeze(0))
    return torch.stack(rows).unsqueeze(1)


def one_after_another(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor,
                      longest: int, window: int) -> torch.Tensor:
    """Stand in for a varlen kernel: causal attention of each part of a row, from the cumulative lengths."""
    parts = []
    for start, stop in zip(lengths.tolist(), lengths.tolist()[1:]):
        assert stop - start <= longest
        parts.append(UnfusedCore()(q[None, start:stop], k[None, start:stop], v[None, start:stop],
                                   mask=CAUSAL.within(window))[0])
    return torch.cat(parts)


DOCUMENT_CORES: dict[str, AttentionCore] = {
    "unfused": UnfusedCore(), "sdpa": SDPACore(), "sdpa, one kernel": SDPACore(varlen=one_after_another),
    "flash": FlashCore(FlashAttention("flash", torch_flash)),
    "flash, one kernel": FlashCore(FlashAttention("flash", torch_flash, one_after_another))}


@pytest.mark.parametrize("name", DOCUMENT_CORES)
@pytest.mark.parametrize("mask", DOCUMENT_MASKS, ids=["two rows", "short"])
def test_attention_inside_documents_equals_an_explicit_mask(name: str, mask: AttentionMask) -> None:
    q, k, v = inputs()
    hidden = hidden_by_documents(mask, q.shape[1]) | torch.ones(24, 24, dtype=torch.bool).triu(1)
    k_all, v_all = (x.repeat_interleave(2, dim=2) for x in (k, v))
    scores = torch.einsum("bqnd,bknd->bnqk", q, k_all) / math.sqrt(8)
    expected = torch.einsum("bnqk,bknd->bqnd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v_all)
    weight = torch.randn_like(expected)
    want = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    actual = DOCUMENT_CORES[name](q, k, v, mask=mask)
    torch.testing.assert_close(actual, expected)
    for x, y in zip(torch.autograd.grad((actual * weight).sum(), (q, k, v)), want):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("name", DOCUMENT_CORES)
def test_a_token_changes_no_bit_of_other_documents(name: str) -> None:
    mask, core = AttentionMask(((0, 7, 15), (0, 3))), DOCUMENT_CORES[name]
    q, k, v = (x.detach().float() for x in inputs())
    before = core(q, k, v, mask=mask)
    for x in (q, k, v):
        x[0, 9] += 100.0
    after = core(q, k, v, mask=mask)
    same = (before == after).flatten(2).all(-1)
    assert same[1].all() and same[0, :9].all() and same[0, 15:].all() and not same[0, 9:15].any()


def test_query_blocks_see_only_their_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_sp.model.attention.unfused.QUERY_BLOCK", 5)
    q, k, v = inputs()
    dropout = AttentionDropout(Dropout(1e-9, 1, "0/attention"), torch.tensor((3, 4)), 0)
    for mask in DOCUMENT_MASKS:
        want = torch.autograd.grad(UnfusedCore()(q, k, v, mask=mask).square().sum(), (q, k, v))
        for some in (None, dropout):
            got = torch.autograd.grad(attend_in_query_blocks(q, k, v, mask, some).square().sum(), (q, k, v))
            for x, y in zip(got, want):
                torch.testing.assert_close(x, y)
        last = attend_in_query_blocks(q[:, -9:], k, v, mask, None)
        torch.testing.assert_close(last, UnfusedCore()(q, k, v, mask=mask)[:, -9:])
