"""Combinations of memory techniques, ``--memory-efficiency auto``, and limits of host memory."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_sp.config.load import load_run
from megatron_sp.config.resolve import with_vocab
from megatron_sp.config.rules.checks import check_problems
from megatron_sp.config.schema import Memory, Run
from megatron_sp.errors import ConfigError
from megatron_sp.plan.devices import DEVICES, GB, GIB, Device, device_like
from megatron_sp.plan.efficiency import choose_techniques
from megatron_sp.plan.machine import node_memory
from megatron_sp.plan.memory import predict
from megatron_sp.plan.search import search
from megatron_sp.plan.step_time import predict_step_time
from megatron_sp.plan.techniques import FLAGS, USABLE, cheapest, combinations, technique_flags

MODEL = ("--model-preset llama3-8b --vocab-size 128256 --bf16 --lr 1e-4 --train-iters 10 --mock-data "
         "--tokenizer-type NullTokenizer --zero-stage 3 --ulysses-size 8 --memory-efficiency auto")
H100 = DEVICES["H100"]


def planned(flags: str, world_size: int = 8) -> Run:
    run, _ = load_run(f"{MODEL} {flags}".split(), world_size, files=False)
    return with_vocab(run, run.model.vocab_size)


def chosen(flags: str, device: Device = H100, world_size: int = 8) -> tuple[Run, list[str]]:
    return choose_techniques(planned(flags, world_size), device, 8)


def test_nothing_is_turned_on_where_nothing_is_needed() -> None:
    run, lines = chosen("--seq-length 8192")
    assert run == planned("--seq-length 8192") and len(lines) == 1 and "turned on nothing" in lines[0]


@pytest.mark.parametrize("length", [1 << 16, 1 << 17, 1 << 18, 1 << 20, 1 << 22])
def test_what_is_chosen_fits_and_everything_cheaper_does_not(length: int) -> None:
    base = planned(f"--seq-length {length}")
    run, _ = choose_techniques(base, H100, 8)
    assert not check_problems(run, plan=True)
    assert H100.holds(predict(run, device="gpu"), USABLE)
    cost = predict_step_time(run, H100).total
    cheaper = [each for each in combinations(base, "gpu") if predict_step_time(each, H100).total < 0.998 * cost]
    assert not any(H100.holds(predict(each, device="gpu"), USABLE) for each in cheaper)


def test_as_few_layers_as_fit_are_recomputed() -> None:
    run, _ = chosen("--seq-length 131072")
    memory = run.memory
    assert memory.recompute_method == "block" and memory.recompute_num_layers > 1
    fewer = replace(run, memory=replace(memory, recompute_num_layers=memory.recompute_num_layers - 1))
    assert not H100.holds(predict(fewer, device="gpu"), USABLE)


def test_chunks_that_would_only_fill_a_pipeline_are_left_to_the_user() -> None:
    flags = "--seq-length 16384 --ulysses-size 1 --pipeline-model-parallel-size 8 --zero-stage 1 --global-batch-size 1"
    base = planned(flags)
    assert choose_techniques(base, H100, 8)[0] == base
    fit = cheapest(base, H100, 8)
    assert fit is not None and fit.run.memory.sequence_chunk_size
    assert fit.time.total < predict_step_time(base, H100).total
    _, lines = choose_techniques(planned(flags.replace("16384", "524288")), H100, 8)
    assert "% less time a step" in lines[-1]


def test_longer_sequences_cost_more_techniques() -> None:
    found = [technique_flags(chosen(f"--seq-length {length}")[0].memory) for length in (1 << 13, 1 << 17, 1 << 20)]
    assert found[0] == [] and "block" in found[1] and "--offload-key-values" in found[2]


def test_lines_name_each_technique_with_the_bytes_before_and_after_it() -> None:
    run, lines = chosen("--seq-length 1048576")
    before = f"{predict(planned('--seq-length 1048576'), device='gpu').total / GIB:.1f}"
    after = f"{predict(run, device='gpu').total / GIB:.1f}"
    assert f"{before} GiB are predicted" in lines[0]
    assert lines[1].startswith(f"  --recompute-granularity selective: {before} GiB -> ")
    assert f"-> {after} GiB" in lines[-2]
    steps = [re.findall(r"([\d.]+) GiB -> ([\d.]+) GiB", line)[0] for line in lines[1:-1]]
    assert all(one[1] == other[0] for one, other in zip(steps, steps[1:])), "each starts where the one before ended"
    assert lines[-1].endswith(" ".join(technique_flags(run.memory)))


@pytest.mark.parametrize("given,name", [
    ("--recompute-granularity full", "recompute_granularity"), ("--mlp-tile-size 2048", "mlp_tile_size"),
    ("--sequence-chunk-size 65536", "sequence_chunk_size"), ("--offload-activations 0", "offload_activations"),
    ("--attention-head-groups 1", "attention_head_groups"), ("--recompute-num-layers 2", "recompute_num_layers"),
    ("--checkpoint-activations", "recompute_granularity")])
def test_a_given_flag_stays(given: str, name: str) -> None:
    base = planned(f"--seq-length 1048576 {given}")
    assert base.memory.given == tuple(sorted({"memory_efficiency", name}))
    run, _ = choose_techniques(base, H100, 8)
    assert getattr(run.memory, name) == getattr(base.memory, name) and run.memory != base.memory
    assert all(getattr(each.memory, name) == getattr(base.memory, name) for each in combinations(base, "gpu"))


def test_the_document_shows_these_lines() -> None:
    text = (Path(__file__).parents[3] / "docs/how-to/plan-a-run.md").read_text(encoding="utf-8")
    _, lines = chosen("--seq-length 1048576", DEVICES["A100-80"])
    assert "\n".join(lines) in text


def test_host_memory_is_a_limit() -> None:
    run, _ = chosen("--seq-length 4194304")
    assert 0 < predict(run, device="gpu").host <= USABLE * H100.host_memory
    little, _ = chosen("--seq-length 1048576", replace(H100, host_memory=8 * GB))
    assert predict(little, device="gpu").host <= USABLE * 8 * GB
    assert technique_flags(little.memory) != technique_flags(chosen("--seq-length 1048576")[0].memory)


def test_a_cpu_moves_nothing_to_its_own_memory() -> None:
    base = planned("--seq-length 32768")
    moved = ("offload_key_values", "offload_activations", "offload_optimizer")
    assert not any(getattr(each.memory, name) for each in combinations(base, "cpu") for name in moved)
    plan = predict(planned("--seq-length 32768 --recompute-granularity full --offload-activations"))
    assert not replace(DEVICES["CPU"], memory=plan.total).holds(plan)
    assert replace(DEVICES["CPU"], memory=plan.total + plan.host).holds(plan)


def test_when_nothing_suffices_the_cures_fit() -> None:
    small = replace(H100, memory=24 * GIB, host_memory=32 * GIB)
    with pytest.raises(ConfigError) as caught:
        chosen("--seq-length 2097152", small)
    (problem,) = caught.value.problems
    assert problem.startswith("--memory-efficiency auto: no memory technique makes this run fit")
    length, ranks, size = (int(problem.partition(before)[2].split()[0].strip(".;")) for before in (
        "--seq-length ", "; or ", "--ulysses-size "))
    assert chosen(f"--seq-length {length}", small)
    with pytest.raises(ConfigError):
        chosen(f"--seq-length {length * 2}", small)
    assert choose_techniques(planned(f"--seq-length 2097152 --ulysses-size {size}", ranks), small, 8)


def test_zero_3_is_a_cure() -> None:
    with pytest.raises(ConfigError, match="or --zero-stage 3|: --zero-stage 3"):
        chosen("--seq-length 131072 --zero-stage 0", replace(H100, memory=48 * GIB, host_memory=GIB))


def test_every_layout_gets_techniques_that_its_rules_allow() -> None:
    for layout in ("--tensor-model-parallel-size 2 --sequence-parallel --ulysses-size 4",
                   "--pipeline-model-parallel-size 2 --ulysses-size 4 --zero-stage 1 --global-batch-size 2",
                   "--pipeline-model-parallel-size 2 --ulysses-size 4 --zero-stage 1 --pipeline-schedule zero-bubble "
                   "--global-batch-size 2", "--ulysses-size 4 --ring-size 2", "--ulysses-size 1",
                   "--compile", "--window-size 4096"):
        base = planned(f"--seq-length 262144 {layout}")
        fit = cheapest(base, H100, 8)
        if fit is not None:
            assert not check_problems(fit.run, plan=True) and fit.run.memory.given == base.memory.given
        if "ring" in layout or "compile" in layout:
            assert fit is None or not fit.run.memory.sequence_chunk_size


def test_a_window_drops_keys_and_values_of_chunks() -> None:
    flags = "--seq-length 4194304 --sequence-chunk-size 65536"
    whole, window = planned(flags), planned(f"{flags} --window-size 4096")
    assert predict(window, device="gpu").total < predict(whole, device="gpu").total / 2


def test_the_search_finds_chunks_and_keeps_within_the_host() -> None:
    base, device = planned("--seq-length 524288 --num-layers 8"), DEVICES["A100-40"]
    plans = search(base, 2, device, 8, longest=False)
    assert any("--sequence-chunk-size" in plan.flags for plan in plans)
    assert all(device.holds(plan.memory, USABLE) for plan in plans)
    without = search(base, 2, replace(device, host_memory=0), 8, longest=False)
    assert any(plan.memory.host for plan in plans) and not any(plan.memory.host for plan in without)
    longest = search(base, 2, device, 8, longest=True)
    assert longest and longest[0].length > base.data.seq_length


def test_flags_of_techniques_are_read_back() -> None:
    for each in combinations(planned("--seq-length 262144"), "gpu")[::5]:
        again = planned(f"--seq-length 262144 {' '.join(technique_flags(each.memory))}").memory
        assert replace(again, given=each.memory.given) == each.memory
    assert set(FLAGS) <= set(Memory.__dataclass_fields__)


@pytest.mark.parametrize("flags,part", [
    ("--memory-efficiency auto --device-memory much", "--device-memory: 'much' is not a size"),
    ("--memory-efficiency auto --host-memory 0GB", "--host-memory: '0GB' is not a size"),
    ("--host-memory 1TB", "--host-memory 1TB needs --memory-efficiency auto or --dry-run"),
    ("--memory-efficiency best", "'best' is not one of auto")])
def test_refusals(flags: str, part: str) -> None:
    words = MODEL.replace("--memory-efficiency auto", "").split()
    with pytest.raises(ConfigError, match=part):
        load_run([*words, "--seq-length", "4096", *flags.split()], 8)


def test_devices_by_their_drivers_names() -> None:
    for name, like in (("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA A100-SXM4-40GB", "A100-40"), ("NVIDIA B200", "B200"),
                       ("NVIDIA H200", "H200"), ("NVIDIA L40S", "L40S"), ("something else", "H100")):
        device = device_like(name, 5, 6)
        assert (device.name, device.memory, device.host_memory) == (name, 5, 6)
        assert device.tflops == DEVICES[like].tflops


def test_the_smallest_limit_of_a_node_counts(tmp_path: Path) -> None:
    def put(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert node_memory(tmp_path) == 0
    put("proc/meminfo", "MemTotal:       1000 kB\nMemFree: 1 kB\n")
    assert node_memory(tmp_path) == 1_024_000
    put("proc/self/cgroup", "0::/job/step\n")
    put("sys/fs/cgroup/job/step/memory.max", "max\n")
    assert node_memory(tmp_path) == 1_024_000
    put("sys/fs/cgroup/job/memory.max", "600000\n")
    assert node_memory(tmp_path) == 600_000
    put("proc/self/cgroup", "5:cpu,memory:/docker/x\n2:pids:/y\n")
    put("sys/fs/cgroup/memory/memory.limit_in_bytes", "500000\n")
    assert node_memory(tmp_path) == 500_000
