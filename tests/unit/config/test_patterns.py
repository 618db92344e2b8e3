"""Patterns of attention on the command line: which layers have which, what is refused, and what has no effect."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_sp.config.load import load_run
from megatron_sp.config.schema import Run
from megatron_sp.errors import ConfigError
from megatron_sp.layout.masks.windows import layer_windows
from megatron_sp.layout.patterns.blocks import BigBird, Fixed, Strided
from megatron_sp.layout.patterns.choice import layer_patterns
from megatron_sp.plan.flops import sequence_flops
from megatron_sp.proof.reference_masks import visible_keys
from megatron_sp.proof.small.code_paths import code_paths
from megatron_sp.proof.small.shrink import shrink

BASE = ("--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --train-iters 2 "
        "--lr 1e-3 --attention-dropout 0 --hidden-dropout 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 97 "
        "--attention-block-size 4")


def load(flags: str, world: int = 1) -> tuple[Run, list[str]]:
    return load_run(f"{BASE} {flags}".split(), world, files=False)


def test_layers() -> None:
    model = load("--attention-pattern BigBird --attention-random-blocks 2 --attention-pattern-seed 5")[0].model
    assert layer_patterns(model) == (BigBird(4, False, 4, 1, 2, 5),) * 4
    model = load("--attention-pattern fixed --window-attn-skip-freq 2 --attention-blocks-by-head")[0].model
    assert layer_patterns(model) == (Fixed(4, True, 4, 1), None) * 2
    model = load("--attention-pattern-per-layer Strided causal sliding-window --window-size 7")[0].model
    strided = Strided(4, False, 4, 4)
    assert layer_patterns(model) == (strided, None, None, strided) and layer_windows(model) == (0, 0, 7, 0)


@pytest.mark.parametrize("flags, said", [
    ("--attention-pattern bigbrid", "is not one of causal, sliding-window, fixed, longformer, bigbird, strided, and"),
    ("--attention-pattern-per-layer fixed nothing", "--attention-pattern-per-layer 'nothing' is not one of"),
    ("--attention-pattern fixed --window-size 8", "contradict each other; keep one of them"),
    ("--attention-pattern-per-layer fixed causal --window-size 8", "contradict each other; keep one of them"),
    ("--attention-pattern-per-layer fixed sliding-window", "-per-layer fixed sliding-window needs --window-size W"),
    ("--attention-pattern fixed --attention-pattern-per-layer fixed", "both say what layers attend to"),
    ("--attention-pattern-per-layer fixed causal --window-attn-skip-freq 2", "both say which layers are local"),
    ("--attention-pattern-per-layer fixed fixed fixed fixed causal", "names 5 patterns, and --num-layers is 4; leave"),
    ("--attention-pattern fixed --attention-global-blocks 5", "give at most as many"),
    ("--attention-pattern fixed --attention-local-blocks 0", "--attention-local-blocks 0: must be at least 1"),
    ("--attention-pattern bigbird --attention-random-blocks -1", "--attention-random-blocks -1: must be at least 0"),
    ("--attention-pattern nowhere.py:f", "there is no file nowhere.py"),
    ("--attention-pattern DIR/own.py:late", "returns 1; blocks that a query may see have the whole numbers 0 to 0"),
    ("--attention-pattern DIR/own.py:none", "has no function none"),
    ("--attention-pattern-per-layer", "--attention-pattern-per-layer: no value is given"),
    ("--attention-pattern-per-layer causal DIR/own.py:late", "--attention-pattern-per-layer DIR/own.py:late for block"),
    ("--attention-pattern longformer --ring-size 2", "is not possible with --ring-size 2")])
def test_mistakes_are_one_sentence(flags: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def late(block):\n    return [block + 1]\n")
    with pytest.raises(ConfigError) as error:
        load(flags.replace("DIR", str(tmp_path)), 2 if "ring" in flags else 1)
    (problem,) = error.value.problems
    assert said.replace("DIR", str(tmp_path)) in problem and "--" in problem


def test_mistakes_are_reported_together() -> None:
    with pytest.raises(ConfigError) as error:
        load("--attention-pattern fixed --attention-global-blocks 5 --ring-size 2", 2)
    assert len(error.value.problems) == 2
    assert load("--attention-pattern fixed --window-attn-skip-freq [0]*4 --ring-size 2", 2)[1]   # no layer has it


@pytest.mark.parametrize("flags, said", [
    ("", "--attention-block-size has no effect without --attention-pattern fixed"),
    ("--attention-pattern fixed --attention-stride 3", "--attention-stride has no effect without"),
    ("--attention-pattern strided --attention-global-blocks 3", "--attention-global-blocks has no effect without"),
    ("--attention-pattern longformer --attention-blocks-by-head", "--attention-blocks-by-head has no effect without"),
    ("--attention-pattern bigbird --attention-block-size 64", "--attention-block-size 64 holds all of --seq-length 64"),
    ("--attention-pattern bigbird --attention-block-size 16", "has no effect at --seq-length 64"),
    ("--attention-pattern fixed --window-attn-skip-freq 1", "which leaves no layer with it")])
def test_notes(flags: str, said: str) -> None:
    assert sum(said in note for note in load(flags)[1]) == 1
    assert not load("--attention-pattern fixed --attention-global-blocks 2 --window-attn-skip-freq 3")[1]


def test_work_is_counted_by_pairs() -> None:
    """FLOPs of attention are in proportion to the pairs that the layers allow, diagonal counted by half."""
    several = "--attention-pattern-per-layer bigbird causal sliding-window strided --window-size 9"
    mixed, dense = (load(flags)[0].model for flags in (f"{several} --attention-blocks-by-head", ""))
    area = 0.0
    for layer in range(4):
        visible = visible_keys(mixed, layer, 64)
        pairs = 64 * 65 / 2 if visible is None else int(visible.tril().sum()) / 4
        # The band of a window leaves whole triangles out of the square, so only W tokens count the half of a pair.
        area += 2 * pairs - (9 if layer == 2 else 64)
    ratio = sequence_flops(mixed, 64).attention / sequence_flops(dense, 64).attention
    assert ratio == pytest.approx(area / (4 * 64**2))


@pytest.mark.parametrize("flags", [
    "--attention-pattern bigbird --attention-blocks-by-head", "--attention-pattern fixed --window-attn-skip-freq 2",
    "--attention-pattern-per-layer strided sliding-window causal --window-size 9",
    "--attention-pattern DIR/own.py:own"])
def test_the_proof_keeps_the_patterns(flags: str, tmp_path: Path) -> None:
    """The small run of a proof has the same patterns, and they hide something."""
    (tmp_path / "own.py").write_text("def own(head, block):\n    return [head % 2] if block > 2 else ()\n")
    words = flags.replace("DIR", str(tmp_path))
    run, _ = load(f"{words} --seq-length 4096 --attention-block-size 64 --ulysses-size 2", 2)
    small = shrink(run)
    assert not small.not_proven and code_paths(small.run)["patterns"] == code_paths(run)["patterns"]
    length = small.run.data.seq_length
    for layer, pattern in enumerate(layer_patterns(small.run.model)):
        visible = visible_keys(small.run.model, layer, length)
        assert pattern is None or visible is not None and not visible.tril().equal(torch.ones_like(visible).tril())
