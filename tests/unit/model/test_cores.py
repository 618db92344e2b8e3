"""All cores agree with softmax attention written out, forward and backward."""

import math

import pytest
import torch

from megatron_sp.layout.attention_mask import CAUSAL
from megatron_sp.model.attention.cores import FlashCore, SDPACore, UnfusedCore
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
        how = AttentionDropout(dropout, torch.tensor([3, 4]), first)
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
