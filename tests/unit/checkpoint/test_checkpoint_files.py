"""Checkpoint directories, tracker and manifest, without torch; what a run may load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_sp.checkpoint import compare, files, writing
from megatron_sp.checkpoint.saving.retention import Retention
from megatron_sp.checkpoint.state_file import read_part, read_state
from megatron_sp.config.schema import Checkpoint, Precision
from megatron_sp.config.serialize import to_dict
from megatron_sp.errors import CheckpointError
from megatron_sp.train.health.loss_scale import LossScaler
from tests.helpers.configs import STYLES, tiny_run
from tests.helpers.kills import killed_saves, save


def found(directory: Path, iteration: int | None = None) -> Path | None:
    checkpoint = files.find_checkpoint(directory, iteration)
    return checkpoint.path if checkpoint else None


def test_the_tracker_points_to_the_newest(tmp_path: Path) -> None:
    assert files.find_checkpoint(tmp_path) is None
    save(tmp_path, 4, "data")
    save(tmp_path, 8, "data")
    assert found(tmp_path) == tmp_path / "iter_0000008"
    assert found(tmp_path, 4) == tmp_path / "iter_0000004"
    assert files.complete_iterations(tmp_path) == [4, 8]


def test_an_unfinished_save_is_invisible_and_removed_by_the_next(tmp_path: Path) -> None:
    save(tmp_path, 4, "data")
    stale = writing.start_building(tmp_path, 8)
    (stale / "__0_0.distcp").write_text("half")
    assert found(tmp_path) == tmp_path / "iter_0000004"
    save(tmp_path, 12, "data")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "iter_0000004", "iter_0000012", "latest_checkpointed_iteration.txt"]


def test_the_same_iteration_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 4, "old")
    save(tmp_path, 4, "new")
    assert (tmp_path / "iter_0000004" / "__0_0.distcp").read_text() == "new"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("before, iteration, interrupted", [
    ((), 4, False), ((4,), 8, False), ((4, 8), 4, False), ((4,), 4, False), ((4, 8), 4, True), ((4, 8), 12, True)],
    ids=["first", "next", "again_older", "again_newest", "again_after_a_kill", "next_after_a_kill"])
def test_a_kill_at_any_instant_of_a_save_leaves_complete_checkpoints(
        tmp_path: Path, before: tuple[int, ...], iteration: int, interrupted: bool) -> None:
    """Whatever was complete before stays loadable, old or new, and the next run saves as if nothing had happened.

    ``interrupted``: an earlier kill came between the two renames that replace iteration 4.
    """
    (tmp_path / "source").mkdir()
    for number in before:
        save(tmp_path / "source", number, "old")
    if interrupted:
        (tmp_path / "source" / "iter_0000004").rename(tmp_path / "source" / "iter_0000004.replaced")
    copies = killed_saves(tmp_path / "source", tmp_path, iteration, "new")
    assert len(copies) > 10
    for copy in copies:
        assert set(before) <= set(files.complete_iterations(copy)) <= {*before, iteration}, copy
        for number, path in files.complete_checkpoints(copy).items():
            (entry,) = files.read_manifest(path).values()
            assert files.describe_damage(path / "__0_0.distcp", entry) == ""
            assert (path / "__0_0.distcp").read_text() in ({"old", "new"} if number == iteration else {"old"})
        assert before == () or found(copy) is not None
        save(copy, iteration, "later")
        assert found(copy) == copy / files.directory_name(iteration)
        assert (copy / files.directory_name(iteration) / "__0_0.distcp").read_text() == "later"
        left = {path.name for path in copy.iterdir()}
        assert left == {files.directory_name(number) for number in (*before, iteration)} | {files.TRACKER}, copy


@pytest.mark.parametrize("text", ["", "garbage", "-8", "release", "8 16"])
def test_a_tracker_that_is_no_number(tmp_path: Path, text: str) -> None:
    """The newest complete checkpoint is used; without any, nothing is: a run must not start afresh unasked."""
    (tmp_path / files.TRACKER).write_text(text)
    with pytest.raises(CheckpointError, match="tracker.*no complete checkpoint in the directory"):
        files.find_checkpoint(tmp_path)
    save(tmp_path, 2, "data")
    save(tmp_path, 4, "data")
    (tmp_path / files.TRACKER).write_text(text)
    checkpoint = files.find_checkpoint(tmp_path)
    assert checkpoint and checkpoint.iteration == 4
    assert "not an iteration" in checkpoint.notes[0] and "newest complete checkpoint is used: iteration 4" in (
        checkpoint.notes[0])


def test_a_tracker_that_points_nowhere(tmp_path: Path) -> None:
    """An earlier checkpoint replaces the missing one, a later one does not: it may be of a run that was given up."""
    save(tmp_path, 4, "data")
    save(tmp_path, 12, "data")
    (tmp_path / files.TRACKER).write_text("8")
    checkpoint = files.find_checkpoint(tmp_path)
    assert checkpoint and checkpoint.iteration == 4
    assert "iter_0000008 does not exist" in checkpoint.notes[0] and "BEFORE IS USED: iteration 4" in checkpoint.notes[0]
    assert "later iterations: 12" in checkpoint.notes[1]
    (tmp_path / files.TRACKER).write_text("2")
    with pytest.raises(CheckpointError, match="iter_0000002 does not exist, but the tracker.*choose one with --ckpt-"):
        files.find_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="iter_0000005 does not exist, but --ckpt-step 5.*here: 4, 12"):
        files.find_checkpoint(tmp_path, 5)


def test_the_directory_of_one_checkpoint_can_be_named(tmp_path: Path) -> None:
    save(tmp_path, 4, "data")
    path = save(tmp_path, 8, "data")
    assert found(tmp_path / "iter_0000004") == tmp_path / "iter_0000004"
    assert found(path, 8) == path
    with pytest.raises(CheckpointError, match="is the checkpoint of iteration 8, but --ckpt-step 4 asks for another"):
        files.find_checkpoint(path, 4)
    with pytest.raises(CheckpointError, match="iter_0000006 does not exist, but --load .*here: 4, 8"):
        files.find_checkpoint(tmp_path / "iter_0000006")
    inside = tmp_path / "iter_0000004" / "iter_0000001"     # a --save directory may have such a name
    save(inside, 2, "data")
    assert found(inside) == inside / "iter_0000002"


@pytest.mark.parametrize("keep_last, interval, left", [
    (0, 0, [2, 4, 6, 8, 9]), (2, 0, [6, 8, 9]), (1, 4, [4, 8, 9]), (0, 4, [4, 8, 9]), (7, 0, [2, 4, 6, 8, 9])])
def test_which_old_checkpoints_stay(tmp_path: Path, keep_last: int, interval: int, left: list[int]) -> None:
    """Iteration 9 belongs to a run that went back to 6, and is not this run's to delete."""
    for iteration in (2, 4, 6, 9, 8):
        save(tmp_path, iteration, "data")
    rule = Retention.of(Checkpoint(keep_last=keep_last, save_retain_interval=interval))
    notes = rule.apply(tmp_path, 8)
    assert files.complete_iterations(tmp_path) == left
    assert bool(notes) == (left != [2, 4, 6, 8, 9])


@pytest.mark.parametrize("harm", ["size", "refused"])
def test_a_damaged_checkpoint_does_not_count_and_stays(tmp_path: Path, harm: str) -> None:
    """Two whole ones stay beside it, although it is newer than one of them."""
    for iteration in (2, 4, 6, 8):
        save(tmp_path, iteration, "data")
    if harm == "size":
        (tmp_path / "iter_0000006" / "__0_0.distcp").write_text("dat")
    else:
        (tmp_path / "iter_0000006" / files.DAMAGED).write_text("its checksum differs")
    notes = Retention(2, 0).apply(tmp_path, 8)
    assert files.complete_iterations(tmp_path) == [4, 6, 8]
    assert "iter_0000006 is damaged. It does not count" in notes[0]
    assert notes[1] == "deleted the checkpoint of iteration 2"
    save(tmp_path, 8, "again")
    assert Retention(1, 0).apply(tmp_path, 8)[1] == "deleted the checkpoint of iteration 4"
    save(tmp_path, 6, "again")                              # the note of the damage goes with what it was written for
    assert files.unlisted_files(tmp_path / "iter_0000006", files.read_manifest(tmp_path / "iter_0000006")) == []
    assert Retention(1, 0).apply(tmp_path, 8) == ("deleted the checkpoint of iteration 6",)


def test_the_newest_stays_where_names_have_unequal_lengths(tmp_path: Path) -> None:
    for iteration in (10_000_000, 9_999_999, 10_000_001):
        save(tmp_path, iteration, "data")
    Retention(2, 0).apply(tmp_path, 10_000_001)
    assert files.complete_iterations(tmp_path) == [10_000_000, 10_000_001]


def unlink_nothing(path: Path) -> None:
    raise PermissionError(1, "Operation not permitted", str(path))


def test_what_cannot_be_removed_stays_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link to another disk, immutable files, a file that NFS still holds, and another program's directory."""
    save(tmp_path / "elsewhere", 2, "data")
    (tmp_path / "iter_0000002").symlink_to(tmp_path / "elsewhere" / "iter_0000002")
    for iteration in (4, 6):
        save(tmp_path, iteration, "data")
    for name, file in (("iter_0000001.removing", "backup.sh"), ("iter_0000003.building", ".nfs0001"),
                       ("iter_0000008.building", ".nfs0002"), ("iter_0000005.building", "notes.txt")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("")
    told: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", unlink_nothing)
        building = writing.start_building(tmp_path, 8, told.append)
        foreign = [each.split(" holds ")[1].split(",")[0] for each in told if "holds" in each]
        assert foreign == ["backup.sh", "notes.txt"]
        assert sum("iter_0000003.building cannot be removed" in each for each in told) == 1 and len(told) == 3
        (building / "__0_0.distcp").write_text("data")
        entries = {name: files.manifest_entry(building / name) for name in files.file_names(building)}
        assert list(entries) == ["__0_0.distcp"]
        writing.finish_building(building, 8, entries)
        notes = Retention(1, 0).apply(tmp_path, 8)
    assert files.complete_iterations(tmp_path) == [8] and (tmp_path / "elsewhere" / "iter_0000002").is_dir()
    assert notes[0] == "deleted the checkpoint of iteration 2" and not (tmp_path / "iter_0000002.removing").exists()
    assert [f"iter_000000{number}.removing cannot be removed" in note for number, note in zip((4, 6), notes[1:])] == [
        True, True]
    save(tmp_path, 9, "data")                                   # the next save tries again, and may by now
    assert not list(tmp_path.glob("iter_000000[46].removing"))


def test_a_deletion_that_was_killed_is_finished_by_the_next_save(tmp_path: Path) -> None:
    save(tmp_path, 2, "data")
    (tmp_path / "iter_0000002").rename(tmp_path / "iter_0000002.removing")
    save(tmp_path, 4, "data")
    assert sorted(path.name for path in tmp_path.glob("iter*")) == ["iter_0000004"]


def test_a_checkpoint_that_lost_its_manifest_is_replaced(tmp_path: Path) -> None:
    """A run that fell back to the one before saves this iteration again. Only this program's files are replaced."""
    path = save(tmp_path, 4, "data")
    (path / "state.json").write_text("{}")
    (path / "manifest.json").unlink()
    assert files.directories_without_manifest(tmp_path) == []
    (path / "mine.txt").write_text("")
    assert files.directories_without_manifest(tmp_path) == ["iter_0000004"]
    (path / "mine.txt").unlink()
    assert (save(tmp_path, 4, "new") / "__0_0.distcp").read_text() == "new"
    assert len(list(tmp_path.iterdir())) == 2


def test_without_a_tracker_the_newest_complete_checkpoint_is_used(tmp_path: Path) -> None:
    save(tmp_path, 4, "data")
    save(tmp_path, 8, "data")
    (tmp_path / files.TRACKER).unlink()
    checkpoint = files.find_checkpoint(tmp_path)
    assert checkpoint and checkpoint.iteration == 8 and checkpoint.path == tmp_path / "iter_0000008"
    assert "has no tracker" in checkpoint.notes[0] and "iteration 8" in checkpoint.notes[0]


def test_newer_checkpoints_than_the_loaded_one_are_told(tmp_path: Path) -> None:
    save(tmp_path, 4, "data")
    save(tmp_path, 8, "data")
    checkpoint = files.find_checkpoint(tmp_path, 4)
    assert checkpoint and "later iterations: 8" in checkpoint.notes[0]


def test_directories_of_other_programs_are_neither_loaded_nor_replaced(tmp_path: Path) -> None:
    """``iter_N`` directories of Megatron-LM are refused at load without a tracker, or else when N is saved."""
    theirs = tmp_path / "iter_0000002" / "mp_rank_00"
    theirs.mkdir(parents=True)
    (theirs / "model_optim_rng.pt").write_text("weights")
    with pytest.raises(CheckpointError, match="is a checkpoint of Megatron-LM. Convert it first"):
        files.find_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="iter_0000002 exists without manifest.json.*does not replace it"):
        save(tmp_path, 2, "ours")
    unknown = tmp_path / "iter_0000004.building"
    unknown.mkdir()
    (unknown / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="holds notes.txt, which this program did not write"):
        save(tmp_path, 4, "ours")
    assert (theirs / "model_optim_rng.pt").read_text() == "weights" and (unknown / "notes.txt").read_text() == "mine"


def test_a_copy_under_another_name_is_refused(tmp_path: Path) -> None:
    shutil.copytree(save(tmp_path, 2, "data"), tmp_path / "iter_0000003")
    with pytest.raises(CheckpointError, match="iter_0000003 holds the checkpoint of iteration 2"):
        files.read_manifest(tmp_path / "iter_0000003")


def test_files_beside_those_of_the_manifest_are_seen(tmp_path: Path) -> None:
    path = save(tmp_path, 4, "data")
    assert files.unlisted_files(path, files.read_manifest(path)) == []
    (path / "__1_0.distcp").write_text("of another layout")
    assert files.unlisted_files(path, files.read_manifest(path)) == ["__1_0.distcp"]


STATE: dict[str, Any] = {
    "format": 1, "iteration": 4, "vocab_size": 97, "optimizer": None, "schedule": {},
    "config": {"model": {}, "data": {}, "train": {}, "precision": {"bf16": True}},
    "train": {"iteration": 4, "consumed_samples": 16, "consumed_tokens": 64, "scheduler_samples": 16},
    "loss_scaler": {"scale": 1.0, "tolerance": 2, "quiet_steps": 0}}


def save_state(directory: Path, state: Any) -> Path:
    building = writing.start_building(directory, 4)
    writing.write_durably(building / files.STATE, json.dumps(state))
    return writing.finish_building(building, 4, {files.STATE: files.manifest_entry(building / files.STATE)})


@pytest.mark.parametrize("harm", [("config", "confih"), ('"format": 1', '"format": 2'), ("4", "5")])
def test_a_damaged_state_is_called_damaged(tmp_path: Path, harm: tuple[str, str]) -> None:
    path = save_state(tmp_path, STATE)
    assert read_state(path)["format"] == 1
    (path / files.STATE).write_text((path / files.STATE).read_text().replace(*harm))
    with pytest.raises(CheckpointError, match="checksum differs from the manifest"):
        read_state(path)


@pytest.mark.parametrize("changes, message", [
    *(({name: None}, f"lacks the part '{name}'") for name in STATE if name not in ("format", "optimizer")),
    ({"config": {**STATE["config"], "model": 5}}, "'config.model' of type int"),
    ({"config": {"model": {}}}, "lacks the part 'config.data'"),
    ({"train": {"iteration": 4}}, "lacks the part 'train.consumed_samples'"),
    ({"train": {**STATE["train"], "consumed_tokens": "many"}}, "'many' as 'train.consumed_tokens'"),
    ({"train": {**STATE["train"], "iteration": 3}}, "train.iteration 3 in the checkpoint of iteration 4"),
    ({"iteration": 5}, "iteration 5 in the checkpoint of iteration 4"),
])
def test_a_state_that_lacks_a_part_names_it(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    state = {name: value for name, value in {**STATE, **changes}.items() if value is not None or name not in changes}
    with pytest.raises(CheckpointError, match=message):
        read_state(save_state(tmp_path, state))


def test_a_part_that_its_reader_cannot_use_is_named() -> None:
    def parse(values: dict[str, Any]) -> float:
        return float(values["scale"])

    assert read_part(STATE, "loss_scaler", parse) == 1.0
    for values, reason in (({}, "lacks 'scale'"), ({"scale": "big"}, "could not convert")):
        with pytest.raises(CheckpointError, match=f"part 'loss_scaler' of the state.json of iteration 4: {reason}"):
            read_part({**STATE, "loss_scaler": values}, "loss_scaler", parse)


def test_an_old_state_says_whether_its_loss_scale_was_dynamic(tmp_path: Path) -> None:
    """A bf16 run's constant scale of 1 must not become the start of an fp16 run's dynamic scale."""
    constant = {"fp16": True, "loss_scale": 8.0}
    for precision, dynamic in (({"bf16": True}, False), ({"fp16": True}, True), (constant, False)):
        state = {**STATE, "config": {**STATE["config"], "precision": precision}}
        saved = read_state(save_state(tmp_path / str(precision), state))
        assert saved["loss_scaler"]["dynamic"] is dynamic
    scaler = LossScaler(Precision(fp16=True, initial_loss_scale=1024.0))
    saved = read_state(save_state(tmp_path / "bf16", STATE))
    assert "no dynamic loss scale" in scaler.load_state_dict(saved["loss_scaler"]) and scaler.scale == 1024.0


def test_a_manifest_with_foreign_entries_is_damaged(tmp_path: Path) -> None:
    path = save(tmp_path, 4, "data")
    (path / files.MANIFEST).write_text('{"format": 1, "files": {"state.json": 5}}')
    with pytest.raises(CheckpointError, match="is damaged: not a manifest"):
        files.read_manifest(path)


def test_strange_names_in_the_directory_are_ignored(tmp_path: Path) -> None:
    save(tmp_path, 4, "data")
    for name in ("iter_abc", "iter_0000009", "iter_12.old", "notes.txt"):
        (tmp_path / name).mkdir()
    assert files.complete_iterations(tmp_path) == [4]


@pytest.mark.parametrize("harm, message", [
    (lambda path: path.unlink(), "missing"),
    (lambda path: path.write_text("dat"), "3 bytes instead of 4"),
    (lambda path: path.write_text("dbta"), "checksum"),
])
def test_damage_is_found(tmp_path: Path, harm: Callable[[Path], object], message: str) -> None:
    path = save(tmp_path, 4, "data")
    entries = files.read_manifest(path)
    assert not any(files.describe_damage(path / name, entry) for name, entry in entries.items())
    harm(path / "__0_0.distcp")
    assert message in files.describe_damage(path / "__0_0.distcp", entries["__0_0.distcp"])


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
    assert compare.differences_in_words(to_dict(run), run) == []
    other = replace(run, train=replace(run.train, seed=1, global_batch_size=8))
    lines = compare.differences_in_words(to_dict(run), other)
    assert lines == ["--global-batch-size is 8, was 4 in the checkpoint",
                     "--seed is 1, was 1234 in the checkpoint; the order of the data changes with it"]
    other = replace(run, precision=replace(run.precision, fp16=True, hysteresis=3))
    assert compare.differences_in_words(to_dict(run), other) == ["--fp16 is on, was off in the checkpoint",
                                                    "--hysteresis is 3, was 2 in the checkpoint"]
