"""The tables of FlexAttention hold exactly the blocks of the pattern."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from megatron_sp.config.schema import Model
from megatron_sp.layout.masks.attention_mask import AttentionMask
from megatron_sp.layout.patterns.blocks import BigBird
from megatron_sp.layout.patterns.choice import layer_patterns
from megatron_sp.model.attention.block_kernels import UnfusedBlockKernel
from megatron_sp.model.attention.cores import SDPACore
from megatron_sp.model.attention.flex import FlexAttention, block_mask, passes_flex_trial
from megatron_sp.model.attention.patterns import PatternAttention
from megatron_sp.model.kernels import Kernels, choose_kernels, kernels_in_words, try_flex
from megatron_sp.proof.reference_masks import visible_keys
from tests.helpers.configs import STYLES, tiny_run

HEADS, TOKENS = 4, 1920 - 30
CPU = torch.device("cpu")
MODELS = [Model(num_layers=1, num_attention_heads=HEADS, attention_block_size=128, attention_local_blocks=2,
                attention_pattern=name, attention_blocks_by_head=differs, attention_stride=3)
          for name in ("fixed", "longformer", "bigbird", "strided") for differs in (False, True)
          if name != "longformer" or not differs]


def dense(counts: torch.Tensor | None, table: torch.Tensor | None, blocks: int) -> torch.Tensor:
    """Return which blocks the lists of a table name, bool [H, s/B, s/B]; read as a kernel reads it."""
    assert counts is not None and table is not None
    found = torch.zeros(*counts.shape[1:], blocks, dtype=torch.bool)
    for head in range(counts.shape[1]):
        for row in range(blocks):
            listed = table[0, head, row, :counts[0, head, row]].tolist()
            assert len(set(listed)) == len(listed)
            found[head, row, listed] = True
    return found


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.attention_pattern)
@pytest.mark.parametrize("first_head", [0, 1])
def test_tables_are_the_dense_mask(model: Model, first_head: int) -> None:
    mask = AttentionMask(pattern=layer_patterns(model)[0], first_head=first_head)
    tables = block_mask(mask, HEADS - first_head, TOKENS, CPU)
    blocks = 15
    partial = dense(tables.kv_num_blocks, tables.kv_indices, blocks)
    full = dense(tables.full_kv_num_blocks, tables.full_kv_indices, blocks)
    visible = visible_keys(model, 0, TOKENS)
    assert visible is not None
    wanted = visible[first_head:, ::128, ::128].tril()  # of pairs of blocks, from one pair of tokens each
    assert (partial == torch.eye(blocks, dtype=torch.bool)).all()
    assert ((full | partial).expand_as(wanted) == wanted).all() and not (full & partial).any()
    assert torch.equal(dense(tables.q_num_blocks, tables.q_indices, blocks), partial.transpose(1, 2))
    assert torch.equal(dense(tables.full_q_num_blocks, tables.full_q_indices, blocks), full.transpose(1, 2))
    assert len(full) == (HEADS - first_head if model.attention_blocks_by_head else 1)
    assert tables.full_kv_indices is not None and tables.full_kv_indices.shape[-1] == full.sum(-1).max()


def test_tables_of_a_million_tokens_are_small() -> None:
    tables = block_mask(AttentionMask(pattern=BigBird(128)), 32, 1 << 20, CPU)
    each = [tables.kv_indices, tables.full_kv_indices, tables.q_indices]
    assert sum(table.nbytes for table in each if table is not None) < 2**20
    assert tables.BLOCK_SIZE == (128, 128) and tables.shape == (1, 1, 1 << 20, 1 << 20)


def test_what_the_tables_cannot_say_is_left_to_the_other_kernel() -> None:
    def other(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
        asked.append(mask)
        return q

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: object) -> torch.Tensor:
        asked.append(how)
        return q

    asked: list[object] = []
    q = torch.zeros(1, 256, 4, 8)
    attend = FlexAttention(other, kernel)
    for mask in (AttentionMask(((0, 7),), pattern=BigBird(128)), AttentionMask(pattern=BigBird(64))):
        attend(q, q, q, mask)
    assert all(isinstance(one, AttentionMask) for one in asked) and len(asked) == 2
    for first_head in (0, 0, 4):
        attend(q, q[:, :, :2], q[:, :, :2], AttentionMask(pattern=BigBird(128, True), first_head=first_head))
    masks = [one["block_mask"] for one in asked[2:]]  # type: ignore[index]
    assert masks[0] is masks[1] is not masks[2]


def test_a_kernel_that_does_not_read_the_tables_fails_the_trial() -> None:
    """So does FlexAttention where it is not compiled: it reads the function of positions alone."""
    def all_earlier(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: object) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    assert not passes_flex_trial(FlexAttention(lambda q, k, v, mask: q, all_earlier), CPU, torch.float32, 16, 4, 2)


def test_more_shapes_than_torch_compiles_are_an_error_and_no_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    attend = FlexAttention(PatternAttention(UnfusedBlockKernel()))
    mask = AttentionMask(pattern=BigBird(128))
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit, match="fullgraph=True"):
        for blocks in range(1, 12):
            x = torch.zeros(1, 1, blocks * 128, 16)
            attend.kernel(x, x, x, block_mask=block_mask(mask, 1, blocks * 128, CPU, trim=False))  # CPUs: forward only
    torch._dynamo.reset()


def stand_in(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, block_mask: Any, enable_gqa: bool) -> torch.Tensor:
    """Attend as FlexAttention does: to whole blocks of the one table, and by the function in those of the other."""
    size, tokens, blocks = block_mask.BLOCK_SIZE[0], q.shape[2], block_mask.kv_num_blocks.shape[2]
    place = torch.arange(tokens)
    whole, partly = (dense(*tables, blocks)[:, place.unsqueeze(1) // size, place // size] for tables in (
        (block_mask.full_kv_num_blocks, block_mask.full_kv_indices), (block_mask.kv_num_blocks, block_mask.kv_indices)))
    seen = whole | partly & block_mask.mask_mod(0, 0, place.unsqueeze(1), place)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=enable_gqa)


def test_a_run_uses_it_where_it_passes_its_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_run([*STYLES["llama"].split(), "--attention-pattern", "fixed", "--attention-block-size", "8"])
    other = PatternAttention(UnfusedBlockKernel())
    for kernel, works in ((stand_in, True), (lambda *_, **__: 1 / 0, False)):
        monkeypatch.setattr(torch, "compile", lambda function, kernel=kernel, **how: kernel)
        flex = try_flex(run, other, CPU, torch.bfloat16)
        assert (flex is not None) == works
    assert "FlexAttention" in kernels_in_words(run, Kernels(SDPACore(patterned=FlexAttention(other, stand_in)),
                                                            UnfusedBlockKernel(), choose_kernels(run, CPU).norms))
    assert "FlexAttention" not in kernels_in_words(run, choose_kernels(run, CPU))
