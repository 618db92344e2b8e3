"""``pretrain_gpt.py --dry-run``: flags, exit codes, and that nothing heavy is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_sp.config.cli.plan_flags import PlanFlags, split_plan_flags
from megatron_sp.errors import ConfigError
from megatron_sp.plan.dry_run import dry_run

ROOT = Path(__file__).resolve().parents[3]
RUN = ("--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 1024 --lr 1e-4 --train-iters 10 --bf16 "
       "--attention-dropout 0 --hidden-dropout 0 --global-batch-size 8")


def test_the_program_plans_without_torch_data_tokenizer_or_trackers() -> None:
    code = ("import sys, runpy; sys.argv = ['pretrain_gpt.py', *sys.argv[1:]]\n"
            "try: runpy.run_path('pretrain_gpt.py', run_name='__main__')\n"
            "except SystemExit as stop: print('exit', stop.code)\n"
            "print(sorted({'torch', 'transformers', 'tensorboard', 'wandb'} & set(sys.modules)))")
    flags = [*RUN.split(), "--dry-run", "--world-size", "8", "--tokenizer-type", "Llama3Tokenizer", "--data-path", "no",
             "--tensorboard-dir", "t", "--wandb-project", "p", "--save", "/proc/none", "--load", "none"]
    out = subprocess.run([sys.executable, "-c", code, *flags], capture_output=True, text=True, check=True,
                         cwd=ROOT).stdout
    assert "8 ranks = data parallel 8" in out and "device: H100, computing in bf16" in out
    assert out.splitlines()[-2:] == ["exit 0", "[]"]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(PlanFlags(world_size=4, device="A100-80", json=True), RUN.split(), 1) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["world_size"] == 4 and plan["memory"]["device"] == "A100-80"
    assert any("50,257" in note for note in plan["notes"])


def test_a_plan_that_does_not_fit_is_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(PlanFlags(), [*RUN.split(), "--device-memory", "1GB"], 1) == 0
    assert "does NOT fit" in (text := capsys.readouterr().out) and "tools/plan.py" in text


def test_a_plan_shows_what_memory_efficiency_turns_on(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*RUN.split(), "--seq-length", "262144", "--device-memory", "8GB", "--memory-efficiency", "auto"]
    assert dry_run(PlanFlags(), words, 1) == 0
    shown = capsys.readouterr().out
    assert "--memory-efficiency auto: " in shown and "turned on:" in shown and "does NOT fit" not in shown
    with pytest.raises(ConfigError, match="no memory technique makes this run fit"):
        dry_run(PlanFlags(), [*words, "--device-memory", "3.5GB"], 1)


@pytest.mark.parametrize("flags, part", [
    (PlanFlags(device="H1000"), "--device: 'H1000' is not one of"),
    (PlanFlags(world_size=3), "--global-batch-size 8 is not a multiple")])
def test_refusals(flags: PlanFlags, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        dry_run(flags, RUN.split(), 1)


def test_flags_of_a_plan_are_cut_out() -> None:
    words = "--dry_run --world-size=16 --device H200 --lr 1 --json --device-memory 80GB".split()
    assert split_plan_flags(words) == (PlanFlags(16, "H200", True), ["--lr", "1", "--device-memory", "80GB"])
    assert split_plan_flags(["--lr", "1"]) == (None, ["--lr", "1"])


@pytest.mark.parametrize("line, part", [
    ("--world-size 8", "--world-size needs --dry-run"), ("--dry-run --world-size 0", "must be at least 1"),
    ("--dry-run --world-size x", "not a whole number"), ("--dry-run --device", "--device needs a value")])
def test_wrong_flags_of_a_plan(line: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        split_plan_flags(line.split())


#: Tensor parallelism 2 and Ulysses 4: one copy of the model needs 8 processes.
SPLIT_FLAGS = ("--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 512 --lr 1e-3 --train-iters 1 "
         "--tensor-model-parallel-size 2 --ulysses-size 4 --vocab-size 100").split()


def test_without_a_launcher_one_copy_of_the_model_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(PlanFlags(), SPLIT_FLAGS, 1) == 0
    shown = capsys.readouterr().out
    assert "layout: 8 ranks" in shown and "--world-size N plans for more" in shown


@pytest.mark.parametrize("launched,more,said", [
    (1, "", "1 device per node, since the launcher starts 1 process on this node"),
    (0, "", "8 devices per node, since nothing says otherwise"), (1, "--devices-per-node 4", "")])
def test_it_says_where_the_devices_of_a_node_come_from(launched: int, more: str, said: str,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(PlanFlags(world_size=16), [*SPLIT_FLAGS, *more.split()], 1, launched) == 0
    shown = capsys.readouterr().out
    assert said in shown and ("--devices-per-node N plans for other nodes" in shown) == bool(said)


@pytest.mark.parametrize("flags,world", [(PlanFlags(world_size=16), 1), (PlanFlags(), 16)])
def test_a_given_number_counts(flags: PlanFlags, world: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(flags, SPLIT_FLAGS, world) == 0
    shown = capsys.readouterr().out
    assert "layout: 16 ranks" in shown and "--world-size N plans for more" not in shown


def test_a_wrong_device_hides_no_other_mistake() -> None:
    with pytest.raises(ConfigError) as caught:
        dry_run(PlanFlags(world_size=1, device="H9"), [*RUN.split(), "--num-attention-heads", "7"], 1)
    assert [any(part in problem for problem in caught.value.problems) for part in (
        "--device: 'H9'", "--hidden-size 256")] == [True, True]
