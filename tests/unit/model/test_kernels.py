"""Kernels of other packages are asked for by name and missed by name; compiled layers compute the same."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_sp.config.load import load_run
from megatron_sp.config.rules.checks import check_problems
from megatron_sp.errors import ConfigError
from megatron_sp.model import other_kernels as kernels
from megatron_sp.model.attention import cores as attention_core
from megatron_sp.model.attention.block_kernels import FlashKernel, GPUFlashKernel, PlainKernel, agrees_with_plain
from megatron_sp.model.attention.cores import UnfusedCore, build_core
from megatron_sp.model.build import kernels_in_words
from megatron_sp.model.norm import rms_norm
from megatron_sp.model.other_kernels import PACKAGES, norm_kernels
from megatron_sp.parallel.random import Dropout
from megatron_sp.train.optimizer import local_part
from tests.helpers.configs import STYLES, tiny_run
from tests.helpers.spawn import run_ranks

TRAINING = ("--mock-data --tokenizer-type NullTokenizer --vocab-size 97 --seq-length 32 --train-iters 1 --lr 1e-3 "
            "--attention-dropout 0")
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("choice", ["apex", "liger"])
def test_a_named_kernel_that_is_not_there_is_a_mistake(choice: str) -> None:
    with pytest.raises(ConfigError, match=f"--fused-kernels {choice} needs a GPU"):
        norm_kernels(choice, CPU)
    with pytest.raises(ConfigError, match=f"--fused-kernels {choice} needs the package {PACKAGES[choice][1][:4]}"):
        norm_kernels(choice, GPU)
    assert norm_kernels("auto", GPU) == norm_kernels("torch", CPU)


@pytest.mark.parametrize("offset, used", [(0.0, "apex"), (0.2, "torch")])
def test_auto_takes_a_package_that_agrees(monkeypatch: pytest.MonkeyPatch, offset: float, used: str) -> None:
    """A package of another version may be there and mean something else."""
    package = SimpleNamespace(
        fused_rms_norm_affine=lambda x, weight, shape, eps: F.rms_norm(x, tuple(shape), weight + offset, eps),
        fused_layer_norm_affine=lambda x, weight, bias, shape, eps: F.layer_norm(x, tuple(shape), weight, bias, eps))
    monkeypatch.setitem(sys.modules, PACKAGES["apex"][0], package)
    monkeypatch.setattr(kernels, "_require_gpu", lambda flag, device: None)
    assert kernels._found_norms(CPU).name == used


@pytest.mark.parametrize("function, used", [
    (lambda q, k, v, causal: UnfusedCore()(q, k, v, causal=causal), True),
    (lambda q, k, v, causal: UnfusedCore()(q, k, v, causal=not causal), False),
    (lambda q, k, v: q, False)])
def test_auto_takes_flash_attention_that_agrees(monkeypatch: pytest.MonkeyPatch, function: Any, used: bool) -> None:
    monkeypatch.setattr(attention_core, "flash_attention", lambda device: ("flash attention 9", function))
    assert (attention_core.found_flash(CPU, 32) is not None) is used
    monkeypatch.setattr(attention_core, "flash_attention", lambda device: (kernels.TORCH_FLASH, function))
    assert attention_core.found_flash(CPU, 32) is None


def test_a_ring_is_named_by_its_blocks() -> None:
    run = tiny_run([*STYLES["llama"].split(), "--ring-size", "2"], 2)
    assert kernels_in_words(run, CPU).startswith("kernels: attention torch's fused attention (blocks of a ring);")
    flags = f"{STYLES['llama']} {TRAINING} --ring-size 2 --attention-core unfused"
    assert any("--attention-core unfused has no effect with --ring-size 2" in note
               for note in load_run(flags.split(), 2)[1])


def test_flash_is_refused_without_a_gpu_and_with_dropout() -> None:
    with pytest.raises(ConfigError, match="--attention-core flash needs a GPU"):
        build_core("flash", dropout=False, device=CPU)


@pytest.mark.parametrize("flags, words", [
    ("--compile --hidden-dropout 0.1", "--compile needs --attention-dropout 0"),
    ("--attention-core flash", "flash computes in half precision"),
    ("--attention-core flash --bf16 --attention-dropout 0.1", "flash cannot drop attention probabilities"),
])
def test_what_kernels_cannot_do_is_said_before_the_start(flags: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tiny_run([*STYLES["llama"].split(), *flags.split()])


def test_one_line_says_what_is_in_use() -> None:
    run = tiny_run(STYLES["llama"].split())
    assert check_problems(run) == []
    assert kernels_in_words(run, CPU) == ("kernels: attention torch's scaled_dot_product_attention; norms torch; "
                                          "optimizer torch (fused); layers not compiled")
    dropping = tiny_run([*STYLES["llama"].split(), "--attention-dropout", "0.1"])
    assert "unfused in query blocks" in kernels_in_words(dropping, CPU)


def test_importing_the_model_imports_no_optional_package_and_compiles_nothing() -> None:
    program = ("import sys, megatron_sp.model.build, megatron_sp.train.trainer; "
               "print([m for m in ('flash_attn', 'apex', 'liger_kernel', 'triton', 'torch._inductor.compile_fx') "
               "if m in sys.modules])")
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True,
                          ).stdout.strip() == "[]"


def test_a_kernel_is_only_trusted_after_a_trial() -> None:
    assert agrees_with_plain(PlainKernel(), CPU)
    assert agrees_with_plain(FlashKernel(), CPU)
    assert not agrees_with_plain(GPUFlashKernel(), CPU)  # its operators do not run here

    class Wrong(PlainKernel):
        def forward(self, *args: object) -> tuple[torch.Tensor, torch.Tensor]:
            o, lse = super().forward(*args)  # type: ignore[arg-type]
            return o, lse + 0.5

    assert not agrees_with_plain(Wrong(), CPU)


@pytest.mark.parametrize("shape", [(2, 300, 48), (1, 5, 3, 16)])
def test_cached_rms_norm_equals_torchs(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.randn(shape[-1], dtype=torch.float64, generator=generator).requires_grad_()
    grad = torch.randn(shape, dtype=torch.float64, generator=generator)
    want = F.rms_norm(x, shape[-1:], weight, 1e-5)
    got = rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(got, want)
    for a, b in zip(torch.autograd.grad(got, (x, weight), grad), torch.autograd.grad(want, (x, weight), grad)):
        torch.testing.assert_close(a, b)


def compiled_against_eager(flags: str) -> float:
    """Worst relative difference of loss and gradients, fp32."""
    from megatron_sp.model.build import build_model
    from megatron_sp.parallel.mesh import ParallelMesh

    found = []
    for extra in ("", "--compile"):
        run = tiny_run([*STYLES["llama"].split(), *flags.split(), *extra.split()], torch.distributed.get_world_size())
        mesh = ParallelMesh.build(run.parallel)
        model = build_model(run, mesh)
        share = run.data.seq_length // mesh.size("sp")
        positions = (torch.arange(share) + mesh.rank("sp") * share).unsqueeze(0)
        for _ in range(2):  # the second is without compilation
            model.zero_grad()
            logits = model(positions % 97, positions, torch.tensor([0]))
            logits.square().mean().backward()
        found.append([local_part(p.grad) for p in model.parameters() if p.grad is not None])
    return max(float((a - b).abs().max() / (b.abs().max() + 1e-12)) for a, b in zip(found[1], found[0]))


def compiled_layer(layouts: list[str]) -> tuple[dict[str, float], int]:
    """On a rank: the same of one tiny layer, by layout, and the number of graphs that were compiled.

    In this process only and without trials of the CPU, which would take longer than the layer.
    """
    import torch._inductor.config as inductor
    from torch._dynamo.utils import counters

    inductor.compile_threads, inductor.cpp.vec_isa_ok = 1, True
    tiny = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --num-key-value-heads 2"
    found = {layout: compiled_against_eager(f"{tiny} {layout}") for layout in layouts}
    return found, counters["stats"]["unique_graphs"]


def test_a_compiled_layer_computes_the_same() -> None:
    """By itself and with the Ulysses exchange; of equally many tokens a rank, so that most kernels are shared."""
    for found, graphs in run_ranks(compiled_layer, 2, ["--seq-length 32", "--ulysses-size 2"], timeout=240):
        assert len(found) == 2 and max(found.values()) < 1e-4, found
        assert graphs >= 2


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world, flags", [(1, ""), (2, "--ulysses-size 2 --zero-stage 3"),
                                          (1, "--recompute-granularity full")])
def test_compiled_layers_compute_the_same(world: int, flags: str) -> None:
    assert max(run_ranks(compiled_against_eager, world, flags, timeout=800)) < 1e-4


def test_dropout_masks_of_a_long_sequence_are_cheap_to_name() -> None:
    """A mask per sample, head and query block: naming it must cost little beside drawing it."""
    dropout = Dropout(0.1, 1234, "0/attention")
    keep = dropout.keep((512, 64), CPU, 7, 3, 0)
    assert keep.shape == (512, 64) and torch.equal(keep, dropout.keep((512, 64), CPU, 7, 3, 0))
