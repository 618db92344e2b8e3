"""Between the first forward and the last backward of a step the host waits for nothing that the device computes.

On a GPU the host runs ahead of the device. A host that reads a value, or copies a tensor from memory that is not
pinned, waits until the device has done all its work, and the device then waits for the host.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.fake_ranks import count_sharded_step, count_step
from megatron_sp.layout.masks.attention_mask import AttentionMask

PACKAGE = Path(__file__).resolve().parents[3] / "megatron_sp"
LAYOUTS = {
    "one rank": ("", 1), "gpt": ("--normalization LayerNorm --position-embedding-type learned_absolute "
                                 "--max-position-embeddings 96", 1),
    "tensor": ("--tensor-model-parallel-size 4", 4), "sequence-parallel": (
        "--tensor-model-parallel-size 2 --sequence-parallel", 2),
    "key/value heads kept by every rank": ("--tensor-model-parallel-size 3 --num-query-groups 2", 3),
    "ulysses": ("--ulysses-size 4", 4), "copied heads": ("--ulysses-size 6", 6),
    "uneven heads": ("--ulysses-size 8", 8),
    "overlap": ("--ulysses-size 2 --ulysses-overlap-groups 2", 2), "ring": ("--ring-size 3", 3),
    "ring of uneven heads": ("--ring-size 2 --ulysses-size 8", 16),
    "all": ("--tensor-model-parallel-size 2 --sequence-parallel --ulysses-size 2 --ring-size 2", 16),
    "full recomputation": ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 1),
    "selective recomputation": ("--recompute-granularity selective", 1),
    "tiles": ("--mlp-tile-size 16 --loss-tile-size 16", 1), "head groups": ("--attention-head-groups 2", 1),
    "chunks": ("--sequence-chunk-size 24", 1), "query and key norm": ("--qk-layernorm", 1),
    "unfused": ("--attention-core unfused", 1)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_read_and_no_copy(layout: str) -> None:
    traffic = count_step(*LAYOUTS[layout])  # a read would be an error, because there is nothing to read
    assert traffic.operators > 100 and not traffic.crossings


@pytest.mark.parametrize(("flags", "world"), [
    ("--zero-stage 3 --fsdp-size 2 --bf16 --tensor-model-parallel-size 2 --sequence-parallel", 8),
    pytest.param("--zero-stage 0", 4, marks=pytest.mark.slow),
    pytest.param("--zero-stage 1 --bf16", 4, marks=pytest.mark.slow),
    pytest.param("--zero-stage 2 --ulysses-size 2 --ring-size 2 --recompute-granularity selective", 4,
                 marks=pytest.mark.slow)])
def test_no_read_with_weights_split_over_ranks(flags: str, world: int) -> None:
    """FSDP brings hooks of its own. A whole step reads once, with ``tolist``, which is not seen on a CPU."""
    traffic = count_sharded_step(flags, world)
    assert traffic.collectives and not traffic.host_reads


@pytest.mark.parametrize(("flags", "mask"), [
    ("--window-size 32", AttentionMask()),
    ("--reset-attention-mask --window-size 32", AttentionMask(((0, 40), (0, 8, 70))))])
def test_places_of_a_mask_are_copied_once_for_all_layers(flags: str, mask: AttentionMask) -> None:
    copies = [sum(count_step(flags, 1, layers=layers, microbatches=1,
                             mask=replace(mask, computed={})).crossings.values()) for layers in (1, 2)]
    assert copies[0] == copies[1] > 0


def test_no_layer_makes_a_tensor_from_numbers() -> None:
    """``torch.tensor(numbers, device=...)`` copies and waits. Only what is built once may do it."""
    calls = [f"{path.name}:{node.lineno}" for room in ("model", "parallel", "activations", "layout", "transport")
             for path in sorted((PACKAGE / room).rglob("*.py")) if path.name not in ("mesh.py",)
             for function in ast.walk(ast.parse(path.read_text()))
             if isinstance(function, ast.FunctionDef) and function.name not in ("__init__", "__post_init__")
             for node in ast.walk(function)
             if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.tensor", "torch.as_tensor")
             and any(keyword.arg == "device" for keyword in node.keywords)]
    assert not calls


def test_dropout_reads_and_copies_nothing() -> None:
    for flags in ("--hidden-dropout 0.1", "--attention-dropout 0.1", "--hidden-dropout 0.1 --ulysses-size 2"):
        assert not count_step(flags, 2 if "ulysses" in flags else 1).crossings
