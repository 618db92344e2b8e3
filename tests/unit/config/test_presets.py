"""Presets fill in flags, show them, and never overrule one."""

from __future__ import annotations

import pytest

from megatron_sp.config.cli.flags import parse
from megatron_sp.config.cli.presets import PRESETS
from megatron_sp.config.load import load_run
from megatron_sp.config.schema import Model, Run
from megatron_sp.errors import ConfigError

TRAINING = "--seq-length 1024 --lr 1e-4 --train-iters 10 --mock-data --vocab-size 50257".split()

#: Parameters of the published models, in millions, vocabulary included.
SIZES = {"gpt2-124m": (50257, 124.4), "gpt2-1.5b": (50257, 1557.6), "llama3-8b": (128256, 8030.3),
         "llama3-70b": (128256, 70553.7), "qwen3-8b": (151936, 8190.7)}


def resolved(name: str, *more: str) -> Run:
    return load_run([*TRAINING, "--model-preset", name, *more], 1)[0]


def parameters(model: Model, vocabulary: int) -> int:
    """Counted by hand from the shape."""
    h, d, n, g, f = (model.hidden_size, model.kv_channels, model.num_attention_heads, model.num_query_groups,
                     model.ffn_hidden_size)
    bias = model.add_bias_linear
    layer = h * d * (2 * n + 2 * g) + (3 if model.is_gated else 2) * h * f + 2 * h * (1 if not bias else 2)
    layer += (d * (n + 2 * g) + h + f + h) * bias + 2 * d * model.qk_layernorm
    tables = vocabulary * h * (2 if model.untie_embeddings_and_output_weights else 1)
    positions = model.max_position_embeddings * h * (model.position_embedding_type == "learned_absolute")
    return model.num_layers * layer + tables + positions + h * (1 if not bias else 2)


@pytest.mark.parametrize("name", SIZES)
def test_presets_have_the_published_size(name: str) -> None:
    vocabulary, millions = SIZES[name]
    assert round(parameters(resolved(name).model, vocabulary) / 1e6, 1) == millions


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_valid_model(name: str) -> None:
    assert resolved(name).model.num_layers == PRESETS[name]["num_layers"]


def test_a_given_flag_counts_and_the_rest_is_shown() -> None:
    run, notes = load_run([*TRAINING, "--model-preset", "llama3-8b", "--num-layers", "2"], 1)
    assert run.model.num_layers == 2 and run.model.num_query_groups == 8
    (note,) = [note for note in notes if "stands for" in note]
    assert "--hidden-size 4096" in note and "--num-layers" not in note


@pytest.mark.parametrize("name", PRESETS)
def test_the_flags_shown_give_the_same_model(name: str) -> None:
    run, notes = load_run([*TRAINING, "--model-preset", name], 1)
    (note,) = [note for note in notes if "stands for" in note]
    assert load_run([*TRAINING, *note.partition("stands for: ")[2].split()], 1)[0].model == run.model


def test_a_mistake_names_the_flag_and_the_preset_that_filled_it_in() -> None:
    with pytest.raises(ConfigError) as error:
        load_run([*TRAINING, "--model-preset", "llama3-8b", "--num-attention-heads", "2"], 1)
    assert "--num-query-groups 8 does not divide --num-attention-heads 2" in str(error.value)
    assert "--model-preset llama3-8b fills in" in str(error.value)


def test_an_unknown_preset_lists_the_known_ones() -> None:
    (problem,) = parse(["--model-preset", "llama9"]).problems
    assert "llama9 is unknown" in problem and "llama3-8b" in problem
