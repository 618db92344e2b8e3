"""The benchmark of GPUs, run without one: kinds of kernels, report, techniques, and the claims that wait for a GPU."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.gpu.measure import PARTS, TECHNIQUES, parse
from benchmarks.gpu.programs import SHAPES, kind_of, our_run, shares
from benchmarks.gpu.report import report
from megatron_sp.config.resolve import with_vocab
from megatron_sp.plan.memory import predict
from megatron_sp.plan.sizes import Weights

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name,kind", [
    ("void flash::flash_fwd_kernel<...>", "attention"), ("fmha_cutlassB_bf16_aligned_64x64_k64_sm80", "attention"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"), ("nvjet_tst_128x256_64x4", "matrix product"),
    ("sm90_xmma_gemm_bf16bf16_bf16f32", "matrix product"), ("ampere_bf16_s16816gemm_bf16_128x256", "matrix product"),
    ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "communication"), ("Memcpy HtoD (Pinned)", "copy"),
    ("void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add>", "other"),
    ("aten::mm", "matrix product"), ("aten::mul", "other"), ("aten::bmm", "matrix product")])
def test_kinds_of_kernels(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_shares_add_up_to_one() -> None:
    found = shares({"aten::mm": 3.0, "flash": 1.0, "aten::add": 4.0})
    assert found["matrix product"] == 0.375 and found["attention"] == 0.125 and found["other"] == 0.5
    assert sum(found.values()) == 1 and sum(shares({}).values()) == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_every_technique_is_a_run_that_is_planned(shape: str) -> None:
    for flags in TECHNIQUES.values():
        text = flags.format(length=65536, tile=8192, chunk=4096, window=4096, block=128)
        run = with_vocab(our_run(SHAPES[shape], 4, 65536, text, on_gpu=True), SHAPES[shape].vocab)
        assert predict(run, device="gpu").total > 0
    assert Weights.of(run).layer == pytest.approx({"1.2B": 12 * 2048**2, "8B": 218_112_000}[shape], rel=0.01)


def test_the_report_shows_what_was_found_and_what_was_not() -> None:
    speed = [{"shape": "8B", "length": 8192, "program": "ours", "flags": "", "seconds": 0.5, "tokens_per_s": 16384.0,
              "tflops": 400.0, "mfu": 0.41, "allocated": 2 * 2**30, "planned": 2**30},
             {"shape": "8B", "length": 131072, "program": "transformers + FSDP2", "flags": "each layer recomputed"}]
    page = report({"toy": False, "device": "H200", "ranks": 2, "layers": 4, "seconds": 3, "torch": "2",
                   "smoke": "passed", "memory_gib": 48.0, "speed": speed,
                   "longest": [{"shape": "8B", "technique": "chunks"}],
                   "profile": [{"shape": "8B", "length": 9, "program": "ours", "shares": {"attention": 0.25}}],
                   "not_measured": ["torchtitan: no module"]})
    for part in ("2 x H200", "`tests/gpu`): passed", "| 0.500 | 16,384 | 400 | 41.0% | 2.00 | 1.00 (-50.0%) |",
                 "| does not fit |", "| 8B | chunks | none |", "| 25.0% |", "- torchtitan: no module"):
        assert part in page
    assert "No GPU figure exists" not in page


def test_the_page_that_is_kept_says_that_it_is_a_dry_run() -> None:
    results = json.loads((ROOT / "benchmarks/results/gpu.json").read_text())
    assert (ROOT / "benchmarks/results/gpu.md").read_text() == report(results)
    assert set(PARTS) <= results.keys() and set(parse([]).parts) == set(PARTS)
    if results["toy"]:
        assert "No GPU figure exists yet" in report(results)


def test_every_page_that_waits_for_a_gpu_links_to_the_list_of_claims() -> None:
    said = re.compile(r"[Nn]o GPU (has|was|figure)|on a GPU so far|measured on a GPU\*\*")
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    waiting = [page for page in pages if said.search(page.read_text(encoding="utf-8"))]
    assert len(waiting) > 5
    assert not [page.name for page in waiting if page.name != "gpu-claims.md"
                and "gpu-claims.md" not in page.read_text(encoding="utf-8")]


def test_commands_of_the_claims_take_the_flags_that_they_show() -> None:
    page = (ROOT / "docs/reference/gpu-claims.md").read_text(encoding="utf-8")
    shown = [command.split() for command in re.findall(r"benchmarks/gpu\.sh([^`\n]*)", page)]
    assert len(shown) > 5
    for words in shown:
        parse(words)
