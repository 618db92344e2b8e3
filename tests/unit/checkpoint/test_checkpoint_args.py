"""Flags that --use-checkpoint-args takes from a checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_sp.checkpoint import files, writing
from megatron_sp.checkpoint.checkpoint_args import with_checkpoint_args
from megatron_sp.checkpoint.tokenizer_files import copy_tokenizer
from megatron_sp.config.load import load_run
from megatron_sp.config.schema import Run
from megatron_sp.config.serialize import to_dict
from megatron_sp.errors import CheckpointError
from tests.helpers.configs import STYLES, TRAINING, tiny_run

#: A command line that says nothing about the model.
BARE = "--micro-batch-size 1 --global-batch-size 4 --train-iters 8 --lr 1e-3 --mock-data --eval-iters 0"


def save_run(directory: Path, run: Run, iteration: int = 4) -> Path:
    """Save a checkpoint that holds this configuration, the tokenizer's files and no tensors."""
    building = writing.start_building(directory, iteration)
    counters = {"iteration": iteration, "consumed_samples": 16, "consumed_tokens": 64, "scheduler_samples": 16}
    writing.write_durably(building / files.STATE, json.dumps({
        "format": 1, "iteration": iteration, "vocab_size": run.model.vocab_size, "optimizer": None, "schedule": {},
        "loss_scaler": {"scale": 1.0}, "train": counters, "config": to_dict(run)}))
    copy_tokenizer(run.data, building)
    entries = {name: files.manifest_entry(building / name) for name in files.file_names(building)}
    return writing.finish_building(building, iteration, entries)


@pytest.mark.parametrize("style", [style for style in STYLES if style != "none"])
def test_the_model_of_the_checkpoint_comes_back(tmp_path: Path, style: str) -> None:
    run = tiny_run(STYLES[style].split())
    save_run(tmp_path, run)
    words, notes = with_checkpoint_args([*BARE.split(), "--load", str(tmp_path), "--use-checkpoint-args"])
    found, _ = load_run(words, 1, files=False)
    assert replace(found.model, padded_vocab_size=0) == replace(run.model, padded_vocab_size=0)
    assert found.data.seq_length == 64 and found.data.tokenizer_type == "NullTokenizer"
    assert str(tmp_path / "iter_0000004") in notes[0]


def test_the_command_line_counts(tmp_path: Path) -> None:
    save_run(tmp_path, tiny_run(STYLES["llama"].split()))
    flags = f"{BARE} --load {tmp_path}/iter_0000004 --use_checkpoint_args --seq-length 128 --hidden-dropout 0.25"
    words, _ = with_checkpoint_args(flags.split())
    found, _ = load_run(words, 1, files=False)
    assert (found.data.seq_length, found.model.hidden_dropout, found.model.num_layers) == (128, 0.25, 2)
    assert found.model.max_position_embeddings == 128


@pytest.mark.parametrize("more, length, schedule", [
    ("", 64, ("0:16", "1K:64")), ("--seq-length 128", 128, ()),
    ("--seq-length-schedule 0:32 1K:96", 96, ("0:32", "1K:96"))])
def test_a_schedule_of_lengths_comes_whole_or_not_at_all(tmp_path: Path, more: str, length: int,
                                                         schedule: tuple[str, ...]) -> None:
    save_run(tmp_path, tiny_run([*STYLES["llama"].split(), "--seq-length-schedule", "0:16", "1K:64"]))
    words, _ = with_checkpoint_args(f"{BARE} --load {tmp_path} --use-checkpoint-args {more}".split())
    data = load_run(words, 1, files=False)[0].data
    assert (data.seq_length, data.seq_length_schedule) == (length, schedule)


def test_nothing_to_take(tmp_path: Path) -> None:
    words = [*TRAINING, "--load", str(tmp_path)]
    assert with_checkpoint_args(words) == (words, [])
    same, notes = with_checkpoint_args([*words, "--use-checkpoint-args"])
    assert same == [*words, "--use-checkpoint-args"] and "holds no checkpoint" in notes[0]
    path = save_run(tmp_path, tiny_run(STYLES["llama"].split()))
    (path / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="2 bytes instead of .* no other checkpoint"):
        with_checkpoint_args([*words, "--use-checkpoint-args"])


def test_a_tokenizer_that_is_gone_comes_from_the_checkpoint(tmp_path: Path) -> None:
    model, directory = tmp_path / "spm.model", tmp_path / "hf"
    model.write_bytes(b"pieces")
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors", "tokenization_x.py"):
        (directory / name).write_text(name)
    run = tiny_run(STYLES["llama"].split())
    for kind, place, copied in (("SentencePieceTokenizer", model, "iter_0000004/tokenizer/spm.model"),
                                ("HuggingFaceTokenizer", directory, "iter_0000004/tokenizer")):
        save = tmp_path / kind
        data = replace(run.data, tokenizer_type=kind, tokenizer_model=str(place))
        path = save_run(save, replace(run, data=data))
        flags = [*BARE.split(), "--load", str(save), "--use-checkpoint-args"]
        words, _ = with_checkpoint_args(flags)
        assert words[words.index("--tokenizer-model") + 1] == str(place)
        place.rename(tmp_path / "elsewhere")
        words, notes = with_checkpoint_args(flags)
        assert words[words.index("--tokenizer-model") + 1] == str(save / copied)
        assert "is not there; the copy in the checkpoint is used" in notes[0]
        (tmp_path / "elsewhere").rename(place)
    assert sorted(file.name for file in (path / "tokenizer").iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
