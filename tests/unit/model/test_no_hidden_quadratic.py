"""Long sequences: nothing grows with the square of the length, no index overflows, no memory leaks.

Known failures of this field: masks of s x s (I05), 32-bit indices (I06), chunks that autograd keeps
(I02), memory that grows from step to step (I08).
"""

from __future__ import annotations

import gc

import pytest
import torch

from megatron_sp.activations.tiling import tiled
from megatron_sp.model import norm, rotary
from megatron_sp.model.loss import IGNORED_LABEL, linear_cross_entropy_sum
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.parallel.tensor import TensorRegion
from tests.helpers.spawn import RunRanks
from tests.helpers.storage import StorageTracker
from tests.helpers.trace import trace_step
from tests.unit.plan.test_memory_model import COMMON, FULL, GQA, resolved

LENGTH = 2048
SMALL = (f"--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 192 --seq-length {LENGTH} "
         "--loss-tile-size 64 ")
ONE_RANK = TensorRegion(mesh=None, group=None, size=1, rank=0, megatron_sp=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("world, flags", [
    (1, GQA + SMALL), (1, COMMON + SMALL), (1, GQA + SMALL + FULL + "--mlp-tile-size 512 --attention-head-groups 2"),
    (2, GQA + SMALL + "--ulysses-size 2"), (2, GQA + SMALL + "--ring-size 2"),
    (2, GQA + SMALL + "--tensor-model-parallel-size 2 --sequence-parallel"),
    (2, GQA + SMALL + "--ulysses-size 2 --reset-attention-mask")],
    ids=["llama", "gpt2", "techniques", "ulysses", "ring", "tp", "documents"])
def test_no_tensor_as_large_as_the_square_of_the_length(world: int, flags: str) -> None:
    run = resolved(flags, world)
    traced = trace_step(run)
    assert traced.largest[0] < LENGTH * LENGTH // run.parallel.sp, traced.largest


def test_the_reference_core_is_seen_to_be_quadratic() -> None:
    traced = trace_step(resolved(GQA + SMALL + "--attention-core unfused"))
    assert traced.largest[0] >= LENGTH * LENGTH


def saved_elements(call: object) -> int:
    """Return the number of elements that autograd keeps for backward of ``call()``; each storage counts once."""
    kept: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage()._cdata] = x.untyped_storage().nbytes() // x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        call()  # type: ignore[operator]
    return sum(kept.values())


def test_a_tiled_loss_keeps_two_gradients_and_no_logits() -> None:
    x, weight = torch.randn(1, 512, 16, requires_grad=True), torch.randn(300, 16, requires_grad=True)
    labels = torch.randint(0, 300, (1, 512))
    kept = saved_elements(lambda: linear_cross_entropy_sum(x, weight, labels, ONE_RANK, 300, tile=32))
    assert kept == x.numel() + weight.numel()  # their gradients; logits would be 153,600


def test_a_tiled_function_keeps_its_input_alone() -> None:
    x, weight = torch.randn(1, 512, 16, requires_grad=True), torch.randn(64, 16, requires_grad=True)
    kept = saved_elements(lambda: tiled(lambda y, w: torch.tanh(y @ w.t()) @ w, 32, x, weight).sum())
    assert kept == x.numel() + weight.numel()


def test_the_loss_frees_its_own_copies_of_the_gradients_in_backward() -> None:
    """The forward of the loss computes the gradients and keeps them; after backward only ``.grad`` holds them."""
    x, weight = torch.randn(1, 4096, 16, requires_grad=True), torch.randn(64, 16, requires_grad=True)
    labels = torch.randint(0, 64, (1, 4096))
    with StorageTracker() as tracker:
        for tensor in (x, weight, labels):
            tracker.add(tensor.detach())
        before, hidden = tracker.live, x * 2
        loss = linear_cross_entropy_sum(hidden, weight, labels, ONE_RANK, 64, tile=512)
        del hidden
        loss.backward()
        assert weight.grad is not None and x.grad is not None
        left = tracker.live - before - (weight.grad.numel() + x.grad.numel()) * 4
    assert left < 1000  # bytes; the scalar loss is still referenced here


def test_index_arithmetic_is_64_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes and strides of tensors beyond 2^31 elements must not overflow. The meta device takes no memory for them."""
    monkeypatch.setattr(rotary, "CPU_PIECE", 1 << 40)  # one large piece, because many small ones would take minutes
    monkeypatch.setattr(norm, "CPU_ROWS", 1 << 40)
    tokens = 2**31 // 64 + 512
    x = torch.empty(1, tokens, 64, device="meta", requires_grad=True)
    y = tiled(lambda z: z * 2, tokens // 4, x)
    assert y.shape == x.shape and y.numel() > 2**31
    run = resolved(GQA + "--num-layers 2 --hidden-size 4096 --seq-length 1048576 --recompute-granularity full "
                         "--loss-tile-size 262144 --mlp-tile-size 262144")
    assert trace_step(run).largest[0] > 2**31  # h x s and a tile's logits


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_more_than_2_to_the_31_elements() -> None:
    """Compute real values in the last rows of tensors of more than 2^31 elements, which takes about 10 GiB."""
    if _available() < 14 * 2**30:
        pytest.skip("needs 14 GiB of free memory")
    columns, rows = 32, 2**31 // 32 + 64
    x = torch.zeros(1, rows, columns, dtype=torch.bfloat16)  # 4 GiB
    x[0, -1] = 1.0
    y = tiled(lambda z: z * 3, rows // 8, x)  # 4 GiB
    assert y.numel() > 2**31 and float(y[0, -1].sum()) == 96.0 and float(y[0, 0].sum()) == 0.0
    del y
    labels = torch.full((1, rows), IGNORED_LABEL)
    labels[0, -1] = 5
    weight = torch.eye(64, columns, dtype=torch.bfloat16, requires_grad=True)
    loss = linear_cross_entropy_sum(x, weight, labels, ONE_RANK, 64, tile=1 << 22)
    loss.backward()
    expected = torch.nn.functional.cross_entropy((x[0, -1:].float() @ weight.detach().float().t()), labels[0, -1:])
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-2, atol=0)
    assert weight.grad is not None and float(weight.grad[5].sum()) < 0


def _available() -> int:
    """Return the bytes of available memory; 0 where the system does not report them."""
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except OSError:
        return 0


def resident_memory_over_steps(steps: int) -> list[int]:
    """Train a tiny model on this rank; return the resident bytes after every tenth step, from the fiftieth on."""
    from megatron_sp.model.build import build_model
    from megatron_sp.proof.data import batch, local_microbatches
    from megatron_sp.train.forward_backward import build_engine
    from megatron_sp.train.optimizer import build_optimizer, clip_grad_norm
    from tests.helpers.configs import Case

    run = Case("leak", 1, FULL).run()
    mesh = ParallelMesh.build(run.parallel)
    model = build_model(run, mesh)
    engine, optimizer = build_engine(run, model, mesh), build_optimizer(run, model)
    found = []
    for step in range(steps):
        microbatches = local_microbatches(run, mesh, *batch(run, seed=step))
        engine.forward_backward(microbatches, 256.0)
        clip_grad_norm(model, 1.0, mesh)
        optimizer.step()
        optimizer.zero_grad()
        if step >= 50 and step % 10 == 0:
            gc.collect()
            with open("/proc/self/statm") as file:
                found.append(int(file.read().split()[1]) * 4096)
    return found


@pytest.mark.slow
def test_resident_memory_is_flat_over_steps(ranks: RunRanks) -> None:
    resident = ranks(resident_memory_over_steps, 1, 260, timeout=200)[0]
    assert max(resident[-5:]) - min(resident[:5]) < 2 * 2**20, resident
