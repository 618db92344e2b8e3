"""What only a GPU can show: its kernels against the reference, half precision, compiled layers, streams.

Small on purpose: all together stay within six minutes on one device, compilation included.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_sp.config.schema import Run
from megatron_sp.layout.masks.attention_mask import CAUSAL, AttentionMask
from megatron_sp.layout.patterns.blocks import BigBird
from megatron_sp.model.attention.block_kernels import GPUFlashBlockKernel, UnfusedBlockKernel, agrees_with_unfused
from megatron_sp.model.attention.cores import AttentionCore, SDPACore, UnfusedCore, choose_core
from megatron_sp.model.attention.flash import Wanted, find_flash_attention
from megatron_sp.model.attention.flex import FlexAttention, passes_flex_trial
from megatron_sp.model.attention.patterns import PatternAttention
from megatron_sp.model.build import build_model
from megatron_sp.model.kernels import choose_kernels, kernels_in_words
from megatron_sp.model.loss import linear_cross_entropy_sum
from megatron_sp.model.norm import rms_norm
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.parallel.tensor import TensorRegion
from tests.helpers.configs import STYLES, tiny_run

pytestmark = pytest.mark.timeout(240)


def qkv(device: torch.device, dtype: torch.dtype, kv_heads: int, s: int = 300) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, s, heads, 64, generator=generator).to(device, dtype).requires_grad_()
            for heads in (8, kv_heads, kv_heads)]


def with_gradients(core: Any, inputs: list[torch.Tensor], mask: AttentionMask = CAUSAL) -> list[torch.Tensor]:
    o = core(*inputs, mask=mask)
    return [o.detach(), *torch.autograd.grad((o * o.detach().roll(1, 1)).sum(), inputs)]


@functools.cache
def core_of(name: str, device: torch.device, documents: bool = False) -> AttentionCore:
    """Return what ``--attention-core name`` means on this GPU, in bf16 at head width 64. Its trial takes a while."""
    search = find_flash_attention(Wanted("bfloat16", 64, documents=documents), device) if name == "flash" else None
    return choose_core(name, dropout=False, device=device, dtype=torch.bfloat16, head_dim=64, documents=documents,
                       search=search).core


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("name", ["sdpa", "flash"])
def test_attention_equals_the_fp64_reference(device: torch.device, name: str, kv_heads: int) -> None:
    half = qkv(device, torch.bfloat16, kv_heads)
    exact = [x.detach().double().requires_grad_() for x in half]
    for got, want in zip(with_gradients(core_of(name, device), half), with_gradients(UnfusedCore(), exact)):
        assert (got.double() - want).norm() < 0.02 * want.norm()


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("name", ["sdpa", "flash"])
def test_attention_inside_documents_equals_the_fp64_reference(device: torch.device, name: str, kv_heads: int) -> None:
    """One variable-length kernel computes all documents, and none of its values reaches another document."""
    mask = AttentionMask(((0, 1, 129, 170), (0,)))
    core: Any = core_of(name, device, documents=True)
    assert core.inside_documents.varlen is not None, "no variable-length kernel passed its trial"
    half = qkv(device, torch.bfloat16, kv_heads)
    exact = [x.detach().double().requires_grad_() for x in half]
    for got, want in zip(with_gradients(core, half, mask), with_gradients(UnfusedCore(), exact, mask)):
        assert (got.double() - want).norm() < 0.02 * want.norm()
    with torch.no_grad():
        before = core(*half, mask=mask)
        for x in half:
            x[0, 140] += 10
        same = (core(*half, mask=mask) == before).flatten(2).all(-1)
    assert same[1].all() and same[0, :129].all() and same[0, 170:].all() and not same[0, 140:170].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_patterns_of_blocks_equal_the_fp64_reference(device: torch.device, dtype: torch.dtype, kv_heads: int) -> None:
    """By FlexAttention, which must pass its trial, and by the pieces that are computed where it does not."""
    pieces = PatternAttention(GPUFlashBlockKernel() if dtype == torch.bfloat16 else UnfusedBlockKernel())
    flex = FlexAttention(pieces)
    assert passes_flex_trial(flex, device, dtype, 64, 8, kv_heads)
    mask = AttentionMask(pattern=BigBird(128, by_head=True, local=2), first_head=3)
    given = qkv(device, dtype, kv_heads, 900)
    exact = [x.detach().double().requires_grad_() for x in given]
    wanted = with_gradients(UnfusedCore(), exact, mask)
    for attend in (flex, pieces):
        for got, want in zip(with_gradients(SDPACore(patterned=attend), given, mask), wanted):
            assert (got.double() - want).norm() < 0.02 * want.norm()


@pytest.mark.parametrize("dtype, head_dim", [(torch.float32, 64), (torch.float32, 66), (torch.bfloat16, 36),
                                             (torch.bfloat16, 256), (torch.bfloat16, 320), (torch.float64, 64)])
def test_attention_with_grouped_heads_forms_no_square(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Of 8192 tokens: one [s, s] tensor of 4 heads would be 512 MiB and more."""
    q, k, v = (torch.randn(1, 8192, heads, head_dim, device=device, dtype=dtype).requires_grad_()
               for heads in (4, 2, 2))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    SDPACore()(q, k, v).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 450 * 2**20


def test_fp32_attention_is_fp32(device: torch.device) -> None:
    single = qkv(device, torch.float32, 2)
    exact = [x.detach().double().requires_grad_() for x in single]
    for got, want in zip(with_gradients(SDPACore(), single), with_gradients(UnfusedCore(), exact)):
        assert (got.double() - want).norm() < 1e-4 * want.norm()


def test_the_flash_kernel_of_a_ring_is_in_use(device: torch.device) -> None:
    kernel = GPUFlashBlockKernel()
    assert agrees_with_unfused(kernel, device), "torch's flash operators changed: a ring falls back to the plain kernel"
    q, k, v = (x.detach() for x in qkv(device, torch.bfloat16, 2))
    grad = torch.randn_like(q)
    o, lse = UnfusedBlockKernel().forward(q, k, v, True)
    for got, want in zip(kernel.backward(grad, q, k, v, o, lse, True),
                         UnfusedBlockKernel().backward(grad, q, k, v, o, lse, True)):
        assert (got.float() - want.float()).norm() < 0.02 * want.float().norm()


def test_flash_says_what_it_is(device: torch.device) -> None:
    run = tiny_run([*STYLES["llama"].split(), "--bf16", "--attention-core", "flash"])
    assert "flash attention" in kernels_in_words(run, choose_kernels(run, device))


def test_norm_and_loss_equal_the_cpu(device: torch.device) -> None:
    x, weight = torch.randn(3, 700, 128), torch.randn(128)
    torch.testing.assert_close(rms_norm(x.to(device), weight.to(device), 1e-5).cpu(), rms_norm(x, weight, 1e-5),
                               rtol=1e-4, atol=1e-4)
    region = TensorRegion(mesh=None, group=None, size=1, rank=0, megatron_sp=False)  # type: ignore[arg-type]
    w, labels = torch.randn(97, 128) / 11, torch.randint(0, 97, (3, 700))
    want = F.cross_entropy((x @ w.t()).flatten(0, 1), labels.flatten(), reduction="sum")
    got = linear_cross_entropy_sum(x.to(device), w.to(device), labels.to(device), region, 97, tile=256)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-3, atol=1.0)


def losses(run: Run, device: torch.device, steps: int = 20) -> list[float]:
    """Train a tiny model on one repeated batch with the trainer's own step; skipped steps do not count."""
    from megatron_sp.data.batch import Microbatch
    from megatron_sp.train.train_step import TrainStep

    mesh = ParallelMesh.build(run.parallel, device)
    step = TrainStep.build(run, build_model(run, mesh), mesh)
    text = torch.randint(0, 97, (4, 65), generator=torch.Generator().manual_seed(0)).to(device)
    batch = Microbatch(text[:, :-1].contiguous(), text[:, 1:].contiguous(),
                       torch.arange(64, device=device).expand(4, 64), torch.arange(4, device=device), 256)
    found: list[float] = []
    while len(found) < steps:
        totals, _ = step.train([batch], scheduler_samples=0)
        if totals.is_finite:
            found.append(totals.loss)
    return found


@pytest.mark.parametrize("precision", ["--bf16", "--fp16"])
def test_half_precision_follows_fp32(device: torch.device, precision: str) -> None:
    """fp16 starts at a high loss scale and has to find its own by overflowing."""
    flags = [*STYLES["llama"].split(), "--lr", "3e-3"]
    exact, half = losses(tiny_run(flags), device), losses(tiny_run([*flags, precision]), device)
    assert exact[-1] < exact[0] - 0.5
    assert half == pytest.approx(exact, rel=0.05)


@pytest.mark.parametrize("flags", ["", "--bf16"])
def test_compiled_layers_compute_the_same(device: torch.device, flags: str) -> None:
    style = [*STYLES["llama"].split(), *flags.split()]
    eager, compiled = (losses(tiny_run([*style, *extra]), device, 5) for extra in ([], ["--compile"]))
    assert compiled == pytest.approx(eager, rel=0.02 if flags else 1e-4)


def test_microbatches_arrive_whole_from_a_stream_of_their_own(device: torch.device) -> None:
    """The computation keeps the GPU busy, so that copies which nobody waits for would be seen."""
    from megatron_sp.data.batch import Microbatch
    from megatron_sp.train.device_copies import DeviceCopies, one_ahead

    texts = [torch.randint(0, 97, (1, 2**20)) for _ in range(5)]
    ids = torch.zeros(1, dtype=torch.int64)
    batches = [Microbatch(text, text + 1, text + 2, ids, text.numel()).pinned() for text in texts]
    matrix = torch.randn(4096, 4096, device=device)
    for text, batch in zip(texts, one_ahead(batches, DeviceCopies.of(device)), strict=True):
        sums = torch.stack([batch.tokens.sum(), batch.labels.sum(), batch.positions.sum()])
        matrix @ matrix
        assert sums.tolist() == [text.sum().item() + n * text.numel() for n in range(3)]


def test_a_copy_stream_runs_beside_computation(device: torch.device, tmp_path: Path) -> None:
    """Offloading relies on it: a copy from pinned memory and a product take less than one after the other."""
    host = torch.empty(2**27, dtype=torch.uint8, pin_memory=True)
    target, matrix = torch.empty_like(host, device=device), torch.randn(6144, 6144, device=device)
    side = torch.cuda.Stream()

    def seconds(copy: bool, multiply: bool) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        if copy:
            with torch.cuda.stream(side):
                target.copy_(host, non_blocking=True)
        if multiply:
            for _ in range(4):
                matrix @ matrix
        torch.cuda.synchronize()
        return time.perf_counter() - start

    seconds(True, True)
    copying, multiplying, both = (min(seconds(*what) for _ in range(5))
                                  for what in ((True, False), (False, True), (True, True)))
    assert both < 0.9 * (copying + multiplying)


def test_long_tensors_pass_int32(device: torch.device) -> None:
    """More than 2^31 elements through norm and loss give what their last rows give alone."""
    if torch.cuda.get_device_properties(device).total_memory < 40e9:
        pytest.skip("needs 40 GB of device memory")
    x = torch.randn(2**31 // 4096 + 64, 4096, device=device, dtype=torch.bfloat16)
    weight = torch.ones(4096, device=device, dtype=torch.bfloat16)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5)[-32:], rms_norm(x[-32:].clone(), weight, 1e-5))
