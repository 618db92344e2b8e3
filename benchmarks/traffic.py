#!/usr/bin/env python3
"""Count what a layer, embedding with output layer and loss, and an optimizer step cost on a GPU; no GPU is needed.

    python benchmarks/traffic.py --json traffic.json

Counted are, for forward and backward together: operators that launch something, and bytes that operators other than
matrix products and attention read and write. These bytes are also given relative to the size of the layer's input,
tokens x hidden x 2 bytes. Compared are our layer, that of transformers with its two implementations of attention, that
of torchtitan where it can be imported, and a hand-written layer (``plain_model.py``). All compute in bf16. Tensors have
shapes and no values, so nothing is computed and any size is counted within seconds. ``megatron_sp/proof/traffic.py``
says what is assumed.

The optimizer step is counted on a small model with values, clipping included.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from megatron_sp import runtime  # noqa: E402
from megatron_sp.errors import ConfigError  # noqa: E402
from megatron_sp.output_files import complete_file  # noqa: E402
from megatron_sp.proof.traffic import Traffic, gpu_kernels  # noqa: E402

META = torch.device("meta")
EPSILON = 1e-5


@dataclass(frozen=True)
class Shape:
    """The sizes that all compared layers have."""

    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tokens: int

    @property
    def width(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads

    def hidden_states(self) -> torch.Tensor:
        """Return hidden states without values, [1, t, h] in bf16, that need a gradient."""
        return torch.empty(1, self.tokens, self.hidden, dtype=torch.bfloat16, device=META, requires_grad=True)

    def angles(self, dtype: torch.dtype) -> torch.Tensor:
        """Return cosines or sines without values, [1, t, d]."""
        return torch.empty(1, self.tokens, self.width, dtype=dtype, device=META)


#: Takes hidden states and returns the layer's output.
Layer = Callable[[torch.Tensor], torch.Tensor]


def our_flags(shape: Shape, layers: int = 1) -> list[str]:
    """Return the flags of a model of Llama's type."""
    return (f"--num-layers {layers} --hidden-size {shape.hidden} --num-attention-heads {shape.heads} "
            f"--group-query-attention --num-query-groups {shape.kv_heads} --ffn-hidden-size {shape.ffn} --swiglu "
            "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
            "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --bf16 --fused-kernels "
            f"torch --seq-length {shape.tokens} --max-position-embeddings {shape.tokens} --micro-batch-size 1 "
            f"--train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size {shape.vocab}").split()


def our_run(flags: list[str]) -> Any:
    """Return a resolved run."""
    from megatron_sp.config.load import load_run
    from megatron_sp.config.resolve import with_vocab

    run, _ = load_run(flags, 1)
    return with_vocab(run, run.model.vocab_size)


def our_model(shape: Shape, *further: str) -> Any:
    """Return our model with one layer and weights in bf16 that have no values."""
    from megatron_sp.model.build import assemble, plan_stages
    from megatron_sp.model.kernels import choose_kernels
    from megatron_sp.parallel.mesh import ParallelMesh
    from megatron_sp.parallel.tensor import TensorRegion

    run = our_run([*our_flags(shape), *further])
    mesh = ParallelMesh.build(run.parallel)
    region = TensorRegion.of(mesh, megatron_sp=False)
    kernels = replace(choose_kernels(run, mesh.device), products_in_fp32=True)  # as torch has them on a GPU
    return assemble(run, plan_stages(run)[0], mesh, region, torch.bfloat16, kernels)


def our_layer(shape: Shape, *further: str) -> Layer:
    """Return our layer, with further flags."""
    block = our_model(shape, *further).layers["0"]
    angles = tuple(torch.empty(1, shape.tokens, 1, shape.width // 2, device=META) for _ in range(2))
    return lambda x: block(x, angles, (0,))


def plain_layer(shape: Shape) -> Layer:
    """Return the hand-written layer."""
    from benchmarks.plain_model import Layer as PlainLayer

    with META:
        layer = PlainLayer(shape.hidden, shape.heads, shape.ffn, shape.kv_heads).bfloat16()
    cos, sin = shape.angles(torch.bfloat16), shape.angles(torch.bfloat16)
    return lambda x: layer(x, cos, sin)


def transformers_config(shape: Shape, attention: str) -> Any:
    """Return the configuration of transformers' Llama."""
    from transformers import LlamaConfig

    config = LlamaConfig(hidden_size=shape.hidden, num_attention_heads=shape.heads, num_hidden_layers=1,
                         num_key_value_heads=shape.kv_heads, intermediate_size=shape.ffn, vocab_size=shape.vocab,
                         max_position_embeddings=shape.tokens)
    config._attn_implementation = attention
    return config


def transformers_layer(shape: Shape, attention: str) -> Layer:
    """Return transformers' layer; ``attention``: "eager" or "sdpa"."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    with META:
        layer = LlamaDecoderLayer(transformers_config(shape, attention), 0).bfloat16()
    angles = (shape.angles(torch.bfloat16), shape.angles(torch.bfloat16))
    mask = None
    if attention == "eager":
        mask = torch.empty(1, 1, shape.tokens, shape.tokens, dtype=torch.bfloat16, device=META)
    return lambda x: layer(x, attention_mask=mask, position_embeddings=angles)


class CausalAttention(torch.nn.Module):
    """Attention with torchtitan's call signature, for q [b, t, n, d]; its own needs real positions."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def torchtitan_layer(shape: Shape) -> Layer:
    """Return the layer of torchtitan's Llama 3 with these sizes.

    Raises:
        ImportError: torchtitan or a package that it needs is not installed.
    """
    llama = importlib.import_module("torchtitan.models.llama3")
    rope = llama.ComplexRoPE.Config(dim=shape.width, max_seq_len=shape.tokens, theta=500000)
    config, = llama._build_llama3_layers(n_layers=1, dim=shape.hidden, n_heads=shape.heads, n_kv_heads=shape.kv_heads,
                                         hidden_dim=shape.ffn, rope=rope, attn_backend="varlen")
    with META:
        layer = config.build().bfloat16()
    layer.attention.inner_attention = CausalAttention()
    return lambda x: layer(x, None)


def count_layer(shape: Shape, layer: Layer) -> Traffic:
    """Return the traffic of a layer's forward and backward."""
    x = shape.hidden_states()
    grad = torch.empty_like(x)
    with Traffic() as traffic, gpu_kernels(traffic):
        torch.autograd.backward(layer(x), grad)
    return traffic


# ---------------------------------------------------------------- embedding, output layer and loss

#: Takes tokens, hidden states that the layers return, and labels; returns what backward starts from.
Ends = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], list[torch.Tensor]]


def our_ends(shape: Shape) -> Ends:
    """Return our embedding, angles, final norm, output layer and loss."""
    from megatron_sp.model.rotary import rotation

    model = our_model(shape)

    def compute(tokens: torch.Tensor, x: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        positions = torch.empty_like(tokens)
        rotation(model.config, positions, torch.bfloat16)
        loss = model.output(model.final_norm(x), None, lambda x, weight: model.loss_sum(labels, x, weight))
        return [model.embedding(tokens, positions, (0,)), loss]

    return compute


def transformers_ends(shape: Shape) -> Ends:
    """Return the embedding, angles, final norm, output layer and loss of transformers' Llama."""
    from transformers import LlamaForCausalLM

    with META:
        model = LlamaForCausalLM(transformers_config(shape, "sdpa")).bfloat16()

    def compute(tokens: torch.Tensor, x: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        model.model.rotary_emb(x, torch.empty_like(tokens))
        logits = model.lm_head(model.model.norm(x))
        return [model.model.embed_tokens(tokens), model.loss_function(logits, labels, vocab_size=shape.vocab)]

    return compute


def plain_ends(shape: Shape) -> Ends:
    """Return the embedding, final norm, output layer and loss of the hand-written model."""
    from benchmarks.plain_model import PlainModel

    with META:
        model = PlainModel(layers=1, hidden=shape.hidden, heads=shape.heads, ffn=shape.ffn, vocab=shape.vocab,
                           seq_length=shape.tokens).bfloat16()

    def compute(tokens: torch.Tensor, x: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        logits = model.output(model.norm(x))
        return [model.embedding(tokens), F.cross_entropy(logits.flatten(0, 1), labels.flatten())]

    return compute


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
    batch = Microbatch(tokens, tokens, torch.arange(shape.tokens).unsqueeze(0), (0,),
                       shape.tokens)
    step.update(step.compute_gradients([batch]), scheduler_samples=0)  # makes the optimizer's states
    loss = step.engine.forward_backward([batch], float(shape.tokens))
    with Traffic() as traffic:
        step.update(step._reduce(loss, torch.tensor(shape.tokens), 1.0, 1.0, ()), scheduler_samples=0)
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

LAYERS: dict[str, Callable[[Shape], Layer]] = {
    "ours": our_layer,
    "ours, --recompute-granularity selective": lambda shape: our_layer(shape, "--recompute-granularity", "selective"),
    "ours, --recompute-granularity full": lambda shape: our_layer(
        shape, *"--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()),
    "plain_model.py": plain_layer,
    "torchtitan": torchtitan_layer,
    "transformers, sdpa": lambda shape: transformers_layer(shape, "sdpa"),
    "transformers, eager attention": lambda shape: transformers_layer(shape, "eager")}
ENDS: dict[str, Callable[[Shape], Ends]] = {
    "ours": our_ends, "plain_model.py": plain_ends, "transformers": transformers_ends}
UPDATES: dict[str, Callable[[int], tuple[Traffic, int]]] = {
    "ours": count_our_update, "plain_model.py": count_plain_update}


def figures(traffic: Traffic, unit: int) -> dict[str, Any]:
    """Return what the tables and the JSON file show of a traffic; ``unit``: bytes that count as 1."""
    return {"operators": traffic.operators, "matrix_products": traffic.matrix_products, "bytes": traffic.moved,
            "relative": traffic.moved / unit, "bytes_by_operator": dict((traffic.read + traffic.written).most_common())}


def show(title: str, found: dict[str, dict[str, Any]]) -> None:
    """Print a table of what was counted."""
    print(f"\n{title}\n{'':<42}{'operators':>10}{'products':>10}{'GB moved':>10}{'relative':>10}{'of ours':>9}")
    for name, row in found.items():
        print(f"{name:<42}{row['operators']:>10}{row['matrix_products']:>10}{row['bytes'] / 1e9:>10.2f}"
              f"{row['relative']:>10.1f}{row['bytes'] / found['ours']['bytes']:>9.2f}")


def measure(shape: Shape, layers: int) -> dict[str, Any]:
    """Count everything, print the tables and return the figures."""
    unit = 2 * shape.tokens * shape.hidden
    found: dict[str, Any] = {"shape": vars(shape), "torch": torch.__version__, "layer": {}, "ends": {}, "update": {}}
    for name, make in LAYERS.items():
        try:
            found["layer"][name] = figures(count_layer(shape, make(shape)), unit)
        except ImportError as error:
            print(f"{name} is left out, because it cannot be imported here: {error}")
    for name, make_ends in ENDS.items():
        found["ends"][name] = figures(count_ends(shape, make_ends(shape)), unit)
    show("one layer, forward and backward", found["layer"])
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
    parser.add_argument("--layers", type=int, default=16, metavar="N",
                        help="layers of the small model of the optimizer step (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to this file")
    arguments = parser.parse_args(argv)
    check(arguments)
    shape = Shape(arguments.hidden, arguments.heads, arguments.kv_heads, arguments.ffn, arguments.vocab,
                  arguments.tokens)
    with one_process():
        found = measure(shape, arguments.layers)
    if arguments.json:
        with complete_file(arguments.json, "--json") as file:
            file.write(json.dumps(found, indent=1).encode() + b"\n")
    return 0


if __name__ == "__main__":
    runtime.run_program(main)
