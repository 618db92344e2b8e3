"""Checkpoint directories, tracker and manifest, without torch; what a run may load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_sp.checkpoint import compare, files
from megatron_sp.config.serialize import to_dict
from megatron_sp.errors import CheckpointError
from tests.helpers.configs import STYLES, tiny_run


def build(directory: Path, iteration: int, text: str = "data") -> Path:
    building = files.start_building(directory, iteration)
    (building / "__0_0.distcp").write_text(text)
    return files.finish_building(building, iteration, {"__0_0.distcp": files.describe(building / "__0_0.distcp")})


def test_the_tracker_points_to_the_newest(tmp_path: Path) -> None:
    assert files.find_checkpoint(tmp_path) is None
    build(tmp_path, 4)
    build(tmp_path, 8)
    assert files.find_checkpoint(tmp_path) == tmp_path / "iter_0000008"
    assert files.find_checkpoint(tmp_path, 4) == tmp_path / "iter_0000004"
    assert files.complete_iterations(tmp_path) == [4, 8]


def test_an_unfinished_save_is_invisible_and_removed_by_the_next(tmp_path: Path) -> None:
    build(tmp_path, 4)
    stale = files.start_building(tmp_path, 8)
    (stale / "__0_0.distcp").write_text("half")
    assert files.find_checkpoint(tmp_path) == tmp_path / "iter_0000004"
    build(tmp_path, 12)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "iter_0000004", "iter_0000012", "latest_checkpointed_iteration.txt"]


def test_the_same_iteration_again_replaces_it(tmp_path: Path) -> None:
    build(tmp_path, 4, "old")
    build(tmp_path, 4, "new")
    assert (tmp_path / "iter_0000004" / "__0_0.distcp").read_text() == "new"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("text", ["", "garbage", "-8", "release", "8 16"])
def test_a_tracker_that_is_no_number(tmp_path: Path, text: str) -> None:
    build(tmp_path, 4)
    (tmp_path / files.TRACKER).write_text(text)
    with pytest.raises(CheckpointError, match="tracker.*complete checkpoints here: 4"):
        files.find_checkpoint(tmp_path)


def test_a_tracker_that_points_nowhere(tmp_path: Path) -> None:
    build(tmp_path, 4)
    (tmp_path / files.TRACKER).write_text("8")
    with pytest.raises(CheckpointError, match="iter_0000008.*does not exist.*complete checkpoints here: 4"):
        files.find_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="--ckpt-step 5"):
        files.find_checkpoint(tmp_path, 5)


def test_a_lost_tracker_beside_checkpoints_is_no_fresh_start(tmp_path: Path) -> None:
    build(tmp_path, 4)
    (tmp_path / files.TRACKER).unlink()
    with pytest.raises(CheckpointError, match="no tracker.*complete checkpoints here: 4; choose one with --ckpt-step"):
        files.find_checkpoint(tmp_path)


@pytest.mark.parametrize("harm", [("config", "confih"), ('"format": 1', '"format": 2'), ("4", "5")])
def test_a_damaged_state_is_called_damaged(tmp_path: Path, harm: tuple[str, str]) -> None:
    building = files.start_building(tmp_path, 4)
    files.write_durably(building / files.STATE, '{"format": 1, "config": {"model": {"num_layers": 4}}}')
    path = files.finish_building(building, 4, {files.STATE: files.describe(building / files.STATE)})
    assert files.read_state(path)["format"] == 1
    (path / files.STATE).write_text((path / files.STATE).read_text().replace(*harm))
    with pytest.raises(CheckpointError, match="checksum differs from the manifest"):
        files.read_state(path)


def test_a_manifest_with_foreign_entries_is_damaged(tmp_path: Path) -> None:
    path = build(tmp_path, 4)
    (path / files.MANIFEST).write_text('{"format": 1, "files": {"state.json": 5}}')
    with pytest.raises(CheckpointError, match="is damaged: not a manifest"):
        files.read_manifest(path)


def test_strange_names_in_the_directory_are_ignored(tmp_path: Path) -> None:
    build(tmp_path, 4)
    for name in ("iter_abc", "iter_0000009", "iter_12.old", "notes.txt"):
        (tmp_path / name).mkdir()
    assert files.complete_iterations(tmp_path) == [4]


@pytest.mark.parametrize("harm, message", [
    (lambda path: path.unlink(), "missing"),
    (lambda path: path.write_text("dat"), "3 bytes instead of 4"),
    (lambda path: path.write_text("dbta"), "checksum"),
])
def test_damage_is_found(tmp_path: Path, harm: Callable[[Path], object], message: str) -> None:
    path = build(tmp_path, 4)
    entries = files.read_manifest(path)
    assert not any(files.damage(path / name, entry) for name, entry in entries.items())
    harm(path / "__0_0.distcp")
    assert message in files.damage(path / "__0_0.distcp", entries["__0_0.distcp"])


def test_another_model_is_refused_by_flag() -> None:
    run = tiny_run(STYLES["llama"].split())
    saved = to_dict(run)
    compare.check_model(saved, run, "here")
    other = replace(run, model=replace(run.model, num_layers=3, add_bias_linear=True, vocab_size=98))
    with pytest.raises(CheckpointError) as raised:
        compare.check_model(saved, other, "here")
    for words in ("--num-layers is 3 here and 2", "--disable-bias-linear is not given here and given in the checkpoint",
                  "--vocab-size is 98 here and 97"):
        assert words in str(raised.value)


def test_what_may_change_is_told() -> None:
    run = tiny_run(STYLES["llama"].split())
    assert compare.changed(to_dict(run), run) == []
    other = replace(run, train=replace(run.train, seed=1, global_batch_size=8))
    lines = compare.changed(to_dict(run), other)
    assert lines == ["--global-batch-size is 8, was 4 in the checkpoint",
                     "--seed is 1, was 1234 in the checkpoint; the order of the data changes with it"]
    other = replace(run, precision=replace(run.precision, fp16=True, hysteresis=3))
    assert compare.changed(to_dict(run), other) == ["--fp16 is on, was off in the checkpoint",
                                                    "--hysteresis is 3, was 2 in the checkpoint"]
