"""Derived values, vocabulary sizes, and the configuration as JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megatron_sp.config.load import load_run
from megatron_sp.config.resolve import resolve, with_vocab
from megatron_sp.config.schema import Run
from megatron_sp.config.serialize import from_dict, to_dict
from megatron_sp.errors import ConfigError

BASE = "--num-layers 2 --hidden-size 96 --num-attention-heads 6 --seq-length 128 --lr 1e-3 --mock-data --vocab-size 500"


def load(extra: str = "--train-iters 10", world: int = 1) -> Run:
    return load_run(f"{BASE} {extra}".split(), world, files=False)[0]


def test_model_defaults():
    model = load().model
    assert (model.num_query_groups, model.kv_channels, model.ffn_hidden_size) == (6, 16, 384)
    assert (model.max_position_embeddings, model.embedding_init_method_std) == (128, 0.02)


@pytest.mark.parametrize("hidden, width", [(96, 256), (4096, 10880), (1024, 2688), (16, 64)])
def test_swiglu_width(hidden, width):
    run = load(f"--train-iters 10 --swiglu --hidden-size {hidden} --kv-channels 16")
    assert run.model.ffn_hidden_size == width


def test_parallel_defaults():
    run = load("--train-iters 10 --ulysses-size 2 --tensor-model-parallel-size 2 --micro-batch-size 3", world=8)
    parallel = run.parallel
    assert (parallel.dp, parallel.sp, parallel.fsdp, parallel.fsdp_size) == (2, 2, 4, 4)
    assert run.train.global_batch_size == 6


def test_the_horizon_keeps_the_unit_of_the_run():
    iters, samples = load().schedule, load("--train-samples 100").schedule
    assert (iters.lr_decay_iters, iters.lr_decay_samples) == (10, 0)
    assert (samples.lr_decay_iters, samples.lr_decay_samples) == (0, 100)
    assert load("--train-iters 10 --lr-decay-iters 7").schedule.lr_decay_iters == 7


def test_weight_decay_ends():
    optimizer = load("--train-iters 10 --weight-decay 0.1").optimizer
    assert (optimizer.start_weight_decay, optimizer.end_weight_decay) == (0.1, 0.1)


def test_resolving_twice_changes_nothing():
    run = load("--train-samples 64 --swiglu --ulysses-size 2", world=4)
    assert resolve(run, 4) == run


def test_a_run_full_of_holes_still_resolves():
    run = resolve(Run(), 1)
    assert run.parallel.world_size == 1 and run.train.global_batch_size == 1 and run.model.num_layers == 0


@pytest.mark.parametrize("tp, padded", [(1, 512), (2, 512), (6, 768)])
def test_vocabulary_padding(tp, padded):
    run = load(f"--train-iters 10 --tensor-model-parallel-size {tp}", world=tp)
    run = with_vocab(replace(run, model=replace(run.model, vocab_size=0)), 500)
    assert (run.model.vocab_size, run.model.padded_vocab_size) == (500, padded)
    assert with_vocab(run, 500) == run


def test_vocabulary_mistakes():
    run = load()
    assert with_vocab(run, 400).model.vocab_size == 500
    with pytest.raises(ConfigError, match="the tokenizer has 600 tokens"):
        with_vocab(run, 600)
    with pytest.raises(ConfigError, match="is below the vocabulary size 500"):
        with_vocab(replace(run, model=replace(run.model, padded_vocab_size=499)), 500)
    with pytest.raises(ConfigError, match="does not divide"):
        with_vocab(replace(run, model=replace(run.model, padded_vocab_size=501),
                           parallel=replace(run.parallel, tp=2)), 500)
    with pytest.raises(ConfigError, match="is required"):
        with_vocab(replace(run, model=replace(run.model, vocab_size=0)), 0)


def test_json_round_trip():
    run = load("--train-samples 100 --rampup-batch-size 2 2 10 --global-batch-size 8 --adam-eps 1e-9")
    assert from_dict(json.loads(json.dumps(to_dict(run)))) == run
    assert isinstance(from_dict(to_dict(run)).train.rampup_batch_size, tuple)


def test_json_of_another_version():
    stored = to_dict(load())
    del stored["model"]["qk_layernorm"]
    del stored["logging"]
    stored["model"]["gone"] = 1
    stored["gone"] = {"x": 1}
    assert from_dict(stored) == load()
