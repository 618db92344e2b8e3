"""Compare the predicted peak memory with traced allocations of the real model, forward and backward."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_sp.config.load import load_run
from megatron_sp.config.resolve import with_vocab
from megatron_sp.config.schema import Run
from megatron_sp.plan.memory import COMPONENTS, _Rank, predict
from megatron_sp.plan.sizes import Weights
from tests.helpers.trace import trace_step

TOLERANCE = 0.10
COMMON = ("--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 4096 --micro-batch-size 1 "
          "--train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 8192 "
          "--attention-dropout 0 --hidden-dropout 0 --eval-iters 0 ")
GELU = COMMON  # GPT-2 style: LayerNorm, biases, learned positions, tied embeddings
LLAMA = COMMON + ("--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
                  "--untie-embeddings-and-output-weights --ffn-hidden-size 704 ")
GQA = LLAMA + "--group-query-attention --num-query-groups 2 "
FULL = "--recompute-granularity full "
CHUNKS = "--num-layers 2 --seq-length 8192 --sequence-chunk-size 2048 "
ULYSSES = "--ulysses-size 4 --seq-length 16384 "
SHORT = "--hidden-size 1024 --seq-length 256 "  # few tokens: the weights decide
HALF = "--bf16 --normalization LayerNorm "  # RMSNorm in bf16 is one kernel on GPUs only

CASES = {
    "dense": (1, LLAMA),
    "gqa": (1, GQA),
    "gelu": (1, GELU),
    "full": (1, LLAMA + FULL),
    "selective": (1, LLAMA + "--recompute-granularity selective"),
    "selective, window": (1, LLAMA + "--recompute-granularity selective --window-size 512"),
    "selective, ring": (2, LLAMA + "--recompute-granularity selective --ring-size 2 --seq-length 8192"),
    "selective, attention dropout": (1, LLAMA + "--recompute-granularity selective --attention-dropout 0.1 "
                                                "--seq-length 2048"),
    "units of 2": (1, LLAMA + FULL + "--recompute-num-layers 2"),
    "first 2 layers": (1, LLAMA + FULL + "--recompute-method block --recompute-num-layers 2"),
    "tiled mlp": (1, LLAMA + FULL + "--mlp-tile-size 512"),
    "head groups": (1, LLAMA + FULL + "--mlp-tile-size 512 --attention-head-groups 4"),
    "groups alone": (1, LLAMA + "--attention-head-groups 4"),
    "large loss tile": (1, LLAMA + FULL + "--mlp-tile-size 512 --loss-tile-size 4096"),
    "large loss tile, bf16": (1, LLAMA + HALF + FULL + "--mlp-tile-size 512 --loss-tile-size 4096"),
    "offload": (1, LLAMA + FULL + "--offload-activations"),
    "dropout": (1, LLAMA + "--hidden-dropout 0.1"),
    "gelu bf16": (1, GELU + "--bf16"),
    "gelu bf16 full": (1, GELU + "--bf16 " + FULL),
    "tp": (2, LLAMA + "--tensor-model-parallel-size 2"),
    "tp, megatron-sp": (2, LLAMA + "--tensor-model-parallel-size 2 --sequence-parallel"),
    "tp, megatron-sp, full": (2, LLAMA + FULL + "--tensor-model-parallel-size 2 --sequence-parallel"),
    "documents": (1, LLAMA + "--reset-attention-mask"),
    "documents, ulysses": (4, LLAMA + "--ulysses-size 4 --reset-attention-mask"),
    "ulysses": (4, LLAMA + "--ulysses-size 4"),
    "ulysses full": (4, LLAMA + FULL + ULYSSES),
    "ulysses selective": (4, LLAMA + "--recompute-granularity selective " + ULYSSES),
    "ulysses gqa": (4, GQA + FULL + ULYSSES),
    "ring": (2, LLAMA + FULL + "--ring-size 2"),
    "everything": (4, GQA + FULL + "--tensor-model-parallel-size 2 --sequence-parallel --ulysses-size 2 "
                                   "--mlp-tile-size 512 --zero-stage 3"),
    "chunks, full, gqa": (1, GQA + FULL + CHUNKS),
    "chunks, selective": (1, LLAMA + "--recompute-granularity selective " + CHUNKS),
    "chunks, bf16, offloaded": (1, GQA + HALF + "--offload-key-values " + CHUNKS),
    "chunks, everything": (4, GQA + "--tensor-model-parallel-size 2 --sequence-parallel --ulysses-size 2 "
                                    "--mlp-tile-size 512 --zero-stage 3 " + CHUNKS),
    "zero 0": (4, LLAMA + FULL + "--zero-stage 0 " + SHORT),
    "zero 1, microbatches": (4, GELU + "--zero-stage 1 --global-batch-size 16 " + SHORT),
    "zero 2": (4, LLAMA + "--zero-stage 2 " + SHORT),
    "zero 2, microbatches": (4, LLAMA + "--zero-stage 2 --global-batch-size 16 " + SHORT),
    "zero 3": (4, GELU + "--zero-stage 3 " + SHORT),
    "zero 3, bf16": (4, LLAMA + HALF + "--zero-stage 3 " + SHORT),
    "zero 0, bf16": (4, LLAMA + HALF + "--zero-stage 0 " + SHORT),
}


def resolved(flags: str, world_size: int = 1) -> Run:
    return with_vocab(load_run(f"{flags} --no-shared-memory".split(), world_size)[0], 8192)  # GPUs use collectives, too


#: One case of each formula of the prediction; the others run with the slow tests.
QUICK = {"gqa", "gelu bf16", "full", "selective, window", "head groups", "large loss tile", "offload", "dropout",
         "documents, ulysses", "everything", "chunks, everything", "zero 1, microbatches", "zero 3, bf16"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
                                  for name in CASES])
def test_within_a_tenth_of_the_trace(name: str) -> None:
    world, flags = CASES[name]
    run = resolved(flags, world)
    traced, plan = trace_step(run), predict(run, optimizer=False)
    assert abs(plan.components["weights"] / traced.weights - 1) < 0.01
    assert plan.total + plan.host == pytest.approx(traced.peak, rel=TOLERANCE), (plan.moment, plan.components)


def test_offloaded_optimizer_states_leave_the_device() -> None:
    """A trace on the CPU sees both memories; the host's figure is its own peak, so their sum is a bound."""
    run = resolved(LLAMA + FULL + "--zero-stage 3 --offload-optimizer", 4)
    traced, plan = trace_step(run), predict(run, optimizer=False)
    assert plan.components["weights"] == 0 and plan.host == 2 * traced.weights
    assert traced.peak <= plan.total + plan.host <= 1.15 * traced.peak


def test_components_add_up_and_are_named() -> None:
    plan = predict(resolved(LLAMA))
    assert tuple(plan.components) == COMPONENTS
    assert plan.total == sum(plan.components.values()) and min(plan.components.values()) >= 0


def test_adam_states_are_two_fp32_values_a_parameter_and_sharded() -> None:
    run = resolved(LLAMA)
    weights = Weights.of(run)
    number = 4 * weights.layer + weights.embedding + weights.output
    assert predict(run).components["optimizer states"] == 8 * number
    sharded = resolved(LLAMA + "--zero-stage 1", 4)
    assert predict(sharded).components["optimizer states"] == 2 * number
    sgd = replace(run, optimizer=replace(run.optimizer, optimizer="sgd"))
    assert predict(sgd).components["optimizer states"] == 4 * number


def test_each_technique_saves_memory_at_length() -> None:
    """On the whole, where the layers' own memory is what is large."""
    length = "--seq-length 131072 "
    order = ["", FULL, FULL + "--mlp-tile-size 1024",
             FULL + "--mlp-tile-size 1024 --offload-activations", ]
    found = [predict(resolved(LLAMA + length + flags)).total for flags in order]
    assert found == sorted(found, reverse=True) and found[-1] < found[0] / 5


def test_host_memory_is_what_offload_moves() -> None:
    run = resolved(LLAMA + FULL + "--offload-activations")
    assert predict(run).host == 4 * 4096 * 256 * 4
    half = resolved(LLAMA + FULL + "--offload-activations 0.5")
    assert predict(half).host == 2 * 4096 * 256 * 4
    selective = resolved(LLAMA + "--recompute-granularity selective --offload-activations")
    heads = selective.model.num_attention_heads
    assert predict(selective).host == 4 * 4096 * (2 * 256 + heads) * 4  # also attention's output and log-sum-exp


def test_pipeline_takes_the_fullest_rank() -> None:
    run = resolved(LLAMA + "--pipeline-model-parallel-size 4 --global-batch-size 8", 4)
    assert predict(run).rank in (0, 3)  # most microbatches in flight, or the loss
    fewer = resolved(LLAMA + "--pipeline-model-parallel-size 4 --global-batch-size 1", 4)
    assert predict(fewer).total < predict(run).total


def test_the_plan_says_that_attention_dropout_is_slow() -> None:
    assert predict(resolved(LLAMA)).notes == ()
    (note,) = predict(resolved(LLAMA + "--attention-dropout 0.1")).notes
    assert "several times slower" in note and "Give --attention-dropout 0" in note


def test_the_block_method_recomputes_the_first_layers_of_each_stage() -> None:
    """Rank 0 has stages of 1 and 3 layers. With 2 recomputed layers per stage, one of its 4 layers keeps everything."""
    run = resolved(LLAMA + FULL + "--recompute-method block --recompute-num-layers 2 --num-layers 6 "
                   "--pipeline-layers 1 1 3 1 --pipeline-model-parallel-size 2 --pipeline-schedule interleaved "
                   "--global-batch-size 4", 2)
    inputs_only = run.data.seq_length * run.model.hidden_size * 4
    assert [kept == inputs_only for kept, _ in _Rank(run, 0, "cpu", True).layer_sets()] == [True, True, True, False]


def test_stage_3_holds_the_weights_of_all_layers_that_are_recomputed_together() -> None:
    layer = 4 * Weights.of(resolved(LLAMA)).layer
    for unit, layers in ((1, 3), (2, 3), (4, 4)):  # these small layers are gathered two ahead
        run = resolved(LLAMA + FULL + f"--recompute-num-layers {unit} --zero-stage 3", 2)
        gathered = dict(_Rank(run, 0, "cpu", True).moments())[f"backward of layer {4 - unit}"]["gathered weights"]
        assert gathered == layers * layer


def test_grouped_heads_in_fp32_are_copied_on_a_gpu_alone() -> None:
    """torch has no fused kernel for them there; see ``SDPACore``."""
    def kept(flags: str, device: str) -> int:
        plan = predict(resolved(flags + "--seq-length 65536 --loss-tile-size 128"), device=device)
        return plan.components["kept activations"]

    layers = 3  # the peak is in the backward of the last one, which counts as the layer's working set
    assert kept(GQA, "gpu") - kept(GQA, "cpu") == layers * 2 * 65536 * (256 - 64) * 4
    assert kept(LLAMA, "gpu") == kept(LLAMA, "cpu") and kept(GQA + HALF, "gpu") == kept(GQA + HALF, "cpu")


def test_needs_no_torch() -> None:
    code = "import sys, megatron_sp.plan.memory; sys.exit('torch' in sys.modules)"
    root = Path(__file__).resolve().parents[3]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60).returncode == 0
