"""The window of attention: how dialects say it, which layers have it, and what is refused."""

import pytest

from megatron_sp.config.load import load_run
from megatron_sp.config.schema import Model
from megatron_sp.errors import ConfigError
from megatron_sp.layout.masks.windows import layer_windows, parse_local_layers

BASE = ("--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --train-iters 2 "
        "--lr 1e-3 --attention-dropout 0 --hidden-dropout 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 97")


def load(flags: str) -> tuple[Model, list[str]]:
    run, notes = load_run(f"{BASE} {flags}".split(), 1, files=False)
    return run.model, notes


@pytest.mark.parametrize("flags, windows", [
    ("", (0, 0, 0, 0)), ("--window-size 16", (16, 16, 16, 16)), ("--window-size 15,0", (16, 16, 16, 16)),
    ("--window-size (15,0) --sliding-window 16", (16, 16, 16, 16)), ("--window-size 15 0", (16, 16, 16, 16)),
    ("--window-size -1,0", (0, 0, 0, 0)), ("--window-size -1", (0, 0, 0, 0)), ("--window-size 64", (0, 0, 0, 0)),
    ("--attention-pattern sliding-window --window-size 8 --window-attn-skip-freq 2", (8, 0, 8, 0)),
    ("--window-size 8 --window-attn-skip-freq 3", (8, 8, 0, 8)),
    ("--window-size 8 --window-attn-skip-freq ([1]+[0])*2", (8, 0, 8, 0)),
    ("--window-size 8 --window-attn-skip-freq [0,1,1,0]", (0, 8, 8, 0))])
def test_layers(flags: str, windows: tuple[int, ...]) -> None:
    assert layer_windows(load(flags)[0]) == windows


@pytest.mark.parametrize("flags, said", [
    ("--window-size", "give one number W"), ("--window-size 1,2,3", "give one number W"),
    ("--window-size x", "--window-size: 'x' is not a whole number"),
    ("--window-size -5,0", "give one number W"), ("--window-size 8 --sliding-window 9", "contradict each other"),
    ("--attention-pattern sliding-window", "needs --window-size W"),
    ("--attention-pattern causal --window-size 8", "contradict each other; keep one of them"),
    ("--attention-pattern bigbrid", "is not one of causal, sliding-window"),
    ("--window-size 8 --window-attn-skip-freq [1,0]", "is a list for 2 layers, and --num-layers is 4"),
    *[(f"--window-size 8 --window-attn-skip-freq {text}", "is neither a number of layers of 1 or more nor a list")
      for text in ("0", "-2", "x", "[2,1,1,1]", "__import__('os')", "[1]*99999999", "9**9**9", "[]")]])
def test_mistakes_are_one_sentence(flags: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(flags)
    (problem,) = error.value.problems
    assert said in problem and "--" in problem


@pytest.mark.parametrize("flags, said", [
    ("--window-size 100", "--window-size 100 has no effect at --seq-length 64"),
    ("--window-attn-skip-freq 2", "has no effect without --window-size"),
    ("--window-size 8 --window-attn-skip-freq 1", "which leaves no layer with a window"),
    ("--window-size 8,8", "tokens never see the 8 after them"), ("--window-size -1", "-1 has no effect")])
def test_notes(flags: str, said: str) -> None:
    assert sum(said in note for note in load(flags)[1]) == 1


def test_megatrons_lists_of_layers() -> None:
    assert parse_local_layers("([1]*3+[0]*1)*2") == (True, True, True, False) * 2
    assert parse_local_layers("5") == 5
