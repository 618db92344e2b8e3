"""tools/inspect_checkpoint.py on small checkpoints that torch wrote in this process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save

from megatron_sp.checkpoint import files, writing
from megatron_sp.checkpoint.inspection import Contents
from megatron_sp.checkpoint.metadata import CheckpointReader
from megatron_sp.config.serialize import to_dict
from megatron_sp.errors import CheckpointError, ConfigError
from tests.helpers.configs import STYLES, tiny_run
from tools.inspect_checkpoint import main, size_in_words


def save_tensors(directory: Path, iteration: int, tensors: dict[str, torch.Tensor]) -> Path:
    """Save a checkpoint with these tensors and the state of a tiny run."""
    run = tiny_run([*STYLES["llama"].split(), "--seed", str(iteration)])
    building = writing.start_building(directory, iteration)
    with pytest.warns(UserWarning, match="torch.distributed is disabled|no_dist|assuming"):
        save(tensors, storage_writer=FileSystemWriter(building), no_dist=True)
    counters = {"iteration": iteration, "consumed_samples": 4 * iteration, "consumed_tokens": 256 * iteration,
                "scheduler_samples": 4 * iteration}
    writing.write_durably(building / files.STATE, json.dumps({
        "format": 1, "iteration": iteration, "vocab_size": 97, "optimizer": "AdamW", "schedule": {},
        "loss_scaler": {"scale": 1.0}, "train": counters, "config": to_dict(run)}))
    entries = {name: files.manifest_entry(building / name) for name in files.file_names(building)}
    return writing.finish_building(building, iteration, entries)


WEIGHT, MOMENT = "model.layers.10.norm.weight", "optimizer.layers.2.norm.weight.exp_avg"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for iteration in (2, 4, 6):
        save_tensors(tmp_path, iteration, {WEIGHT: torch.tensor([3.0, 4.0]), MOMENT: torch.zeros(2, iteration),
                                           "model.layers.2.norm.weight": torch.ones(5, dtype=torch.bfloat16)})
    return tmp_path


def test_a_tensor_is_read_whole_and_from_this_checkpoint_only(run: Path) -> None:
    reader = CheckpointReader(run / "iter_0000004")
    assert torch.equal(reader.read_tensor(WEIGHT), torch.tensor([3.0, 4.0]))
    assert reader.read_tensor(MOMENT).shape == (2, 4)
    path = run / "iter_0000004" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-900])
    with pytest.raises(CheckpointError, match="cannot read .* from .*__0_0.distcp"):
        for name in (WEIGHT, MOMENT, "model.layers.2.norm.weight"):
            CheckpointReader(run / "iter_0000004").read_tensor(name)


def test_show(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(run), "--norms"]) == 0
    text = capsys.readouterr().out
    for words in ("iteration 6, 24 samples, 1,536 tokens", "saved by   world size 1, tp 1", "2 layers, hidden 64",
                  "7 parameters, 3 tensors", "bfloat16", "2 x 6", "norm 5 ", "largest 4\n", "zero stage 0"):
        assert words in text, text
    assert text.index("layers.2.norm.weight ") < text.index("layers.10.")
    assert main(["show", str(run / "iter_0000002"), "--json", "--tensors"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["iteration"] == 2 and facts["layout"]["tp"] == 1 and len(facts["table"]) == 3
    assert facts["bytes"] == Contents.read(run / "iter_0000002").num_bytes


def test_verify_and_list(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run)]) == 0
    assert capsys.readouterr().out.count("whole") == 3
    path = run / "iter_0000004" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(bytes(data))
    (run / "iter_0000006" / "state.json").unlink()
    (run / "iter_0000008").mkdir()
    assert main(["verify", str(run)]) == 1
    found = capsys.readouterr()
    assert "__0_0.distcp is damaged: its checksum" in found.out and "state.json is missing" in found.out
    assert "3 of 4 checkpoints are damaged" in found.err
    assert main(["verify", str(run), "--sizes", "--ckpt-step", "4"]) == 0
    assert main(["list", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("*         6") and "state.json is missing" in line for line in lines), lines
    assert any("         2 " in line and "8 samples, 1 rank" in line for line in lines), lines


def test_diff(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = save_tensors(run / "other", 4, {WEIGHT: torch.tensor([3.0, 4.5]), "model.more": torch.ones(1),
                                            "model.layers.2.norm.weight": torch.ones(5)})
    assert main(["diff", str(run / "iter_0000002"), str(run / "iter_0000002")]) == 0
    assert "3 of 3 tensors are bitwise equal" in capsys.readouterr().out
    assert main(["diff", str(run / "iter_0000002"), str(other)]) == 1
    text = capsys.readouterr().out
    for words in ("train.seed: 2 -> 4", "counters.iteration: 2 -> 4", f"{WEIGHT}: largest difference 0.5, relative",
                  "norm 0.1", "model.more: only in the second", f"{MOMENT}: only in the first",
                  "bfloat16 [5] in the first, float32 [5] in the second", "0 of 4 tensors are bitwise equal"):
        assert words in text, text


def test_prune(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", str(run), "--keep-last", "1", "--save-retain-interval", "4"]) == 0
    assert f"would delete {run / 'iter_0000002'}" in capsys.readouterr().out
    assert files.complete_iterations(run) == [2, 4, 6]
    damaged = run / "damaged"
    shutil.copytree(run, damaged, ignore=lambda *_: ["damaged"])
    path = damaged / "iter_0000006" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(CheckpointError, match="nothing is deleted.*iter_0000006"):
        main(["prune", str(damaged), "--keep-last", "1", "--delete"])
    assert files.complete_iterations(damaged) == [2, 4, 6]
    assert main(["prune", str(run), "--keep-last", "2", "--delete"]) == 0
    assert files.complete_iterations(run) == [4, 6] and not (run / "run.lock").exists()


@pytest.mark.parametrize("words, error, message", [
    (["show", "nowhere"], CheckpointError, "nowhere is not a directory"),
    (["list", "."], CheckpointError, "holds no checkpoint"),
    (["prune", "."], ConfigError, "needs --keep-last N"),
    (["prune", ".", "--keep-last", "-1"], ConfigError, "--keep-last -1 must be at least 0")])
def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], error: Any, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        main(words)


def test_sizes_in_words() -> None:
    assert [size_in_words(size) for size in (0, 1023, 1536, 3 << 30)] == ["0 B", "1023 B", "1.50 KiB", "3.00 GiB"]
