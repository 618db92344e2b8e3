"""The counter of operators, bytes and collectives, on computations whose counts are known."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_sp.proof.traffic import Collective, Traffic, gpu_kernels


def bytes_of(compute, *shapes: tuple[int, ...]) -> int:  # type: ignore[no-untyped-def]
    """Return the bytes that a computation on fp32 tensors moves; tensors in the order of the shapes."""
    tensors = [torch.ones(shape) for shape in shapes]
    with Traffic() as traffic:
        compute(*tensors)
    return traffic.moved


@pytest.mark.parametrize(("compute", "elements"), [
    (lambda x, y: x + y, 300), (lambda x, y: x.add_(y), 300), (lambda x, y: x.copy_(y), 200),
    (lambda x, y: x.zero_(), 100), (lambda x, y: torch.empty(50).zero_(), 50),
    (lambda x, y: torch.add(x, y, out=y), 300),
    (lambda x, y: x.view(50, 2).t().unsqueeze(0)[0], 0), (lambda x, y: x.t().contiguous(), 200),
    (lambda x, y: x + y[:, :1], 100 + 10 + 100), (lambda x, y: x @ y, 0), (lambda x, y: x.addmm_(x, y), 0),
    (lambda x, y: x * torch.ones(10, 1).expand(10, 10), 10 + 100 + 10 + 100),
    (lambda x, y: torch._foreach_mul_([x, y], 2.0), 400), (lambda x, y: torch.zeros_like(x), 100),
    (lambda x, y: torch.cat((x, y)), 400)])
def test_bytes(compute, elements: int) -> None:  # type: ignore[no-untyped-def]
    assert bytes_of(compute, (10, 10), (10, 10)) == 4 * elements


def test_a_lookup_reads_only_its_rows() -> None:
    table, index = torch.ones(1000, 8), torch.tensor([1, 5])
    with Traffic() as traffic:
        F.embedding(index, table)
    assert traffic.moved == 2 * 8 + 2 * 4 * 2 * 8  # the indices, and the rows read and written


def test_backward_is_counted_and_attention_is_not() -> None:
    q = torch.ones(1, 2, 8, 4, device="meta", requires_grad=True)
    x = torch.ones(1, 8, 8, device="meta", requires_grad=True)
    weight = torch.ones(8, device="meta", requires_grad=True)
    with Traffic() as traffic, gpu_kernels(traffic):
        o = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        y = F.rms_norm(x, (8,), weight, 1e-5)
        torch.autograd.backward([o, y], [torch.empty_like(o), torch.empty_like(y)])
    names = ("_scaled_dot_product_flash_attention", "_fused_rms_norm")
    assert all(traffic.launched[name] == traffic.launched[f"{name}_backward"] == 1 for name in names)
    forward, backward = (64 + 8) + (64 + 8), (64 + 64 + 8 + 8) + (64 + 8)  # in elements; 8 rows have a scale each
    gradients_of_q = 2 * 3 * 64  # autograd adds up those of q, k and v
    assert traffic.moved == 4 * (forward + backward + gradients_of_q)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_collectives_by_kind_and_group(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        x = torch.ones(6)
        with Traffic({group.group_name: "world"}) as traffic:
            dist.all_reduce(x)
            dist.all_gather_into_tensor(torch.empty(6), x)
            dist.reduce_scatter_tensor(torch.empty(6), x)
            torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x, "sum", group.group_name))
        assert traffic.collectives == {Collective("all-reduce", "world"): 2, Collective("all-gather", "world"): 1,
                                       Collective("reduce-scatter", "world"): 1}
        assert traffic.sent[Collective("all-reduce", "world")] == 2 * 24
        assert traffic.moved == 2 * 24  # the functional all-reduce copies its input first
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("compute", "name"), [
    (lambda host, x: host.to(x.device), "_to_copy"), (lambda host, x: x.copy_(host), "copy_"),
    (lambda host, x: x[host], "index")])
def test_copies_to_the_device_are_noticed(compute, name: str) -> None:  # type: ignore[no-untyped-def]
    with Traffic() as traffic:
        compute(torch.tensor([1, 2]), torch.empty(2, device="meta"))
    assert traffic.crossings == {name: 1}


def test_numbers_are_no_copies() -> None:
    x = torch.empty(2, device="meta")
    with Traffic() as traffic:
        (x * 2.0 + torch.tensor(3.0)).sum() + torch.full((), 2.0, device=x.device)
    assert not traffic.crossings


@pytest.mark.parametrize(("compute", "reads"), [
    (lambda x: x.sum().item(), 1), (lambda x: bool((x > 0).any()), 1), (lambda x: (x > 0).nonzero(), 1),
    (lambda x: x[x > 0], 1), (lambda x: torch.equal(x, x), 1), (lambda x: x.repeat_interleave(x.long()), 1),
    (lambda x: x.repeat_interleave(2), 0), (lambda x: x[torch.tensor([0, 1])], 0),
    (lambda x: torch.where(x > 0, x, 0.0), 0), (lambda x: x.masked_fill(x > 0, 1.0), 0)])
def test_reads_by_the_host(compute, reads: int) -> None:  # type: ignore[no-untyped-def]
    with Traffic() as traffic:
        compute(torch.ones(3))
    assert sum(traffic.host_reads.values()) == reads
