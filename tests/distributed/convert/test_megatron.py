"""Checkpoints laid out as by Megatron-LM and Megatron-DeepSpeed give back the weights they were made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_sp.errors import CheckpointError, ConfigError
from megatron_sp.proof.reference import random_weights
from tests.helpers.configs import STYLES, tiny_run
from tests.helpers.megatron_files import Weights, write_deepspeed, write_megatron_lm
from tests.helpers.spawn import run_ranks
from tests.helpers.training import full_tensors, train
from tools import convert_checkpoint

LLAMA = STYLES["llama"].replace("--num-layers 2", "--num-layers 4")
GPT2 = STYLES["gpt2"].replace("--num-layers 2", "--num-layers 4")
MIXED = "--num-layers 4 --hidden-size 48 --num-attention-heads 6 --num-key-value-heads 2 --kv-channels 16 " \
        "--squared-relu --normalization LayerNorm --apply-layernorm-1p --add-qkv-bias --disable-bias-linear " \
        "--qk-layernorm --position-embedding-type rope --rotary-percent 0.5"
MHA = LLAMA.replace("--num-key-value-heads 2", "--num-key-value-heads 4")
STYLES_HERE = {"llama": LLAMA, "gpt2": GPT2, "mixed": MIXED, "mha": MHA}
PIPELINED: dict[str, Any] = dict(tp=2, pp=2)


def original(style: str) -> tuple[Weights, Any]:
    run = tiny_run(STYLES_HERE[style].split())
    return random_weights(run, dtype=torch.float32), run.model


def convert(command: str, directory: Path, *more: object) -> Path:
    """Convert ``directory / "theirs"`` and return the new checkpoint."""
    convert_checkpoint.main([command, "--load", str(directory / "theirs"), "--save", str(directory / "ours"),
                             "--vocab-size", "97", *map(str, more)])
    return directory / "ours" / "iter_0000100"


def expect(found: Path, weights: Weights) -> None:
    tensors = full_tensors(found)
    assert tensors.keys() == {f"model.{name}" for name in weights}
    assert [name for name, x in weights.items() if not torch.equal(tensors[f"model.{name}"], x)] == []


@pytest.mark.parametrize("style, options", [
    ("llama", {}), ("llama", dict(tp=2)), ("llama", PIPELINED), ("llama", dict(pp=2, chunks=2)),
    ("llama", dict(core=True, **PIPELINED)), ("gpt2", PIPELINED), ("gpt2", dict(core=True, **PIPELINED)),
    ("mixed", dict(core=True, tp=2)), ("gpt2", dict(tp=2, layout="split", version=0)),
    ("gpt2", dict(tp=2, layout="inner", version=1.0)),
], ids=str)
def test_megatron_lm(tmp_path: Path, style: str, options: dict[str, Any]) -> None:
    weights, model = original(style)
    write_megatron_lm(tmp_path / "theirs", weights, model, **options)
    found = convert("megatron-lm-to-megatron-sp", tmp_path)
    expect(found, weights)
    state = json.loads((found / "state.json").read_text())
    assert state["train"]["consumed_samples"] == 40 and state["iteration"] == 100
    stored = state["config"]["model"]
    assert all(stored[name] == getattr(model, name) for name in ("activation", "num_query_groups", "normalization",
                                                                 "rotary_percent", "qk_layernorm", "norm_epsilon"))


@pytest.mark.parametrize("style, options, words", [
    ("llama", dict(tp=2), ()), ("llama", dict(tp=2, pipeline=True), ()), ("gpt2", dict(pipeline=True), ()),
    ("mha", dict(layout="split", ds_sequence_parallel_size=2), ()),
    ("mha", dict(layout="split", ds_sequence_parallel_fpdt=False), ("--qkv-layout", "split")),
], ids=str)
def test_megatron_deepspeed(tmp_path: Path, style: str, options: dict[str, Any], words: tuple[str, ...]) -> None:
    weights, model = original(style)
    write_deepspeed(tmp_path / "theirs", weights, model, **options)
    expect(convert("megatron-deepspeed-to-megatron-sp", tmp_path, *words), weights)


def test_training_goes_on_from_it(tmp_path: Path) -> None:
    """With --finetune at iteration 0, with --no-load-optim at Megatron's iteration, in another layout."""
    weights, model = original("llama")
    write_megatron_lm(tmp_path / "theirs", weights, model, **PIPELINED)
    convert("megatron-lm-to-megatron-sp", tmp_path)
    flags = f"{LLAMA} --load {tmp_path / 'ours'}"
    assert run_ranks(train, 2, f"{flags} --ulysses-size 2 --finetune --train-iters 1") == ["", ""]
    save = tmp_path / "goes_on"
    assert run_ranks(train, 1, f"{flags} --no-load-optim --train-iters 101 --save {save} --save-interval 1") == [""]
    assert (save / "iter_0000101").is_dir()


@pytest.mark.parametrize("options, spoil, words, message", [
    (PIPELINED, "iter_0000100/mp_rank_01_001/model_optim_rng.pt", (), "tensor rank 1 of pipeline rank 1"),
    (dict(tensor_model_parallel_size=2), "", (), "flags say tensor_model_parallel_size 2"),
    (dict(num_experts=8), "", (), "num_experts 8 is not supported"),
    (dict(position_embedding_type="alibi"), "", (), "position_embedding_type"),
    (dict(num_layers=5), "", (), "there are 4 layers in the files and 5 in the flags"),
    (dict(hidden_size=None), "", (), "hidden_size is missing"),
    ({}, "latest_checkpointed_iteration.txt", (), "holds no checkpoint of Megatron"),
    ({}, "", ("--ckpt-step", 7), "named by --ckpt-step 7, does not exist"),
    ({}, "", ("--vocab-size", 999), "more than the 104 rows"),
], ids=str)
def test_what_does_not_fit_is_one_message(tmp_path: Path, options: dict[str, Any], spoil: str,
                                          words: tuple[object, ...], message: str) -> None:
    weights, model = original("llama")
    write_megatron_lm(tmp_path / "theirs", weights, model, **options)
    if spoil:
        (tmp_path / "theirs" / spoil).unlink()
    with pytest.raises(CheckpointError) as error:
        convert("megatron-lm-to-megatron-sp", tmp_path, *words)
    assert message in str(error.value) and not list((tmp_path / "ours").glob("iter*"))


def test_the_order_of_query_key_value_must_be_known(tmp_path: Path) -> None:
    weights, model = original("mha")
    write_deepspeed(tmp_path / "theirs", weights, model, ds_sequence_parallel_fpdt=False)
    with pytest.raises(CheckpointError, match="--qkv-layout split"):
        convert("megatron-deepspeed-to-megatron-sp", tmp_path)


def test_flags_of_no_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--no-such-flag"):
        convert("megatron-lm-to-megatron-sp", tmp_path, "--no-such-flag", 3)
