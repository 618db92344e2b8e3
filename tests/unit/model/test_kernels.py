"""The choice of kernels, the messages when a named one is missing, and compiled layers, which compute the same."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from megatron_sp import torch_internals
from megatron_sp.config.load import load_run
from megatron_sp.config.rules.checks import check_problems
from megatron_sp.errors import ConfigError
from megatron_sp.layout.masks.attention_mask import CAUSAL, AttentionMask
from megatron_sp.model import norm_kernels
from megatron_sp.model.attention import block_kernels, cores
from megatron_sp.model.attention.block_kernels import (
    CPUFlashBlockKernel,
    GPUFlashBlockKernel,
    UnfusedBlockKernel,
    agrees_with_unfused,
    choose_block_kernel,
)
from megatron_sp.model.attention.cores import SDPACore, gpu_form
from megatron_sp.model.child_trials import Outcome
from megatron_sp.model.context import Context
from megatron_sp.model.kernels import choose_kernels, kernels_in_words
from megatron_sp.model.norm import rms_norm
from megatron_sp.model.norm_kernels import PACKAGES, choose_norm_kernels
from megatron_sp.train.optimizer import local_part
from tests.helpers.configs import STYLES, tiny_run
from tests.helpers.spawn import run_ranks

TRAINING = ("--mock-data --tokenizer-type NullTokenizer --vocab-size 97 --seq-length 32 --train-iters 1 --lr 1e-3 "
            "--attention-dropout 0")
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("choice", ["apex", "liger"])
def test_a_named_kernel_that_is_not_there_is_a_mistake(choice: str) -> None:
    with pytest.raises(ConfigError, match=f"--fused-kernels {choice} needs a GPU"):
        choose_norm_kernels(choice, CPU)
    with pytest.raises(ConfigError, match=f"--fused-kernels {choice} needs the package {PACKAGES[choice][1][:4]}"):
        choose_norm_kernels(choice, GPU)
    assert choose_norm_kernels("auto", GPU) == choose_norm_kernels("torch", CPU)


@pytest.mark.parametrize("offset, used", [(0.0, "apex"), (0.2, "torch")])
def test_auto_takes_a_package_that_agrees(monkeypatch: pytest.MonkeyPatch, offset: float, used: str) -> None:
    """An installed package may be of a version whose functions compute something else."""
    package = SimpleNamespace(
        fused_rms_norm_affine=lambda x, weight, shape, eps: F.rms_norm(x, tuple(shape), weight + offset, eps),
        fused_layer_norm_affine=lambda x, weight, bias, shape, eps: F.layer_norm(x, tuple(shape), weight, bias, eps))
    monkeypatch.setitem(sys.modules, "apex", package)
    monkeypatch.setitem(sys.modules, PACKAGES["apex"][0], package)
    monkeypatch.setattr(norm_kernels, "require_gpu", lambda flag, device: None)

    def in_this_process(trial: str, names: Sequence[str], given: Mapping[str, Any]) -> dict[str, Outcome]:
        assert trial == "megatron_sp.model.norm_kernels:try_norms"
        return {name: norm_kernels.try_norms(name, **given) for name in names}

    chosen = norm_kernels._first_that_agrees(CPU, in_this_process)
    assert chosen.name == used
    assert chosen.warnings == (() if used == "apex" else (
        "the norm kernel of apex gives wrong results. It is not used.",))


@pytest.mark.parametrize("is_here", [True, False])
def test_machines_with_different_packages_agree_on_the_norms(monkeypatch: pytest.MonkeyPatch, is_here: bool) -> None:
    """The machine without the package must take part in the exchange too; the others would wait for it."""
    passed = {"apex": Outcome(True)}
    other: dict[str, Outcome] = {} if is_here else passed
    monkeypatch.setattr(norm_kernels, "_may_be_installed", lambda name: is_here and name == "apex")
    monkeypatch.setattr(norm_kernels, "gather_objects", lambda mine: [mine, other])
    chosen = norm_kernels._first_that_agrees(CPU, lambda trial, names, given: {name: passed[name] for name in names})
    assert chosen == norm_kernels.NormKernels(
        warnings=("the norm kernel of apex is not installed on all machines. It is not used.",))


def test_norms_are_tried_on_the_gpu_of_their_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert norm_kernels.try_norms("apex", device="cuda:3").missing
    assert current == [torch.device("cuda:3")]


def test_the_log_says_how_a_run_attends_inside_documents() -> None:
    run = tiny_run([*STYLES["llama"].split(), "--reset-attention-mask"])
    words = kernels_in_words(run, choose_kernels(run, CPU))
    assert "scaled_dot_product_attention inside documents (one call for each);" in words
    ring = load_run(f"{STYLES['llama']} {TRAINING} --ring-size 2 --reset-attention-mask".split(), 2)[1]
    assert any("balances whole sequences and not documents" in note for note in ring)


@pytest.mark.parametrize("dtype, head_dim, has_flash, form", [
    (torch.bfloat16, 128, True, "grouped heads"), (torch.float16, 36, True, "grouped heads"),
    (torch.bfloat16, 256, True, "copied heads"), (torch.bfloat16, 128, False, "copied heads"),
    (torch.bfloat16, 36, False, "query blocks"), (torch.bfloat16, 260, True, "query blocks"),
    (torch.float32, 64, True, "copied heads"), (torch.float32, 66, True, "query blocks"),
    (torch.float64, 64, True, "query blocks")])
def test_attention_on_a_gpu_never_needs_the_kernel_that_forms_a_square(dtype: torch.dtype, head_dim: int,
                                                                       has_flash: bool, form: str) -> None:
    """torch's memory-efficient kernel takes no grouped heads, and without it torch forms an [s, s] tensor silently."""
    assert gpu_form(dtype, head_dim, has_flash=has_flash) == form


@pytest.mark.parametrize("dtype, heads", [(torch.bfloat16, 2), (torch.float32, 4)])
def test_grouped_heads_reach_a_gpus_kernel_in_the_form_it_takes(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype,
                                                                heads: int) -> None:
    seen: list[tuple[int, int, bool]] = []

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.append((k.shape[2], v.shape[2], torch.backends.cuda.math_sdp_enabled()))
        return q

    monkeypatch.setattr(cores, "_sdpa", sdpa)
    with FakeTensorMode():  # tensors of a GPU, without values
        q, k, v = (torch.empty(1, 8, n, 64, dtype=dtype, device="cuda") for n in (4, 2, 2))
        SDPACore()(q, k, v)
    assert seen == [(heads, heads, False)]


def test_a_ring_that_attends_unfused_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_block_kernel(CPU, torch.float32, 16).warnings == ()
    monkeypatch.setattr(block_kernels, "agrees_with_unfused", lambda *arguments: False)
    for dtype, head_dim, words in ((torch.float32, 64, "half precision only. Give --bf16"),
                                   (torch.bfloat16, 36, "multiples of 8 up to 256, and this model has 36"),
                                   (torch.bfloat16, 64, "operators are missing or have changed")):
        chosen = choose_block_kernel(GPU, dtype, head_dim)
        assert isinstance(chosen.kernel, UnfusedBlockKernel)
        assert words in chosen.warnings[0] and "many times slower" in chosen.warnings[0]
    monkeypatch.setattr(torch_internals, "CPU_FLASH_OPERATORS", ("_renamed",))
    run = tiny_run([*STYLES["llama"].split(), "--ring-size", "2"], 2)
    kernels = choose_kernels(run, CPU)
    assert "unfused in query blocks (blocks of a ring)" in kernels_in_words(run, kernels)
    assert "the ring attends unfused" in kernels.warnings[0]


def test_a_ring_is_named_by_its_blocks() -> None:
    run = tiny_run([*STYLES["llama"].split(), "--ring-size", "2"], 2)
    words = kernels_in_words(run, choose_kernels(run, CPU))
    assert words.startswith("kernels: attention torch's fused attention (blocks of a ring);")
    flags = f"{STYLES['llama']} {TRAINING} --ring-size 2 --attention-core unfused"
    assert any("--attention-core unfused has no effect with --ring-size 2" in note
               for note in load_run(flags.split(), 2)[1])


@pytest.mark.parametrize("flags, words", [
    ("--attention-core flash", "flash computes in half precision"),
    ("--attention-core flash --bf16 --attention-dropout 0.1", "flash cannot drop attention probabilities"),
])
def test_what_kernels_cannot_do_is_said_before_the_start(flags: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tiny_run([*STYLES["llama"].split(), *flags.split()])


def test_one_line_says_what_is_in_use() -> None:
    run = tiny_run(STYLES["llama"].split())
    assert check_problems(run) == []
    assert kernels_in_words(run, choose_kernels(run, CPU)) == (
        "kernels: attention torch's scaled_dot_product_attention; norms torch; optimizer torch (fused); "
        "layers not compiled")
    dropping = tiny_run([*STYLES["llama"].split(), "--attention-dropout", "0.1"])
    assert ("unfused in query blocks, several times slower than fused attention, because of --attention-dropout 0.1 "
            "(--attention-dropout 0 makes it fast)") in kernels_in_words(dropping, choose_kernels(dropping, CPU))


def test_importing_the_model_imports_no_optional_package_and_compiles_nothing() -> None:
    """torch's pipelining imports triton where it is installed, as with GPU builds of torch; that does not count."""
    program = ("import sys, torch, torch.distributed.fsdp, torch.distributed.pipelining; before = set(sys.modules); "
               "import megatron_sp.model.build, megatron_sp.train.trainer; "
               "print([m for m in ('flash_attn', 'apex', 'liger_kernel', 'triton', 'torch._inductor.compile_fx') "
               "if m in sys.modules and m not in before])")
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True,
                          ).stdout.strip() == "[]"


def test_a_kernel_is_only_trusted_after_a_trial() -> None:
    assert agrees_with_unfused(UnfusedBlockKernel(), CPU)
    assert agrees_with_unfused(CPUFlashBlockKernel(), CPU)
    assert not agrees_with_unfused(GPUFlashBlockKernel(), CPU)  # its operators do not run here

    class Wrong(UnfusedBlockKernel):
        def forward(self, *args: object) -> tuple[torch.Tensor, torch.Tensor]:
            o, lse = super().forward(*args)  # type: ignore[arg-type]
            return o, lse + 0.5

    assert not agrees_with_unfused(Wrong(), CPU)


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
            logits = model(positions % 97, Context(positions, torch.zeros(1, dtype=torch.int64)))
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


@pytest.mark.slow
def test_a_compiled_layer_computes_the_same() -> None:
    """By itself and with the Ulysses exchange; of equally many tokens a rank, so that most kernels are shared."""
    layouts = ["--seq-length 32 --hidden-dropout 0.1", "--ulysses-size 2"]
    for found, graphs in run_ranks(compiled_layer, 2, layouts, timeout=240):
        assert len(found) == 2 and max(found.values()) < 1e-4, found
        assert graphs >= 2


COMPILED = ["", "--bf16", "--qk-layernorm", "--mlp-tile-size 8", "--recompute-granularity full",
            "--attention-head-groups 2", "--reset-attention-mask", "--hidden-dropout 0.1"]


def graphs_by_depth(layouts: list[str]) -> dict[str, list[int]]:
    """On a rank: the number of graphs that models of 2 and of 10 layers are compiled to, by layout."""
    from torch._dynamo.utils import counters

    from megatron_sp.model.build import build_model
    from megatron_sp.parallel.mesh import ParallelMesh

    found: dict[str, list[int]] = {}
    for layout in layouts:
        found[layout] = []
        for depth in (2, 10):
            torch._dynamo.reset()
            counters.clear()
            flags = (f"{STYLES['llama']} --compile --hidden-size 16 --num-attention-heads 2 --num-key-value-heads 2 "
                     f"{layout} --seq-length 32 --num-layers {depth}")
            run = tiny_run(flags.split(), torch.distributed.get_world_size())
            mesh = ParallelMesh.build(run.parallel)
            with mock.patch.object(torch, "compile", functools.partial(torch.compile, backend="eager")):
                model = build_model(run, mesh)
            positions = torch.arange(32 // mesh.size("sp")).unsqueeze(0)
            for step in range(2):
                mask = AttentionMask(((0, 5 + step),)) if run.data.reset_attention_mask else CAUSAL
                model(positions, Context(positions, torch.tensor([step]), mask), labels=positions).sum().backward()
                model.zero_grad()
            found[layout].append(counters["stats"]["unique_graphs"])
            mesh.destroy()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world, layouts", [(1, COMPILED), (2, ["--ulysses-size 2", "--zero-stage 3 --bf16",
                                                                "--tensor-model-parallel-size 2 --sequence-parallel"])])
def test_equal_layers_are_compiled_once(world: int, layouts: list[str]) -> None:
    """torch compiles a function anew for another object at most 8 times. Layer 9 would then run uncompiled."""
    for found in run_ranks(graphs_by_depth, world, layouts, timeout=240):
        for layout, (two, ten) in found.items():
            assert 1 <= two == ten, (layout, two, ten)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world, flags", [(1, ""), (2, "--ulysses-size 2 --zero-stage 3"),
                                          (1, "--recompute-granularity full --hidden-dropout 0.1")])
def test_compiled_layers_compute_the_same(world: int, flags: str) -> None:
    assert max(run_ranks(compiled_against_eager, world, flags, timeout=800)) < 1e-4
