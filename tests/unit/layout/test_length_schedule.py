"""Schedules of sequence lengths: reading them, where phases begin, and the run of one phase."""

from __future__ import annotations

import pytest

from megatron_sp.layout.length_schedule import parse_length, parse_length_schedule, phases, run_of_length
from tests.helpers.configs import STYLES, tiny_run

TINY = f"{STYLES['llama']} --seq-length 64 --global-batch-size 4"


def test_lengths_count_in_1024_and_tokens_in_1000() -> None:
    assert parse_length_schedule(["0:8K", "10B:32K", "1.5T:1M"]) == ((0, 8192), (10**10, 32768), (15 * 10**11, 2**20))
    assert (parse_length("8192"), parse_length("128k"), parse_length("1_000")) == (8192, 131072, 1000)


@pytest.mark.parametrize("words, problem", [
    ("1K:8K", "starts at 1K tokens; start with 0:LENGTH"),
    ("0:8K 0:16K", "'0:16K' does not come after"),
    ("0:8K 10B:8K", "does not lengthen the 8192 tokens"),
    ("0:8K 10B:4K", "lengths must grow"),
    ("0:8K 10B:12K", "8192 does not divide the longest length 12288"),
    ("0:8K 10B", "'10B' is not TOKENS:LENGTH"),
    ("0:8B", "'8B' is not a length in tokens"), ("0:0", "'0' is not a length"),
    ("0:8K 1.0005K:16K", "1.0005K is not a whole number of tokens"),
    ("0:9999999M", "'9999999M' is more than 1,000,000,000 tokens"),
    ("0:8K x:16K", "'x' is not a number of tokens"),
])
def test_a_schedule_that_cannot_be_is_refused(words: str, problem: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_length_schedule(words.split())
    assert problem in str(error.value)


def test_a_phase_begins_with_the_first_step_after_its_tokens() -> None:
    """Steps of 4 samples of 64 tokens: 600 tokens are 9.4 samples, and the third step ends with sample 12."""
    run = tiny_run(f"{TINY} --seq-length-schedule 0:16 600:32 1024:64".split())
    assert run.data.seq_length == 64
    assert [(phase.length, phase.parts, phase.first, phase.stop) for phase in phases(run)] == [
        (16, 4, 0, 12), (32, 2, 12, 16), (64, 1, 16, None)]


def test_batches_that_grow_are_counted() -> None:
    words = f"{TINY} --seq-length-schedule 0:32 1K:64 --step-batch-size-schedule 0:2 512:4"
    assert [phase.first for phase in phases(tiny_run(words.split()))] == [0, 16]      # 8 samples by 2, 8 by 4


def test_a_step_has_the_same_tokens_in_all_phases() -> None:
    run = tiny_run(f"{TINY} --seq-length-schedule 0:16 1K:64 --sequence-chunk-size 32".split())
    short = run_of_length(run, 16)
    assert short.data.seq_length * short.train.global_batch_size == 64 * 4
    assert short.memory.sequence_chunk_size == 16 and short.train.micro_batch_size == run.train.micro_batch_size
    assert run_of_length(run, 64).train == run.train and run_of_length(run, 64).memory == run.memory
