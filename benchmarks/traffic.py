#!/usr/bin/env python3
"""Count what a layer, embedding with output layer and loss, and an optimizer step cost on a GPU; no GPU is needed.

    python benchmarks/traffic.py --json traffic.json

Counted are, for forward and backward together: operators that launch something, and bytes that operators other than
matrix products and attention read and write. These bytes are also given relative to the size of the layer's input,
tokens x hidden x 2 bytes. Compared are our layer, that of transformers with its two implementations of attention, that
of torchtitan where it can be imported, and a hand-written layer (``plain_model.py``). All compute in bf16. Tensors have
shapes and no values, so nothing is computed and any size is counted within seconds. ``megatron_sp/proof/traffic.py``
says what is assumed.

``--compile`` also counts the kernels that torch's compiler makes of the same layers for a GPU, and the bytes that they
move (``megatron_sp/proof/compiled_traffic.py``). It takes about 10 seconds of processor time for each layer.

The optimizer step is counted on a small model with values, clipping included. At last a whole training step of a small
model is counted in several layouts: values that the host reads before the end of the step, copies between host and
device in forward and backward, and collectives, each with the mean size of its whole tensor
(``benchmarks/fake_ranks.py``). With other sizes of the model the bytes change and the counts do not.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks.fake_ranks import count_sharded_step, count_step  # noqa: E402
from benchmarks.traffic_layers import (  # noqa: E402
    META,
    Ends,
    Layer,
    Shape,
    our_ends,
    our_flags,
    our_layer,
    our_run,
    plain_ends,
    plain_layer,
    torchtitan_layer,
    transformers_ends,
    transformers_layer,
)
from megatron_sp import runtime  # noqa: E402
from megatron_sp.errors import ConfigError  # noqa: E402
from megatron_sp.output_files import complete_file  # noqa: E402
from megatron_sp.progress import progress_bar  # noqa: E402
from megatron_sp.proof.compiled_traffic import counting_backend, described_gpu  # noqa: E402
from megatron_sp.proof.traffic import Collective, Traffic, gpu_kernels  # noqa: E402


def count_layer(shape: Shape, layer: Layer) -> Traffic:
    """Return the traffic of a layer's forward and backward."""
    x = shape.hidden_states()
    grad = torch.empty_like(x)
    with Traffic() as traffic, gpu_kernels(traffic):
        torch.autograd.backward(layer(x), grad)
    return traffic


def count_compiled_layer(shape: Shape, make: Callable[[Shape], Layer]) -> Traffic:
    """Return the traffic of a layer's forward and backward as torch's compiler plans it.

    Raises:
        ImportError, AttributeError: this torch lacks a function of its compiler, or the layer cannot be imported.
    """
    from torch._dynamo.exc import BackendCompilerFailed

    traffic = Traffic()
    torch.compiler.reset()
    with torch.compiler.set_stance("default", force_backend=counting_backend(traffic)), described_gpu():
        x = shape.hidden_states()
        try:
            torch.autograd.backward(make(shape)(x), torch.empty_like(x))
        except BackendCompilerFailed as error:
            if isinstance(error.inner_exception, ImportError | AttributeError):
                raise error.inner_exception from error
            raise
    torch.compiler.reset()
    return traffic


def count_ends(shape: Shape, ends: Ends) -> Traffic:
    """Return the traffic of forward and backward of all that is not a layer."""
    tokens, labels = (torch.empty(1, shape.tokens, dtype=torch.int64, device=META) for _ in range(2))
    x = shape.hidden_states()
    with Traffic() as traffic, gpu_kernels(traffic):
        results = ends(tokens, x, labels)
        with traffic.paused():
            grads = [torch.empty_like(y) for y in results]
        torch.autograd.backward(results, grads)
    return traffic


# ---------------------------------------------------------------- the optimizer step

def count_our_update(layers: int) -> tuple[Traffic, int]:
    """Return the traffic of norm, clipping and update of a small model, and its number of parameter tensors."""
    from megatron_sp.data.batch import Microbatch
    from megatron_sp.model.build import build_model
    from megatron_sp.parallel.mesh import ParallelMesh
    from megatron_sp.train.train_step import TrainStep

    shape = Shape(64, 4, 2, 128, 256, 32)
    run = our_run([flag for flag in our_flags(shape, layers) if flag != "--bf16"])
    mesh = ParallelMesh.build(run.parallel)
    step = TrainStep.build(run, build_model(run, mesh), mesh)
    tokens = torch.zeros(1, shape.tokens, dtype=torch.int64)
    batch = Microbatch(tokens, tokens, torch.arange(shape.tokens).unsqueeze(0), torch.zeros(1, dtype=torch.int64),
                       shape.tokens)
    step.train([batch], scheduler_samples=0)  # makes the optimizer's states
    loss = step.engine.forward_backward([batch], float(shape.tokens))
    with Traffic() as traffic:
        step._apply(step._reduce(loss, torch.tensor(shape.tokens), 1.0, 1.0, ()))
    return traffic, len(list(step.model.parameters()))


def count_plain_update(layers: int) -> tuple[Traffic, int]:
    """Return the same of the hand-written model: ``clip_grad_norm_`` and fused AdamW."""
    from benchmarks.plain_model import PlainModel

    model = PlainModel(layers=layers, hidden=64, heads=4, ffn=128, vocab=256, seq_length=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with Traffic() as traffic:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return traffic, len(list(model.parameters()))


# ---------------------------------------------------------------- the tables

SELECTIVE = ("--recompute-granularity", "selective")
FULL = tuple("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split())
LAYERS: dict[str, Callable[[Shape], Layer]] = {
    "ours": our_layer,
    "ours, --recompute-granularity selective": lambda shape: our_layer(shape, *SELECTIVE),
    "ours, --recompute-granularity full": lambda shape: our_layer(shape, *FULL),
    "plain_model.py": plain_layer,
    "torchtitan": torchtitan_layer,
    "transformers, sdpa": lambda shape: transformers_layer(shape, "sdpa"),
    "transformers, eager attention": lambda shape: transformers_layer(shape, "eager")}


def compiled(make: Callable[[Shape], Layer]) -> Callable[[Shape], Layer]:
    """Return a function that makes the same layer, compiled as a whole."""
    return lambda shape: torch.compile(make(shape), fullgraph=True, dynamic=False)


COMPILED_LAYERS: dict[str, Callable[[Shape], Layer]] = {
    "ours": lambda shape: our_layer(shape, "--compile"),
    "ours, --recompute-granularity selective": lambda shape: our_layer(shape, "--compile", *SELECTIVE),
    "ours, --recompute-granularity full": lambda shape: our_layer(shape, "--compile", *FULL),
    **{name: compiled(make) for name, make in LAYERS.items() if not name.startswith("ours")}}
ENDS: dict[str, Callable[[Shape], Ends]] = {
    "ours": our_ends, "plain_model.py": plain_ends, "transformers": transformers_ends}
UPDATES: dict[str, Callable[[int], tuple[Traffic, int]]] = {
    "ours": count_our_update, "plain_model.py": count_plain_update}


#: Layouts whose steps are counted: flags and number of ranks.
STEPS = {
    "ZeRO 1, 8 ranks": ("--zero-stage 1", 8),
    "ZeRO 3, 8 ranks": ("--zero-stage 3", 8),
    "ZeRO 3 over 4 of 8 ranks": ("--zero-stage 3 --fsdp-size 4", 8),
    "ZeRO 3, Ulysses 4": ("--zero-stage 3 --ulysses-size 4", 8),
    "ZeRO 3, ring 4": ("--zero-stage 3 --ring-size 4", 8),
    "ZeRO 3, tensor 2": ("--zero-stage 3 --tensor-model-parallel-size 2 --sequence-parallel", 8),
    "all of them, 16 ranks": ("--zero-stage 3 --tensor-model-parallel-size 2 --sequence-parallel --ulysses-size 2 "
                              "--ring-size 2", 16)}


def figures(traffic: Traffic, unit: int) -> dict[str, Any]:
    """Return what the tables and the JSON file show of a traffic; ``unit``: bytes that count as 1."""
    return {"operators": traffic.operators, "matrix_products": traffic.matrix_products, "bytes": traffic.moved,
            "relative": traffic.moved / unit, "bytes_by_operator": dict((traffic.read + traffic.written).most_common())}


def count_steps() -> dict[str, Any]:
    """Count a training step of a small model in several layouts, on rank 0; print the table and return the figures."""
    found: dict[str, Any] = {}
    print(f"\na step of 2 microbatches and 2 layers\n{'':<26}{'reads':>6}{'copies':>7}  collectives")
    for name, (flags, world) in STEPS.items():
        traffic, copies = count_sharded_step(flags, world), sum(count_step(flags, world).crossings.values())
        reads = sum(traffic.host_reads.values())
        calls = {f"{kind} {group}": {"count": count, "bytes": traffic.sent[Collective(kind, group)]}
                 for (kind, group), count in sorted(traffic.collectives.items())}
        found[name] = {"host_reads": reads, "copies_to_device": copies, "collectives": calls}
        for line, (call, figure) in enumerate(calls.items()):
            start = f"{name:<26}{reads:>6}{copies:>7}" if line == 0 else " " * 39
            print(f"{start}  {call:<24}{figure['count']:>4} x {figure['bytes'] / figure['count'] / 1e3:>9.1f} KB")
    return found


def show(title: str, found: dict[str, dict[str, Any]]) -> None:
    """Print a table of what was counted."""
    print(f"\n{title}\n{'':<42}{'operators':>10}{'products':>10}{'GB moved':>10}{'relative':>10}{'of ours':>9}")
    for name, row in found.items():
        print(f"{name:<42}{row['operators']:>10}{row['matrix_products']:>10}{row['bytes'] / 1e9:>10.2f}"
              f"{row['relative']:>10.1f}{row['bytes'] / found['ours']['bytes']:>9.2f}")


def count_all(what: str, layers: dict[str, Callable[[Shape], Layer]],
              count: Callable[[Callable[[Shape], Layer]], Traffic], unit: int) -> dict[str, dict[str, Any]]:
    """Return the figures of all layers that can be made here; name the others."""
    found, left_out = {}, []
    for name, make in progress_bar(layers.items(), desc=what, leave=False):
        try:
            found[name] = figures(count(make), unit)
        except (ImportError, AttributeError) as error:
            left_out.append(f"{what}: {name} is left out, because something is missing here: {error}")
    print(*left_out, sep="\n")
    return found


def measure(shape: Shape, layers: int, is_compiled: bool) -> dict[str, Any]:
    """Count everything, print the tables and return the figures."""
    unit = 2 * shape.tokens * shape.hidden
    found: dict[str, Any] = {"shape": vars(shape), "torch": torch.__version__, "ends": {}, "update": {}}
    found["layer"] = count_all("layers", LAYERS, lambda make: count_layer(shape, make(shape)), unit)
    if is_compiled:
        found["compiled"] = count_all("compiled layers", COMPILED_LAYERS,
                                      lambda make: count_compiled_layer(shape, make), unit)
    for name, make_ends in ENDS.items():
        found["ends"][name] = figures(count_ends(shape, make_ends(shape)), unit)
    show("one layer, forward and backward", found["layer"])
    if found.get("compiled"):
        show("one layer, forward and backward, compiled", found["compiled"])
    show("embedding, final norm, output layer and loss, forward and backward", found["ends"])
    print(f"\noptimizer step with clipping, {layers} small layers\n"
          f"{'':<42}{'operators':>10}{'parameter tensors':>20}{'for each':>10}")
    for name, count in UPDATES.items():
        traffic, tensors = count(layers)
        found["update"][name] = {"operators": traffic.operators, "parameter_tensors": tensors,
                                 "launched": dict(traffic.launched.most_common())}
        print(f"{name:<42}{traffic.operators:>10}{tensors:>20}{traffic.operators / tensors:>10.2f}")
    return found


@contextmanager
def one_process() -> Iterator[None]:
    """Make a process group of this process alone, which our mesh needs."""
    with tempfile.TemporaryDirectory() as scratch:
        dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def check(arguments: argparse.Namespace) -> None:
    """Refuse sizes of which no layer can be made.

    Raises:
        ConfigError: naming every one of them.
    """
    problems = [f"--{name.replace('_', '-')} {value} must be at least 1." for name in (
        "hidden", "heads", "kv_heads", "ffn", "vocab", "tokens", "layers") if (value := getattr(arguments, name)) < 1]
    hidden, heads, kv_heads = arguments.hidden, arguments.heads, arguments.kv_heads
    if not problems and hidden % (2 * heads):
        problems.append(f"--hidden {hidden} is not a multiple of 2 x --heads {heads}: a head has an even width.")
    if not problems and heads % kv_heads:
        problems.append(f"--heads {heads} is not a multiple of --kv-heads {kv_heads}.")
    if problems:
        raise ConfigError(problems)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, meaning in (
            ("hidden", 4096, "hidden size"), ("heads", 32, "query heads"), ("kv-heads", 8, "key/value heads"),
            ("ffn", 14336, "width of the feed-forward layer"), ("vocab", 128256, "vocabulary"),
            ("tokens", 8192, "tokens of the sequence")):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{meaning} (default: {default})")
    parser.add_argument("--layers", type=int, default=32, metavar="N",
                        help="layers of the small model of the optimizer step (default: %(default)s)")
    parser.add_argument("--compile", action="store_true", help="also count the layers as torch.compile makes them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to this file")
    arguments = parser.parse_args(argv)
    check(arguments)
    shape = Shape(arguments.hidden, arguments.heads, arguments.kv_heads, arguments.ffn, arguments.vocab,
                  arguments.tokens)
    with one_process():
        found = measure(shape, arguments.layers, arguments.compile)
    found["steps"] = count_steps()
    if arguments.json:
        with complete_file(arguments.json, "--json") as file:
            file.write(json.dumps(found, indent=1).encode() + b"\n")
    return 0


if __name__ == "__main__":
    runtime.run_program(main)
