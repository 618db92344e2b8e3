"""Overlapped Ulysses computes the same numbers, sends no more bytes, and has exchanges under way during attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_sp.layout.heads import HeadSplit
from megatron_sp.model.attention.cores import SDPACore
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.parallel.sequence import match_heads, overlapped_ulysses
from megatron_sp.parallel.ulysses import UlyssesAttention, UlyssesExchange
from megatron_sp.parallel.ulysses_overlap import OverlappedQueries, OverlappedUlysses
from megatron_sp.proof.data import batch
from megatron_sp.proof.reference import random_weights
from megatron_sp.proof.steps import step_in_layout
from megatron_sp.transport.channel import CollectiveChannel, Finish, SplitChange, Tensors
from tests.distributed.parallel.test_ulysses import TOKENS, WIDTH
from tests.helpers.configs import STYLES, tiny_run
from tests.helpers.spawn import RunRanks


def mesh_of(size: int, *flags: str) -> ParallelMesh:
    return ParallelMesh.build(tiny_run([*STYLES["gpt2"].split(), "--ulysses-size", str(size), *flags],
                                     size).parallel)


def check_numbers(mesh: ParallelMesh, size: int, rank: int) -> None:
    for n, g, count in ((8, 8, 2), (8, 4, 2), (8, 2, 2), (8, 1, 2), (7, 7, 2), (12, 12, 3), (9, 3, 2), (20, 2, 3)):
        split = HeadSplit.of(n, g, ulysses=size)
        if n < size * count:
            continue
        core = SDPACore()
        plain = UlyssesAttention(match_heads(core, split.kv_indices(rank)),
                                 UlyssesExchange(mesh.channel("ulysses"), split))
        beside = overlapped_ulysses(lambda part: match_heads(SDPACore(), part.kv_indices(rank)), split, mesh, count)
        found = []
        for attention in (plain, beside):
            mine = [torch.randn(2, TOKENS // size, heads, WIDTH, dtype=torch.float64, requires_grad=True,
                                generator=torch.Generator().manual_seed(rank + heads)) for heads in (n, g, g)]
            out = attention(*mine)
            out.square().sum().backward()
            found.append([out, *(x.grad for x in mine)])
        for x, y in zip(*found):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
        sent = sum(group.exchange.sent.forward for group in beside.groups)
        assert sent == plain.exchange.sent.forward, (n, g, count)


class Product(torch.autograd.Function):
    """Stands in for attention and logs when it runs."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log: list[str]) -> torch.Tensor:
        ctx.log = log
        log.append("attend")
        return q * k * v

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        ctx.log.append("attend back")
        return grad, grad, grad, None


class LoggedChannel(CollectiveChannel):
    """Logs when exchanges start and when the caller waits for them."""

    log: list[str]

    def start_all_to_all(self, tensors: Tensors, change: SplitChange) -> Finish:
        self.log.append("start")
        finish = super().start_all_to_all(tensors, change)

        def logged() -> list[torch.Tensor]:
            self.log.append("wait")
            return finish()

        return logged


def check_order(mesh: ParallelMesh, size: int, rank: int) -> None:
    """Between start and wait of an exchange lies the attention of another group, with keys in each group or in one."""
    channel = LoggedChannel(mesh.group("ulysses"), mesh.device)
    log: list[str] = []
    channel.log = log

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
        return Product.apply(q, k, v, log)

    for n, g, kind in ((2 * size, 2 * size, OverlappedUlysses), (2 * size, size // 2, OverlappedQueries)):
        split = HeadSplit.of(n, g, ulysses=size)
        beside = overlapped_ulysses(lambda part: attend, split, mesh, 2)
        assert isinstance(beside, kind)
        for exchange in (*(group.exchange for group in beside.groups), getattr(beside, "exchange", None)):
            if exchange is not None:
                exchange.channel = channel
        q, k, v = (torch.ones(1, TOKENS // size, heads, WIDTH, requires_grad=True) for heads in (n, g, g))
        log.clear()
        out = beside(q, k, v)
        assert log == ["start", "wait", "start", "attend", "start", "wait", "attend", "start", "wait", "wait"]
        log.clear()
        out.sum().backward()
        assert log == ["start", "start", "wait", "attend back", "start", "wait", "attend back", "wait", "start", "wait"]


def check_all() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    check_numbers(mesh_of(size), size, rank)  # through shared memory
    mesh = mesh_of(size, "--no-shared-memory")
    check_numbers(mesh, size, rank)
    check_order(mesh, size, rank)


@pytest.mark.parametrize("world", [2, 4])
def test_overlap(ranks: RunRanks, world: int) -> None:
    ranks(check_all, world)


@pytest.mark.parametrize("n, g, ulysses, keys_too, most", [
    (32, 32, 8, True, 4), (32, 8, 4, True, 8), (32, 8, 8, False, 4), (8, 1, 4, False, 2), (4, 4, 4, False, 1),
    (30, 30, 8, True, 3)])
def test_keys_are_cut_only_where_that_sends_no_more(n: int, g: int, ulysses: int, keys_too: bool, most: int) -> None:
    heads = HeadSplit.of(n, g, ulysses=ulysses)
    assert (heads.can_cut_keys(2), heads.fewest_query_heads) == (keys_too, most)


def test_groups_of_each_rank_hold_every_head_once() -> None:
    heads = HeadSplit.of(18, 3, tp=2, tp_rank=1, ulysses=2)  # query heads 9 to 17, which use key/value heads 1 and 2
    first, second = heads.in_groups_of_each_rank(2)
    assert (first.ulysses_query, second.ulysses_query) == (((0, 3), (5, 7)), ((3, 5), (7, 9)))
    assert (first.ulysses_kv, second.ulysses_kv) == (((0, 1), (1, 2)), ((1, 2), (1, 2)))


def test_overlap_is_what_the_flag_gives(ranks: RunRanks) -> None:
    assert ranks(built, 2, "--ulysses-overlap-groups 2") == ["OverlappedUlysses"] * 2
    assert ranks(built, 2, "") == ["UlyssesAttention"] * 2


def built(flags: str) -> str:
    from megatron_sp.model.build import plan_attention
    from megatron_sp.model.kernels import choose_kernels

    run = tiny_run([*STYLES["gpt2"].split(), "--ulysses-size", "2", *flags.split()], 2)
    mesh = ParallelMesh.build(run.parallel)
    core = plan_attention(run, mesh, choose_kernels(run, mesh.device)).core
    assert isinstance(core, (OverlappedUlysses, UlyssesAttention))
    return type(core).__name__


class CountedExchanges(TorchDispatchMode):
    """Counts all-to-alls that really run."""

    number = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += "all_to_all" in str(operator)
        return operator(*args, **(kwargs or {}))


def exchanges(flags: list[str]) -> list[int]:
    found = []
    for extra in flags:
        run = tiny_run([*STYLES["eight_heads"].split(), "--ulysses-size", "2", "--no-shared-memory", *extra.split()], 2)
        with CountedExchanges() as counted:
            step_in_layout(run, random_weights(run), *batch(run))
        found.append(counted.number)
    return found


def test_selective_recomputation_exchanges_nothing_again(ranks: RunRanks) -> None:
    groups, selective = "--ulysses-overlap-groups 2", "--recompute-granularity selective"
    plain, kept, overlapped, both, full = ranks(exchanges, 2, [
        "", selective, groups, f"{groups} {selective}", f"{groups} --recompute-granularity full"])[0]
    assert plain == kept and 2 * plain == overlapped == both and 3 * plain == full
