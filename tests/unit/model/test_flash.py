"""Versions of fused attention: which are tried, which one a run uses, and that only that one is ever activated."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_sp.errors import ConfigError
from megatron_sp.model import kernels
from megatron_sp.model.attention import cores, flash, flash_trial
from megatron_sp.model.attention.block_kernels import (
    ChosenBlockKernel,
    CPUFlashBlockKernel,
    GPUFlashBlockKernel,
    UnfusedBlockKernel,
)
from megatron_sp.model.attention.cores import FlashCore, SDPACore, UnfusedCore, choose_core
from megatron_sp.model.attention.flash import (
    FlashAttention,
    FlashSearch,
    Wanted,
    choose_version,
    find_flash_attention,
    load,
    version_names,
)
from megatron_sp.model.attention.unfused import block_attention
from megatron_sp.model.child_trials import Outcome
from megatron_sp.model.kernels import choose_kernels, kernels_in_words
from tests.helpers.configs import STYLES, tiny_run

CPU, GPU = torch.device("cpu"), torch.device("cuda")
WANTED = Wanted("bfloat16", 32)
HALF_RUN = [*STYLES["llama"].split(), "--bf16", "--seq-length", "64"]


def right(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    return block_attention(q, k, v, 0, causal, None)[0]


def masks_wrongly(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    return block_attention(q, k, v, 0, not causal, None)[0]


def raises(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> torch.Tensor:
    raise RuntimeError("no kernel image is available for execution on the device")


def each_document(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor,
                  longest: int, window: int = 0) -> torch.Tensor:
    """Stand in for a package's variable-length kernel."""
    ends = lengths.tolist()
    return torch.cat([right(q[None, start:stop], k[None, start:stop], v[None, start:stop], True)[0]
                      for start, stop in zip(ends, ends[1:])])


def joined_documents(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> torch.Tensor:
    return right(q[None], k[None], v[None], True)[0]


# ---------------------------------------------------------------- one trial

def outcome_of(monkeypatch: pytest.MonkeyPatch, version: FlashAttention, wanted: Wanted = WANTED,
               name: str = "FA2") -> Outcome:
    monkeypatch.setattr(flash_trial, "load", lambda name: version)
    monkeypatch.setattr(flash_trial, "TIMED_TOKENS", 16)
    return flash_trial.try_version(name, wanted=vars(wanted), device="cpu")


def test_a_trial_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = outcome_of(monkeypatch, FlashAttention("right", right))
    assert passed.passed and passed.found["seconds"] > 0 and passed.found["varlen"] is False
    assert outcome_of(monkeypatch, FlashAttention("wrong", masks_wrongly)) == Outcome(False, "gives wrong results")
    assert outcome_of(monkeypatch, FlashAttention("raises", raises)) == Outcome(
        False, "raises RuntimeError: no kernel image is available for execution on the device")


@pytest.mark.parametrize("varlen, documents, kept", [(each_document, True, True), (joined_documents, True, False),
                                                     (raises, True, False), (each_document, False, False)])
def test_a_kernel_for_documents_has_a_trial_of_its_own(monkeypatch: pytest.MonkeyPatch, varlen: Any, documents: bool,
                                                       kept: bool) -> None:
    """Where it fails, the version attends to one document after another, and stays in use."""
    outcome = outcome_of(monkeypatch, FlashAttention("right", right, varlen), Wanted("bfloat16", 32,
                                                                                     documents=documents))
    assert outcome.passed and outcome.found["varlen"] is kept


@pytest.mark.parametrize("name, kernel, passes", [
    ("FA4", UnfusedBlockKernel(), True), ("FA4", GPUFlashBlockKernel(), False), ("FA2", GPUFlashBlockKernel(), True)])
def test_a_version_that_takes_torchs_place_must_compute_blocks_too(monkeypatch: pytest.MonkeyPatch, name: str,
                                                                   kernel: Any, passes: bool) -> None:
    """Block kernels call torch's operators, which then are those of the version."""
    monkeypatch.setattr(flash_trial, "gpu_kernels", lambda: (kernel,))  # that of a GPU does not run here
    outcome = outcome_of(monkeypatch, FlashAttention("a version", right), Wanted("bfloat16", 32, blocks=True), name)
    assert outcome.passed is passes and ("blocks of keys" in outcome.why) is not passes
    only_blocks = Wanted("bfloat16", 32, whole=False, blocks=True)
    assert outcome_of(monkeypatch, FlashAttention("a version", raises), only_blocks, "torch").passed is (
        kernel.description == UnfusedBlockKernel.description)


def test_a_package_that_is_not_installed_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert flash_trial.try_version("FA2", wanted=vars(WANTED), device="cpu") == Outcome(False, missing=True)


@pytest.mark.parametrize("knows_groups", [True, False])
def test_torchs_kernel_for_documents_gets_what_it_takes(monkeypatch: pytest.MonkeyPatch, knows_groups: bool) -> None:
    """From torch 2.12 on it takes grouped heads and wants to be told; before, each query head needs a copy."""
    from torch.nn.attention import varlen

    def new(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, max_q: int,
            max_k: int, *, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False) -> torch.Tensor:
        assert enable_gqa == (q.shape[1] != k.shape[1]) and window_size == (-1, 0)
        assert cu_q.dtype == torch.int32 and cu_q is cu_k and max_q == max_k
        return each_document(q, k, v, cu_q, max_q)

    def old(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, max_q: int,
            max_k: int, *, window_size: tuple[int, int] = (-1, -1)) -> torch.Tensor:
        assert q.shape[1] == k.shape[1]
        return new(q, k, v, cu_q, cu_k, max_q, max_k, window_size=window_size)

    monkeypatch.setattr(varlen, "varlen_attn", new if knows_groups else old)
    assert flash.passes_varlen_trial(flash.torch_varlen, CPU, torch.bfloat16, 16)


def test_the_operators_of_a_ring_take_grouped_heads_as_they_are() -> None:
    """Their shapes and arguments, by torch's own description of them; ``tests/gpu`` has their values."""
    kernel = GPUFlashBlockKernel()
    q, k, v = (torch.empty(2, 24, heads, 64, dtype=torch.bfloat16, device="meta") for heads in (8, 2, 2))
    o, lse = kernel.forward(q[:, 12:], k, v, False)
    gradients = kernel.backward(o, q[:, 12:], k, v, o, lse, False)
    assert o.shape == (2, 12, 8, 64) and lse.shape == (2, 8, 12) and lse.dtype == torch.float32
    assert [tuple(x.shape) for x in gradients] == [(2, 12, 8, 64), (2, 24, 2, 64), (2, 24, 2, 64)]


# ---------------------------------------------------------------- the choice

def fine(seconds: float, varlen: bool = True) -> Outcome:
    return Outcome(True, found={"seconds": seconds, "varlen": varlen})


NAMES = ["FA4", "FA3", "FA2", "cuDNN", "torch"]
MISSING, WRONG = Outcome(False, missing=True), Outcome(False, "gives wrong results")


@pytest.mark.parametrize("ranks, documents, best, failed", [
    ([[fine(2), fine(1), MISSING, fine(3), fine(4)]], False, "FA3", 0),
    ([[fine(1), fine(1), fine(1), fine(1), fine(1)]], False, "FA4", 0),
    ([[WRONG, MISSING, fine(3), fine(2), fine(4)]], False, "cuDNN", 1),
    ([[fine(1, varlen=False), MISSING, fine(2), MISSING, fine(3)]], True, "FA2", 0),
    ([[fine(1, varlen=False), MISSING, fine(2), MISSING, fine(3)]], False, "FA4", 0),
    # One rank alone cannot use FA4, one is slow with FA3: all ranks use the same.
    ([[fine(1), fine(2), MISSING, MISSING, fine(4)], [WRONG, fine(5), MISSING, MISSING, fine(4)]], False, "torch", 1),
    ([[MISSING, fine(2), MISSING, MISSING, WRONG], [MISSING, MISSING, MISSING, MISSING, WRONG]], False, None, 2)])
def test_all_ranks_use_the_fastest_version_that_is_right(ranks: list[list[Outcome]], documents: bool,
                                                         best: str | None, failed: int) -> None:
    chosen, failures = choose_version(NAMES, [dict(zip(NAMES, outcomes, strict=True)) for outcomes in ranks],
                                      Wanted("bfloat16", 32, documents=documents))
    assert chosen == best and len(failures) == failed


def test_a_kernel_of_torch_that_does_not_take_the_input_is_no_fault() -> None:
    outcome = Outcome(False, "raises RuntimeError: No available kernel. Aborting execution")
    assert choose_version(["cuDNN"], [{"cuDNN": outcome}], WANTED) == (None, ())


class Registry:
    """Stands in for torch's registry and notes what is done with it, and when block kernels are tried."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, outcomes: Mapping[str, Outcome]):
        self.events: list[str] = []
        self.active: str | None = None
        self.outcomes = outcomes
        for name, function in {"list_flash_attention_impls": lambda: ["FA3", "FA4"],
                               "activate_flash_attention_impl": self.activate,
                               "current_flash_attention_impl": lambda: self.active,
                               "restore_flash_attention_impl": lambda: self.activate(None)}.items():
            monkeypatch.setattr(flash.attention, name, function, raising=False)
        monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_func=right))
        monkeypatch.setattr(kernels, "find_flash_attention", partial(find_flash_attention, attempt=self.attempt))
        monkeypatch.setattr(kernels, "adds_products_in_fp32", lambda device: False)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        choose = kernels.choose_block_kernel

        def choose_block_kernel(device: torch.device, *given: Any, **how: Any) -> ChosenBlockKernel:
            self.events.append(f"blocks with {self.active}")
            return choose(CPU, *given, **how)

        monkeypatch.setattr(kernels, "choose_block_kernel", choose_block_kernel)
        monkeypatch.setattr(kernels, "try_flex", lambda *given: None)

    def activate(self, name: str | None) -> None:
        self.active = name
        self.events.append(f"activate {name}")

    def attempt(self, trial: str, names: Sequence[str], given: Mapping[str, Any]) -> dict[str, Outcome]:
        assert trial == "megatron_sp.model.attention.flash_trial:try_version" and Wanted(**given["wanted"])
        self.events.append("try " + " ".join(names))
        return {name: self.outcomes.get(name, MISSING) for name in names}


TRY_ALL = "try FA4 FA3 FA2 cuDNN torch"


@pytest.mark.parametrize("outcomes, flags, world, events", [
    ({"FA4": WRONG, "FA3": fine(1), "FA2": fine(2), "torch": fine(3)}, "", 1, [TRY_ALL, "activate FA3"]),
    ({"FA4": fine(3), "FA2": fine(1), "torch": fine(2)}, "", 1, [TRY_ALL]),
    ({"FA3": fine(1), "torch": fine(2)}, "--attention-pattern bigbird --attention-block-size 8", 1,
     [TRY_ALL, "activate FA3", "blocks with FA3"]),
    ({"FA3": fine(1, varlen=False), "torch": fine(2)}, "--window-size 16", 1,
     [TRY_ALL, "activate FA3", "blocks with FA3"]),
    ({"FA4": fine(1), "torch": fine(2)}, "--ring-size 2", 2, ["try FA4 FA3 torch", "activate FA4", "blocks with FA4"]),
    ({"FA4": WRONG, "torch": fine(2)}, "--ring-size 2", 2, ["try FA4 FA3 torch", "blocks with None"]),
    ({"FA4": fine(1)}, "--attention-core sdpa --ring-size 2", 2, ["blocks with None"]),
    ({"FA4": fine(1)}, "--attention-core sdpa", 1, []), ({"FA4": fine(1)}, "--attention-core unfused", 1, []),
    ({"FA4": fine(1)}, "--attention-dropout 0.1", 1, [])])
def test_only_the_chosen_version_is_activated_once_and_before_block_kernels(
        monkeypatch: pytest.MonkeyPatch, outcomes: dict[str, Outcome], flags: str, world: int,
        events: list[str]) -> None:
    """Activating one changes the operators that all others call."""
    registry = Registry(monkeypatch, outcomes)
    choose_kernels(tiny_run([*HALF_RUN, *flags.split()], world), GPU)
    assert registry.events == events


def test_a_ring_names_the_version_that_computes_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    Registry(monkeypatch, {"FA4": WRONG, "FA3": fine(1), "torch": fine(2)})
    run = tiny_run([*HALF_RUN, "--ring-size", "2"], 2)
    chosen = choose_kernels(run, GPU)
    assert "attention flash attention 3 (through torch) (blocks of a ring);" in kernels_in_words(run, chosen)
    assert chosen.warnings == ("in trials at head width 16 on this GPU, flash attention 4 (through torch) gives wrong "
                               "results. The run uses flash attention 3 (through torch) instead.",)


def test_a_version_that_loads_only_in_its_trial_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(monkeypatch, {"FA2": fine(1)})
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(ConfigError, match="flash attention 2 .* cannot be loaded in this one.*--attention-core sdpa"):
        find_flash_attention(WANTED, GPU, attempt=registry.attempt)


def test_versions_are_listed_newest_first_and_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(monkeypatch, {})
    assert version_names() == NAMES and registry.events == []
    assert [flash.describe(name) for name in version_names()] == [
        "flash attention 4 (through torch)", "flash attention 3 (through torch)", "flash attention 2 (flash-attn)",
        "cuDNN's attention (through torch)", "torch's flash attention"]
    load("FA3")
    assert flash.active_version() == "flash attention 3 (through torch)"
    load("cuDNN")  # calls torch's own operators
    assert flash.active_version() == "" and registry.events == ["activate FA3", "activate None"]


# ---------------------------------------------------------------- the core and its warnings

def test_flash_attention_that_failed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    how: dict[str, Any] = {"dropout": False, "device": GPU, "dtype": torch.bfloat16, "head_dim": 32}
    crash = "crashes the process that tries it (SIGSEGV)"
    found = FlashAttention("flash attention 2", right)
    failed = (("flash attention 4", crash), ("flash attention 3", crash), ("cuDNN's attention", "gives wrong results"))
    chosen = choose_core("auto", search=FlashSearch(found, failed), **how)
    assert isinstance(chosen.core, FlashCore) and chosen.core.description == "flash attention 2"
    assert chosen.warnings == (
        f"in trials at head width 32 on this GPU, flash attention 4 and flash attention 3 {crash}; cuDNN's attention "
        "gives wrong results. The run uses flash attention 2 instead.",)
    with pytest.raises(ConfigError, match="no version of fused attention passes its trial on this GPU: flash attention "
                                          "4 and flash attention 3 crashes.*Use --attention-core sdpa"):
        choose_core("flash", search=FlashSearch(None, failed), **how)
    chosen = choose_core("auto", search=FlashSearch(None, failed), **how)
    assert isinstance(chosen.core, SDPACore) and "uses torch's scaled_dot_product_attention" in chosen.warnings[0]


def test_a_version_without_documents_says_so() -> None:
    for varlen, told in ((None, 1), (each_document, 0)):
        search = FlashSearch(FlashAttention("flash attention 3", right, varlen))
        chosen = choose_core("auto", dropout=False, device=GPU, dtype=torch.bfloat16, documents=True, search=search)
        assert len(chosen.warnings) == told and all("one document after another" in line for line in chosen.warnings)


@pytest.mark.parametrize("dtype, head_dim, capability, words", [
    (torch.float64, 64, 9, "takes float64 at head width 64. Give --bf16"),
    (torch.float32, 66, 9, "takes float32 at head width 66. Choose a --kv-channels that is a multiple of 4"),
    (torch.bfloat16, 260, 9, "takes bfloat16 at head width 260. Choose a --kv-channels that is a multiple of 8"),
    (torch.float16, 36, 7, "takes float16 at head width 36. Choose a --kv-channels that is a multiple of 8"),
    (torch.float32, 64, 9, ""), (torch.bfloat16, 128, 9, ""), (torch.bfloat16, 256, 9, "")])
def test_unfused_attention_on_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, head_dim: int,
                                            capability: int, words: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    warnings = choose_core("sdpa", dropout=False, device=GPU, dtype=dtype, head_dim=head_dim).warnings
    assert len(warnings) == bool(words) and all(words in line and "many times slower" in line for line in warnings)
    assert choose_core("sdpa", dropout=True, device=GPU, dtype=dtype, head_dim=head_dim).warnings == ()
    form = cores.gpu_form(dtype, head_dim, has_flash=capability >= 8)
    assert (form == "query blocks") is bool(words)


def test_flash_is_refused_without_a_gpu() -> None:
    with pytest.raises(ConfigError, match="--attention-core flash needs a GPU"):
        choose_core("flash", dropout=False, device=CPU)


@pytest.fixture
def crashing_flash_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    package = tmp_path / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text("import os, signal\ndef flash_attn_func(*a, **h):\n"
                                         "    os.kill(os.getpid(), signal.SIGABRT)\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("flash_attn", None)


@pytest.mark.slow
@pytest.mark.usefixtures("crashing_flash_2")
def test_a_package_that_crashes_leaves_the_run_torchs_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real trial in real processes, on the CPU."""
    monkeypatch.setattr(flash, "version_names", lambda: ["FA4", "FA2", "torch"])
    search = find_flash_attention(WANTED, CPU)
    assert search.found is not None and search.found.description == "torch's flash attention"
    assert search.failed == (("flash attention 2 (flash-attn)", "crashes the process that tries it (SIGABRT)"),)
    assert "flash_attn" not in sys.modules
    q, k, v = (torch.randn(1, 20, heads, 32) for heads in (4, 2, 2))
    torch.testing.assert_close(choose_core("auto", dropout=False, search=search).core(q, k, v), UnfusedCore()(q, k, v))
    assert CPUFlashBlockKernel.description  # the run goes on


def test_a_benchmark_of_many_runs_tries_the_versions_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu import programs

    registry = Registry(monkeypatch, {"FA4": fine(1)})
    monkeypatch.setattr(programs, "try_in_children", registry.attempt)
    for wanted in (WANTED, Wanted("bfloat16", 64), WANTED):
        assert programs.find_once(wanted, GPU).found is not None
    assert registry.events.count(TRY_ALL) == 2 and registry.active == "FA4"
    flash.restore_torchs_flash()
    assert registry.active is None
