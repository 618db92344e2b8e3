"""What a layer costs on a GPU, counted: operators, and bytes that elementwise operators move."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import traffic as program
from megatron_sp.proof.traffic import Traffic

#: Llama 3 8B, with fewer tokens, which changes no ratio.
SHAPE = program.Shape(hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, tokens=512)


@pytest.fixture(scope="module")
def counts() -> dict[str, Traffic]:
    with program.one_process():
        return {name: program.count_layer(SHAPE, make(SHAPE)) for name, make in program.LAYERS.items()
                if name != "torchtitan"}


def test_our_layer_moves_fewer_bytes_than_others(counts: dict[str, Traffic]) -> None:
    ours = counts["ours"].moved
    assert ours < 0.85 * counts["plain_model.py"].moved
    assert ours <= 0.5 * counts["transformers, sdpa"].moved
    assert ours <= 0.3 * counts["transformers, eager attention"].moved


def test_operators_of_a_layer_are_bounded(counts: dict[str, Traffic]) -> None:
    assert counts["ours"].operators <= 52 and counts["ours"].matrix_products == 21
    assert counts["ours, --recompute-granularity full"].operators <= 72
    assert counts["ours, --recompute-granularity selective"].launched["_scaled_dot_product_flash_attention"] == 1
    assert counts["ours, --recompute-granularity full"].launched["_scaled_dot_product_flash_attention"] == 2


def test_gradients_of_the_input_are_added_inside_products(counts: dict[str, Traffic]) -> None:
    """Two additions of the residual branches forward, two backward; q, k, v, gate and up need none."""
    assert counts["ours"].launched["add"] == 4 and counts["ours"].launched["addmm_"] == 3


@pytest.mark.slow
def test_our_compiled_layer_moves_fewer_bytes_than_other_compiled_layers() -> None:
    """Their shares differ with the tokens, because weights count too."""
    shape = replace(SHAPE, tokens=8192)
    with program.one_process():
        found = {name: program.count_compiled_layer(shape, program.COMPILED_LAYERS[name])
                 for name in ("ours", "ours, --recompute-granularity full", "plain_model.py", "transformers, sdpa")}
    ours = found["ours"]
    assert ours.matrix_products == 21 and ours.launched["add_product"] == 3
    assert not [name for name in ours.launched if "copy" in name]
    assert ours.moved < 0.9 * min(found["plain_model.py"].moved, found["transformers, sdpa"].moved)
    assert ours.operators <= 36
    assert found["ours, --recompute-granularity full"].moved < 1.45 * ours.moved


def test_the_optimizer_step_launches_few_operators_whatever_the_layers() -> None:
    """A GPU copies the numbers of the host too, which a CPU need not."""
    with program.one_process():
        traffic, tensors = program.count_our_update(32)
        assert traffic.operators + 1 <= tensors / 10 and not traffic.host_reads
        assert program.count_our_update(2)[0].operators == traffic.operators
