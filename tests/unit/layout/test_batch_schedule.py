"""--step-batch-size-schedule and named validation sets: how they are read, and what is refused."""

from __future__ import annotations

import pytest

from megatron_sp.config.cli.named_sets import named_sets
from megatron_sp.config.load import load_run
from megatron_sp.errors import ConfigError
from megatron_sp.layout.batch_schedule import parse_batch_schedule

BASE = ("--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 128 --lr 1e-3 --train-iters 10 "
        "--tokenizer-type NullTokenizer --vocab-size 512")
MOCK = f"{BASE} --mock-data"


def refused(argv: list[str], world: int = 1) -> str:
    with pytest.raises(ConfigError) as caught:
        load_run(argv, world)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize("words", [["0:768 2.4B:1_536 1T:3072"], ["0:768", "2.4B:1536", "1T:3072"],
                                   ["'0:768", "2400m:1536", "1000B:3072'"]])
def test_one_quoted_value_and_several_words_are_alike(words: list[str]) -> None:
    run, _ = load_run([*MOCK.split(), "--step-batch-size-schedule", *words], 1)
    assert parse_batch_schedule(run.train.step_batch_size_schedule) == (
        (0, 768), (2_400_000_000, 1536), (1_000_000_000_000, 3072))
    assert run.train.global_batch_size == 3072


@pytest.mark.parametrize("schedule, part", [
    ("768", "'768' is not TOKENS:SIZE, such as 0:768 or 250B:1536"),
    ("0:768 1G:5", "'1G:5' is not TOKENS:SIZE"),
    ("1K:8", "the first step starts at 1K tokens; start with 0:SIZE"),
    ("0:8 2K:16 2K:32", "'2K:32' does not come after the step before it"),
    ("0:8 0.0001K:16", "0.0001K is not a whole number of tokens"),
    ("0:0", "'0:0': the batch size must be at least 1"),
])
def test_what_cannot_be_read(schedule: str, part: str) -> None:
    problem = refused([*MOCK.split(), "--step-batch-size-schedule", schedule])
    assert problem.startswith("--step-batch-size-schedule: ") and part in problem


@pytest.mark.parametrize("flags, part", [
    ("--global-batch-size 4", "and --global-batch-size 4 exclude each other"),
    ("--micro-batch-size 3", "8 is not a multiple of --micro-batch-size 3 x data-parallel size 1 = 3"),
    ("--micro-batch-size 16 --decrease-batch-size-if-needed", "8 is below --micro-batch-size 16"),
])
def test_what_does_not_go_with_it(flags: str, part: str) -> None:
    assert part in refused([*MOCK.split(), *flags.split(), "--step-batch-size-schedule", "0:8"])


def test_it_excludes_the_ramp() -> None:
    base = MOCK.replace("--train-iters 10", "--train-samples 100").split()
    assert "--rampup-batch-size 2 2 8 exclude each other" in refused(
        [*base, "--rampup-batch-size", "2", "2", "8", "--step-batch-size-schedule", "0:4"])


def test_every_step_must_fit_the_pipeline() -> None:
    flags = "--pipeline-model-parallel-size 2 --pipeline-schedule interleaved --num-layers 4"
    problem = refused([*MOCK.split(), *flags.split(), "--step-batch-size-schedule", "0:5 1K:4"], 2)
    assert problem.startswith("--global-batch-size 5 makes 5 microbatches")


# --- named sets ------------------------------------------------------------------------------------

def test_names_begin_sets() -> None:
    assert named_sets(["a", "b"]) == {"": ("a", "b")}
    assert named_sets(["0.3", "a", "0.7", "b"]) == {"": ("0.3", "a", "0.7", "b")}
    assert named_sets(["code=a", "books=0.3", "b", "0.7", "/x/c=d"]) == {
        "code": ("a",), "books": ("0.3", "b", "0.7", "/x/c=d")}
    assert named_sets(["code=", "a"]) == {"code": ("a",)}
    assert named_sets([]) == {}


@pytest.mark.parametrize("words, part", [
    ("a code=b", "name all sets or none"), ("code=a code=b", "given twice"), ("code= other=b", "code= has no prefix"),
    ("code=0.3 a 0.7", "--valid-data-path code= has 3 words"), ("code=0 a 0 b", "weights sum to 0")])
def test_mistakes_in_named_sets(words: str, part: str) -> None:
    assert part in refused([*BASE.split(), "--train-data-path", "t", "--valid-data-path", *words.split()])
