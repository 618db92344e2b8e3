"""Small parts of the training loop: timers, garbage collection, profiler, bit hashes, device peaks."""

from __future__ import annotations

import gc
import gzip
import json
import time
from pathlib import Path

import pytest
import torch

from megatron_sp.data.batch import Microbatch
from megatron_sp.train.device_copies import DeviceCopies, one_ahead
from megatron_sp.train.garbage import GarbageCollection
from megatron_sp.train.health.replicas import bit_hash
from megatron_sp.train.report.peak_flops import peak_tflops
from megatron_sp.train.report.profile import StepProfiler
from megatron_sp.train.report.timers import Timers, gather_times, times_in_words
from megatron_sp.train.setup import unfused_warnings
from tests.helpers.configs import STYLES, tiny_run

LLAMA = STYLES["llama"].split()
CPU = torch.device("cpu")


def test_timers_measure_from_their_level_on() -> None:
    for level, expected in ((0, set()), (1, {"outer"}), (2, {"outer", "inner"})):
        timers = Timers(level, CPU)
        with timers("outer"):
            for _ in range(3):
                with timers("inner", level=2):
                    pass
        assert timers.end_step().keys() == timers.take(steps=2).keys() == expected
        assert timers.end_step() == timers.take(1) == {}


def test_steps_are_averaged_and_what_happens_now_and_then_is_told_per_occasion(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter((0, 1, 1, 3, 10, 16, 20, 26, 30, 31))     # seconds at which blocks begin and end
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    timers = Timers(1, CPU)
    with timers("batch"):
        pass
    with timers("batch"):
        pass
    assert timers.end_step() == {"batch": 3} and timers.end_step() == {}
    for _ in range(2):
        with timers("save", occasional=True):
            pass
    assert timers.latest_occasions() == {"save": 6} and timers.latest_occasions() == {}
    with timers("batch"):
        pass
    assert timers.end_step() == {"batch": 1}
    assert timers.take(steps=4) == {"batch": 1000, "save": 6000}


def test_times_of_ranks() -> None:
    times = {"batch": [1.0, 3.0, 2.0]}
    assert times_in_words(times, "minmax") == "times (ms, min and max over ranks) | batch: 1.00 3.00"
    assert times_in_words(times, "max") == "times (ms, max over ranks) | batch: 3.00"
    assert times_in_words(times, "all") == "times (ms, by rank) | batch: 1.00 3.00 2.00"
    assert times_in_words(gather_times({"batch": 1.0}), "minmax") == "times (ms) | batch: 1.00"


def test_garbage_is_collected_when_said_and_the_automatic_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda generation=2: calls.append(generation))
    garbage = GarbageCollection(manual=True, interval=2)
    with garbage.disabled_while_training():
        assert not gc.isenabled() and calls == [2]
        for iteration in (1, 2, 3, 4):
            garbage.after_step(iteration)
        assert calls == [2, 2, 2]
        with garbage.around_evaluation():
            assert calls[3:] == [0]
    assert gc.isenabled() and calls[3:] == [0, 0]
    calls.clear()
    automatic = GarbageCollection(manual=False, interval=2)
    with automatic.disabled_while_training(), automatic.around_evaluation():
        automatic.after_step(2)
        assert gc.isenabled() and not calls


def test_a_profile_of_the_steps_that_were_asked_for(tmp_path: Path) -> None:
    flags = f"--profile --profile-step-start 1 --profile-step-end 3 --save {tmp_path} --save-interval 9".split()
    run = tiny_run([*LLAMA, *flags])
    said = []
    for rank in (0, 1):
        profiler, timers = StepProfiler(run, rank, CPU), Timers(0, CPU)
        for iteration in range(1, 6):
            profiler.before_step(iteration)
            with timers("forward-backward"):
                torch.ones(4) @ torch.ones(4)
            said.append(profiler.after_step(iteration))
    assert [bool(text) for text in said] == [False, False, True, False, False] + [False] * 5
    (path,) = (tmp_path / "profile").iterdir()
    assert path.name == "rank0_steps_2-3.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    named = [event for event in events if event.get("name") == "forward-backward"]
    assert sum(event.get("cat") == "user_annotation" for event in named) == 2


def test_a_run_that_ends_early_keeps_what_was_profiled(tmp_path: Path) -> None:
    run = tiny_run([*LLAMA, *f"--profile --profile-step-start 0 --save {tmp_path} --save-interval 9".split()])
    profiler = StepProfiler(run, 0, CPU)
    profiler.before_step(1)
    assert "rank0_steps_1-1.json.gz" in profiler.finish(1) and profiler.finish(1) == ""
    assert "none of the steps 1 to 12 was made" in StepProfiler(run, 0, CPU).finish(20)
    assert StepProfiler(run, 1, CPU).finish(20) == ""


def test_a_hash_sees_every_bit_and_every_place() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        tensor = torch.randn(5, 7).to(dtype)
        assert int(bit_hash(tensor)) == int(bit_hash(tensor.clone()))
        other = tensor.clone()
        other[2, 3] = torch.nextafter(other[2, 3].float(), torch.tensor(9.0)).to(dtype) if dtype == torch.float32 \
            else -other[2, 3]
        assert int(bit_hash(tensor)) != int(bit_hash(other))
        assert int(bit_hash(tensor)) != int(bit_hash(tensor.flip(0)))
    assert int(bit_hash(torch.tensor([0.0]))) != int(bit_hash(torch.tensor([-0.0])))
    nans = torch.tensor([float("nan")])
    assert int(bit_hash(nans)) == int(bit_hash(nans))
    assert int(bit_hash(torch.empty(0))) == 0


def test_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_tflops(tiny_run(LLAMA), CPU) == 0.0
    assert peak_tflops(tiny_run([*LLAMA, "--device-peak-tflops", "0.5"]), CPU) == 0.5
    half = tiny_run([*LLAMA, "--bf16"])
    for name, peak in (("NVIDIA H200", 989.4), ("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA A100-SXM4-80GB", 312.0),
                       ("NVIDIA L40S", 362.0), ("NVIDIA GB200", 2500.0), ("unheard of", 0.0)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_tflops(half, torch.device("cuda")) == peak
    assert peak_tflops(tiny_run(LLAMA), torch.device("cuda")) == 0.0


@pytest.mark.parametrize("flags, words", [
    ("--seq-length 4096 --attention-dropout 0.1", ["at 2048 tokens a step takes about 7 times"]),
    ("--seq-length 16384 --attention-dropout 0.1", ["This run has 16384 tokens: at 8192, attention alone"]),
    ("--seq-length 16384 --attention-core unfused", ["of all pairs of 16384 tokens at once: 4.0 GiB in fp32"]),
    ("--seq-length 16384 --attention-core unfused --tensor-model-parallel-size 2", ["at once: 2.0 GiB in fp32"]),
    ("--seq-length 4096 --attention-core unfused", []), ("--seq-length 16384", [])])
def test_unfused_attention_to_long_sequences_is_told(flags: str, words: list[str]) -> None:
    run = tiny_run([*STYLES["llama"].split(), *flags.split()], 2 if "tensor" in flags else 1)
    lines = unfused_warnings(run)
    assert len(lines) == len(words) and all(word in line for word, line in zip(words, lines))
    assert all("Give --attention-" in line for line in lines)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_next_microbatch_is_copied_while_one_is_computed(count: int) -> None:
    """The computation waits for its own microbatch before the copy of the next starts, so never for the next."""
    events: list[str] = []

    class Copies(DeviceCopies):
        def start(self, batch: Microbatch) -> Microbatch:
            events.append(f"copy {batch.num_valid}")
            return super().start(batch)

        def finish(self, copy: Microbatch) -> Microbatch:
            events.append(f"wait {copy.num_valid}")
            return super().finish(copy)

    tokens = torch.zeros(1, 4, dtype=torch.int64)
    batches = [Microbatch(tokens, tokens, tokens, torch.zeros(1, dtype=torch.int64), number) for number in range(count)]
    for batch in one_ahead(batches, Copies(torch.device("meta"))):
        assert batch.tokens.device.type == "meta"
        events.append(f"compute {batch.num_valid}")
    assert events == {0: [], 1: ["copy 0", "wait 0", "compute 0"], 3: [
        "copy 0", "wait 0", "copy 1", "compute 0", "wait 1", "copy 2", "compute 1", "wait 2", "compute 2"]}[count]
