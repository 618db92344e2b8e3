#!/usr/bin/env python3
"""Time the all-to-alls around Ulysses attention, without the attention between them.

    python benchmarks/attention.py --seq-length 8192

Two processes (``--ranks``) exchange q, k and v and then an output, forward and backward, in three ways:

    fused    one all-to-all for q, k and v together, through torch's collectives
    three    one all-to-all for each of q, k and v, through torch's collectives
    memory   like fused, through memory that the processes share

The table shows the bytes that each rank sends to the others in forward, both counted and computed by formula, and the
medians of wall-clock time and of processor time. The three ways take turns, so that other work on the machine slows
them equally.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def exchange_bytes(tokens: int, heads: int, kv_heads: int, width: int, ranks: int, size: int) -> float:
    """Return the bytes that a rank sends in forward: ``(P-1)/P * s/P * d * (2n + 2 g)`` elements of ``size`` bytes.

    P ranks share a sequence of s tokens; there are n query heads of width d, and g key/value heads, at least P after
    they are repeated.
    """
    kv = kv_heads if kv_heads >= ranks else ranks
    return (ranks - 1) / ranks * tokens / ranks * width * (2 * heads + 2 * kv) * size


def separately(exchange: Any) -> Callable[..., tuple[Any, ...]]:
    """Return a function that exchanges q, k and v by one all-to-all each."""
    import torch

    from megatron_sp.parallel.collectives import all_to_all
    from megatron_sp.transport.channel import SplitChange

    def one(x: torch.Tensor) -> torch.Tensor:
        _, tokens, heads, _ = x.shape
        change = SplitChange(2, ((heads // exchange.size,) * exchange.size,), 1, ((tokens,) * exchange.size,))
        exchange.sent.add(pieces[0] for rank, pieces in enumerate(change.pieces([x])) if rank != exchange.rank)
        return all_to_all([x], change, exchange.channel)[0]

    return lambda q, k, v: (one(q), one(k), one(v))


def work(rank: int, arguments: argparse.Namespace, store: str, results: Queue[Any]) -> None:
    """Run one rank: measure all ways in turn and put the times and the bytes sent into ``results``."""
    import torch
    import torch.distributed as dist

    from megatron_sp.layout.heads import HeadSplit
    from megatron_sp.parallel.ulysses import UlyssesExchange
    from megatron_sp.transport.channel import CollectiveChannel, SharedMemoryChannel
    from megatron_sp.transport.connect import open_mailboxes

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=arguments.ranks)
    assert dist.group.WORLD is not None
    split = HeadSplit.of(arguments.heads, arguments.kv_heads, ulysses=arguments.ranks)
    exchange = UlyssesExchange(CollectiveChannel(dist.group.WORLD, torch.device("cpu")), split)
    tokens = arguments.seq_length // arguments.ranks
    q, k, v = (torch.randn(1, tokens, heads, arguments.head_dim, requires_grad=True)
               for heads in (arguments.heads, arguments.kv_heads, arguments.kv_heads))
    mailboxes = open_mailboxes(dist.group.WORLD, timedelta(minutes=1))
    ways = {"fused": (exchange, exchange.sequence_to_heads), "three": (exchange, separately(exchange))}
    if mailboxes is not None:
        through_memory = UlyssesExchange(SharedMemoryChannel(mailboxes), split)
        ways["memory"] = (through_memory, through_memory.sequence_to_heads)

    # Random tensors instead of what attention would return: its output, and the gradients of q, k and v.
    shares = [exchange.num_query[rank], *2 * [exchange.num_kv[rank]]]
    gradients = [torch.randn(1, arguments.seq_length, heads, arguments.head_dim) for heads in shares]
    output = torch.randn_like(gradients[0]).requires_grad_()
    grad_output = torch.randn_like(q)

    def exchange_once(back: UlyssesExchange, way: Callable[..., tuple[Any, ...]]) -> None:
        spread = way(q, k, v)
        back.heads_to_sequence(output).backward(grad_output)
        torch.autograd.backward(spread, gradients)
        for x in (q, k, v, output):
            x.grad = None

    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    sent: dict[str, tuple[int, int]] = {}
    for repeat in range(-2, arguments.repeats):  # the first two warm up
        for name, (back, way) in ways.items():
            back.sent.forward = back.sent.exchanges = 0
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            exchange_once(back, way)
            if repeat >= 0:
                times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
            sent[name] = back.sent.forward, back.sent.exchanges
    results.put((rank, times, sent))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, text in (("ranks", 2, "processes"), ("seq-length", 8192, "tokens of the sequence"),
                                ("heads", 8, "query heads"), ("kv-heads", 8, "key/value heads"),
                                ("head-dim", 32, "width of a head"), ("repeats", 20, "measured rounds")):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.heads % arguments.ranks or arguments.kv_heads % arguments.ranks:
        parser.error(f"--heads {arguments.heads} and --kv-heads {arguments.kv_heads} must be multiples of --ranks "
                     f"{arguments.ranks} here: the separate exchanges support nothing else")
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as scratch:
        processes = [context.Process(target=work, args=(rank, arguments, f"{scratch}/store", results), daemon=True)
                     for rank in range(arguments.ranks)]
        for process in processes:
            process.start()
        found = sorted((results.get(timeout=600) for _ in processes), key=lambda result: result[0])
        for process in processes:
            process.join()
    formula = exchange_bytes(arguments.seq_length, arguments.heads, arguments.kv_heads, arguments.head_dim,
                             arguments.ranks, 4)
    print(f"{arguments.ranks} ranks, sequence {arguments.seq_length}, {arguments.heads} query and {arguments.kv_heads} "
          f"key/value heads of {arguments.head_dim}, fp32; load {os.getloadavg()[0]:.1f}")
    print(f"formula: {formula / 1e6:.3f} MB sent per rank and direction (q, k, v there and o back)")
    print(f"{'':<8}{'exchanges':>10}{'MB sent':>10}{'ms forward+backward':>22}{'of cpu time':>13}")
    for name in found[0][1]:
        sent, exchanges = found[0][2][name]
        wall, cpu = (max(statistics.median(pair[index] for pair in times[name]) for _, times, _ in found)
                     for index in (0, 1))
        print(f"{name:<8}{exchanges:>10}{sent / 1e6:>10.3f}{1e3 * wall:>22.1f}{1e3 * cpu:>13.1f}")


if __name__ == "__main__":
    main()
