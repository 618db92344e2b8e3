"""The launch scripts of examples/: what DRY_RUN=1 prints is accepted by the programs and fits the device it names.

Nothing is trained here. ``tests/cluster`` submits ``slurm_pretrain.sh`` to a real Slurm; other tests run
``quickstart.sh`` and ``long_sequence_cpu.sh``.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_sp.config.load import load_run
from megatron_sp.config.resolve import with_vocab
from megatron_sp.config.schema import Run
from megatron_sp.data.corpus.inputs import choose_share, find_parts
from megatron_sp.data.corpus.readers import read_blocks
from megatron_sp.layout.length_schedule import phases
from megatron_sp.plan.devices import DEVICES, GIB
from megatron_sp.plan.memory import predict
from megatron_sp.plan.step_time import predict_step_time
from tests.integration.programs import ROOT, run_program
from tools import evaluate, preprocess_data

EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.sh"))
LONGER = {"quickstart.sh", "long_sequence_cpu.sh", "million_tokens_cpu.sh", "extend_context.sh"}
SIZES, LENGTHS = ("1.2b", "7b", "30b"), ("32K", "64K", "128K", "256K", "512K", "1M")
PAPER, MEGATRON_SP = "paper_settings.sh", "megatron_sp_settings.sh"
#: Share of a device that a plan may fill, as docs/background/memory.md advises.
USABLE = 0.93
#: Every variable that a script may read, beside those of Slurm, OpenMP, torch and the C library.
VARIABLES = set("""CONTAINER DATA_PREFIX DEVICE DRY_RUN INPUT ITERATIONS NODES NPROC OUTPUT_DIR OUTPUT_PREFIX PYTHON
    SAVE_INTERVAL SCALING SEQ_LENGTH SETTINGS SHARDS SIZE TOKENIZER_MODEL TOKENIZER_TYPE VENV""".split())

by_name = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)


def dry_run(script: str, *flags: str, cwd: Path, python: str = "echo", **variables: Any) -> list[str]:
    """Return the lines that a script prints with DRY_RUN=1, started in another directory than the checkout.

    With ``echo`` as the interpreter, the script prints the words of its plan instead of the plan.
    """
    done = run_program("bash", EXAMPLES / script, *flags, cwd=cwd, DRY_RUN="1", PYTHON=python, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def settings(name: str, size: str, length: str) -> dict[str, Any]:
    return {"SETTINGS": str(EXAMPLES / name), "SIZE": size, "SEQ_LENGTH": length}


def flags_in(line: str) -> list[str]:
    """Return the words after ``pretrain_gpt.py``."""
    words = shlex.split(line)
    return words[words.index(str(ROOT / "pretrain_gpt.py")) + 1:]


def planned(lines: list[str]) -> tuple[Run, str]:
    """Return the run of a script's command, checked for the processes of its plan, and the plan's device."""
    flags, plan = flags_in(lines[0]), flags_in(lines[1])
    assert plan[:len(flags)] == flags
    rest = plan[len(flags):]
    if rest[0] == "--host-memory":
        rest = rest[2:]
    words, world_size, device = rest[::2], int(plan[-3]), plan[-1]
    assert words == ["--dry-run", str(world_size), device] and plan[-4] == "--world-size" and plan[-2] == "--device"
    run, _ = load_run(flags, world_size, files=False)
    return with_vocab(run, run.model.vocab_size), device


def peak_gib(run: Run) -> float:
    return predict(run, device="gpu").total / GIB


@by_name
def test_scripts_parse_and_are_short(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    assert script.name in LONGER or len(script.read_text().splitlines()) < 60


def test_the_phases_of_the_extension_are_accepted_and_plan_one_training(tmp_path: Path) -> None:
    """Each phase has a layout of its own, and all agree on where phases begin."""
    lines = dry_run("extend_context.sh", "--lr", "1e-3", cwd=tmp_path, ITERATIONS="40")
    runs = [load_run(shlex.split(line)[shlex.split(line).index("pretrain_gpt.py") + 1:], 2, files=False)[0]
            for line in lines]
    assert [run.data.seq_length_phase for run in runs] == [1, 2, 3]
    assert [run.parallel.dp for run in runs] == [2, 2, 1] and [run.model.rotary_scaling_factor for run in runs] == [
        0, 4, 16]
    for run in runs:
        assert [(phase.length, phase.first) for phase in phases(run)] == [(256, 0), (1024, 48), (4096, 64)]
        assert run.schedule.lr == 1e-3


@by_name
def test_variables_have_common_names_and_are_explained(script: Path) -> None:
    text = script.read_text()
    header = text[:text.index("set -euo pipefail")]
    read = {name for name in re.findall(r"\$\{([A-Z][A-Z_]*):[-+]", text)
            if not name.startswith(("SLURM_", "OMP_", "MALLOC_", "PYTORCH_", "TORCH_"))}
    assert read <= VARIABLES
    explained = header + (EXAMPLES / PAPER).read_text() * (script.name == MEGATRON_SP)
    assert not {name for name in read if not re.search(rf"\b{name}\b", explained)}


@pytest.mark.parametrize("script,variables", [
    ("llama_8b_one_gpu.sh", {}), ("llama_8b_one_node.sh", {}), ("slurm_pretrain.sh", {}),
    ("slurm_pretrain.sh", settings(MEGATRON_SP, "7b", "128K"))])
def test_the_plan_needs_no_torch_and_fits(script: str, variables: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('a plan must not need torch')\n")
    lines = dry_run(script, "--json", cwd=tmp_path, python=sys.executable, PYTHONPATH=str(tmp_path), **variables)
    plan = json.loads("\n".join(lines[1:]))
    run, _ = load_run([word for word in flags_in(lines[0]) if word != "--json"], plan["world_size"], files=False)
    assert plan["memory"]["peak"] == predict(with_vocab(run, run.model.vocab_size), device="gpu").total
    assert plan["memory"]["peak"] <= USABLE * plan["memory"]["limit"]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("script", ["llama_8b_one_gpu.sh", "llama_8b_one_node.sh"])
def test_script_and_document_name_the_planned_figures(script: str, tmp_path: Path) -> None:
    run, device = planned(dry_run(script, cwd=tmp_path))
    memory, time = predict(run, device="gpu"), predict_step_time(run, DEVICES[device], 8)
    figures = [f"{memory.total / GIB:.1f} GiB", f"{time.total:.0f} s"]
    figures += [f"{memory.host / GIB:.1f} GiB"] if memory.host else []
    for text in (EXAMPLES / script, ROOT / "docs/how-to/run-the-examples.md"):
        assert all(figure in text.read_text() for figure in figures), figures


@pytest.mark.parametrize("name", [PAPER, MEGATRON_SP])
@pytest.mark.parametrize("size", SIZES)
def test_the_papers_settings_fit_and_the_document_says_how(name: str, size: str, tmp_path: Path) -> None:
    cells = []
    for length in LENGTHS:
        run, device = planned(dry_run("slurm_pretrain.sh", cwd=tmp_path, **settings(name, size, length)))
        assert run.parallel.world_size == {"1.2b": 64, "7b": 32, "30b": 64}[size]
        assert peak_gib(run) * GIB <= USABLE * DEVICES[device].memory
        cells.append(f"{peak_gib(run):.1f}" + (f" ({device})" if device != "A100-40" else ""))
    row = f"| {size} | {'Ulysses' if name == PAPER else 'Megatron-SP'} | {' | '.join(cells)} |"
    assert row in (ROOT / "docs/how-to/run-the-examples.md").read_text()


def test_both_settings_train_the_same(tmp_path: Path) -> None:
    ours, theirs = (planned(dry_run("slurm_pretrain.sh", cwd=tmp_path, **settings(name, "30b", "64K")))[0]
                    for name in (PAPER, MEGATRON_SP))
    # The padding of the vocabulary depends on the tensor-parallel size.
    assert replace(ours.model, padded_vocab_size=0) == replace(theirs.model, padded_vocab_size=0)
    for part in ("train", "optimizer", "schedule", "data", "precision", "memory"):
        assert getattr(ours, part) == getattr(theirs, part)
    assert (ours.parallel.ulysses, ours.parallel.tp) == (theirs.parallel.tp, theirs.parallel.ulysses) == (8, 1)


def test_fewer_nodes_keep_the_batch(tmp_path: Path) -> None:
    run, _ = planned(dry_run("slurm_pretrain.sh", cwd=tmp_path, NODES="1", **settings(PAPER, "1.2b", "1M")))
    assert (run.parallel.world_size, run.parallel.dp, run.train.global_batch_size) == (8, 1, 8)


def test_settings_that_are_run_say_how_they_are_used(tmp_path: Path) -> None:
    for name in (PAPER, MEGATRON_SP):
        done = run_program("bash", EXAMPLES / name, cwd=tmp_path)
        assert done.returncode == 2 and f"SETTINGS=examples/{name} sbatch examples/slurm_pretrain.sh" in done.stderr


def test_an_unknown_size_is_refused(tmp_path: Path) -> None:
    done = run_program("bash", EXAMPLES / "slurm_pretrain.sh", cwd=tmp_path, DRY_RUN="1", **settings(PAPER, "9b", "1M"))
    assert done.returncode == 2 and "SIZE=9b is not one of 1.2b, 7b, 30b" in done.stderr


@pytest.mark.parametrize("size", ["reduced", "paper"])
def test_the_convergence_study_is_accepted(size: str, tmp_path: Path) -> None:
    for line in dry_run("convergence_study.sh", cwd=tmp_path, SIZE=size):
        words = shlex.split(line)
        processes = int(words[words.index("--nproc-per-node") + 1]) if "--nproc-per-node" in words else 1
        run, _ = load_run(flags_in(line), processes, files=False)
        assert size == "reduced" or peak_gib(with_vocab(run, 50257)) <= USABLE * DEVICES["A100-40"].memory / GIB


def test_several_token_files_are_read(tmp_path: Path) -> None:
    for script, processes in (("llama_8b_one_gpu.sh", 1), ("llama_8b_one_node.sh", 8), ("slurm_pretrain.sh", 16)):
        line = dry_run(script, cwd=tmp_path, DATA_PREFIX="data/a data/b", OUTPUT_DIR="with blank")[0]
        run, _ = load_run(flags_in(line), processes, files=False)
        assert run.data.data_path == ("data/a", "data/b") and run.checkpoint.save == "with blank"


def test_slurms_copy_of_a_script_finds_the_checkout(tmp_path: Path) -> None:
    for script in EXAMPLES.glob("slurm_*.sh"):
        (tmp_path / "spool").mkdir(exist_ok=True)
        copy = shutil.copy(script, tmp_path / "spool" / "slurm_script")
        done = run_program("bash", copy, cwd=ROOT, DRY_RUN="1", PYTHON="echo", INPUT="README.md")
        assert done.returncode == 0 and f" {ROOT}/" in done.stdout, done.stdout + done.stderr


def test_preprocessing_reads_every_line_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        (tmp_path / f"part {number}.jsonl").write_text('{"text": "1"}\n' * (number + 1))
    monkeypatch.chdir(tmp_path)
    found = []
    for task in range(3):
        array = {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_TASK_COUNT": "3", "SLURM_ARRAY_TASK_MAX": "2"}
        alone = {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_TASK_COUNT": "1", "SLURM_ARRAY_TASK_MAX": str(task),
                 "SHARDS": "3"}
        line, = dry_run("slurm_preprocess.sh", cwd=tmp_path, INPUT="*.jsonl", **array)
        assert [line] == dry_run("slurm_preprocess.sh", cwd=tmp_path, INPUT="*.jsonl", **alone), "a repeated task"
        arguments = preprocess_data.parse(shlex.split(line)[2:])
        assert arguments.append_eod and arguments.resume
        assert preprocess_data.output_prefix(arguments) == f"data/corpus_0000{task}-of-00003"
        parts = choose_share(find_parts(arguments.input), task, 3)
        found += [(block.part.path, line) for block in read_blocks(parts) for line in block.data.splitlines()]
    assert [path for path, _ in found] == [f"part {number}.jsonl" for number in range(5) for _ in range(number + 1)]


@pytest.mark.parametrize("variables", [
    {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "1", "SLURM_ARRAY_TASK_MAX": "3"},  # no number of tasks
    {"SLURM_ARRAY_TASK_ID": "3", "SHARDS": "2"}])
def test_preprocessing_refuses_shares_that_are_not_clear(variables: dict[str, Any], tmp_path: Path) -> None:
    for number in range(9):
        (tmp_path / f"{number}.jsonl").touch()
    done = run_program("bash", EXAMPLES / "slurm_preprocess.sh", cwd=tmp_path, DRY_RUN="1", PYTHON="echo",
                       **{"INPUT": "*.jsonl", **variables})
    assert done.returncode == 2 and done.stderr and not done.stdout


def test_the_convergence_study_says_what_is_missing(tmp_path: Path) -> None:
    done = run_program("bash", EXAMPLES / "convergence_study.sh", cwd=tmp_path, DATA_PREFIX="none", PYTHON="echo")
    assert done.returncode == 2 and "run examples/quickstart.sh first" in done.stderr
    (tmp_path / "some.idx").touch()
    done = run_program("bash", EXAMPLES / "convergence_study.sh", cwd=tmp_path, DATA_PREFIX="some", OUTPUT_DIR=".")
    assert done.returncode == 2 and "OUTPUT_DIR=. exists" in done.stderr


def test_evaluation_is_accepted(tmp_path: Path) -> None:
    line, = dry_run("slurm_evaluate.sh", "--num-documents", "7", cwd=tmp_path, SEQ_LENGTH="256K", OUTPUT_DIR="a run")
    arguments = evaluate.build_parser().parse_args(shlex.split(line)[2:])
    assert (arguments.seq_length, arguments.num_documents, str(arguments.load)) == (262144, 7, "a run")
    assert str(arguments.output) == "a run/evaluation.json"
