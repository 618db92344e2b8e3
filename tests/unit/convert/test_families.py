"""config.json and its counterpart here: what is read, what is refused, what is written again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_sp.config.cli.flags import parse
from megatron_sp.config.families import (
    FAMILIES,
    choose_family,
    hugging_face_config,
    misfits,
    model_fields,
)
from megatron_sp.config.load import load_run
from megatron_sp.config.schema import Model
from megatron_sp.convert.hugging_face import weight_names
from megatron_sp.convert.parameters import parameter_shapes
from megatron_sp.errors import ConfigError
from megatron_sp.layout.masks.windows import layer_windows
from megatron_sp.proof.reference import weight_shapes
from tests.helpers.configs import STYLES, TRAINING, tiny_run

LLAMA = dict(model_type="llama", vocab_size=97, hidden_size=48, num_hidden_layers=2, num_attention_heads=6,
             num_key_value_heads=2, intermediate_size=56, max_position_embeddings=64, rms_norm_eps=1e-5)
GPT2 = dict(model_type="gpt2", vocab_size=97, n_embd=48, n_layer=2, n_head=6, n_positions=64)
RUN = ("--load-hf DIR --seq-length 32 --train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer").split()


@pytest.mark.parametrize("style", [style for style in STYLES if style != "none"])
def test_parameters_are_those_of_the_reference(style: str) -> None:
    run = tiny_run(STYLES[style].split())
    assert parameter_shapes(run.model) == weight_shapes(run)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_every_family_names_every_parameter_it_can_have(family: Any) -> None:
    """A config.json that is read, written and read again says the same, and each parameter has a tensor of its own."""
    config = (GPT2 if family.model_type == "gpt2" else LLAMA) | {"model_type": family.model_type}
    fields, problems = model_fields(config)
    assert not problems
    groups = fields.get("num_query_groups", 6)
    model = Model(**fields | {"num_query_groups": groups, "kv_channels": 8, "ffn_hidden_size": 56})
    assert choose_family(model, family.model_type) is family
    again = hugging_face_config(family, model, "float32")
    assert {name: getattr(model, name) for name in model_fields(again)[0]} == model_fields(again)[0]
    names = [(name, rule.part) for _, rule, name in weight_names(family, model)]
    assert len(set(names)) == len(names) == len(parameter_shapes(model))


@pytest.mark.parametrize("change, problem", [
    (dict(model_type="mamba"), "'mamba' are not supported; llama, mistral"),
    (dict(hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
    (dict(attention_bias=True), "attention_bias True with mlp_bias False"),
    (dict(quantization_config={"bits": 4}), "quantized"),
    (dict(rope_scaling={"type": "longrope", "factor": 4.0}), "'longrope' is not supported"),
    (dict(rope_parameters={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 4.0,
                           "original_max_position_embeddings": 8192}), "low_freq_factor 2.0"),
    (dict(rope_parameters={"full_attention": {"rope_type": "default"}}), "from layer to layer"),
    (dict(partial_rotary_factor=0.5), "partial_rotary_factor 0.5"),
    (dict(num_hidden_layers="two"), "num_hidden_layers 'two' is not a value"),
    (dict(tie_word_embeddings=1), "tie_word_embeddings 1 is not a value"),
    (dict(pretraining_tp=2), "pretraining_tp 2"),
])
def test_what_the_model_cannot_compute_is_refused_by_name(change: dict[str, Any], problem: str) -> None:
    assert problem in "; ".join(model_fields(LLAMA | change)[1])


def test_old_and_new_keys_of_rotary_positions_mean_the_same() -> None:
    rule = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    old = model_fields(LLAMA | dict(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **rule}))
    new = model_fields(LLAMA | dict(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **rule}))
    assert old == new and old[0]["rotary_base"] == 5e5 and old[0]["use_rope_scaling"]


@pytest.mark.parametrize("changes, reason", [
    (dict(activation="squared_relu"), "it has no activation squared_relu"),
    (dict(rotary_percent=0.5), "its rotary_percent is 1.0, the model's is 0.5"),
    (dict(qk_layernorm=True, add_qkv_bias=True), "its add_qkv_bias is False, the model's is True"),
])
def test_a_model_that_no_family_can_express_is_refused(changes: dict[str, Any], reason: str) -> None:
    model = Model(**model_fields(LLAMA)[0] | changes)
    with pytest.raises(ValueError, match="can express this model") as error:
        choose_family(model)
    assert reason in str(error.value)


# --- --load-hf -----------------------------------------------------------------------------------------------------

def flags_for(directory: Path, config: dict[str, Any], *more: str) -> list[str]:
    (directory / "config.json").write_text(json.dumps(config))
    return [str(directory) if word == "DIR" else word for word in [*RUN, *more]]


def test_the_flags_of_the_model_follow_from_config_json(tmp_path: Path) -> None:
    run, _ = load_run(flags_for(tmp_path, LLAMA), 1, files=False)
    model = run.model
    assert (model.num_layers, model.hidden_size, model.num_query_groups, model.ffn_hidden_size) == (2, 48, 2, 56)
    assert model.activation == "swiglu" and model.untie_embeddings_and_output_weights and not model.add_bias_linear
    assert model.attention_dropout == model.hidden_dropout == 0 and model.vocab_size == 97


@pytest.mark.parametrize("words, message", [
    ("--num-layers 3", "--num-layers 3 contradicts --load-hf DIR, whose config.json makes --num-layers 2"),
    ("--squared-relu", "--squared-relu contradicts --load-hf DIR, whose config.json makes the activation swiglu"),
    ("--add-qkv-bias", "--add-qkv-bias contradicts --load-hf DIR, whose config.json makes --add-qkv-bias off"),
    ("--rotary-percent 0.5", "--rotary-percent 0.5 contradicts"),
    ("--vocab-size 99", "--vocab-size 99 contradicts"),
    ("--model-preset llama3-8b", "both describe the model"),
    ("--seq-length 128", "--max-position-embeddings 64 is below --seq-length 128"),
    ("--pretrained-checkpoint elsewhere", "both say where the weights come from"),
])
def test_contradictions_name_both_sides(tmp_path: Path, words: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_run(flags_for(tmp_path, LLAMA, *words.split()), 1, files=False)
    (problem,) = error.value.problems
    assert message.replace("DIR", str(tmp_path)) in problem


def test_context_and_dropout_may_change(tmp_path: Path) -> None:
    words = "--seq-length 128 --max-position-embeddings 128 --rotary-base 1000000 --hidden-dropout 0.1".split()
    run, notes = load_run(flags_for(tmp_path, LLAMA, *words), 1, files=False)
    assert run.model.rotary_base == 1e6 and run.model.hidden_dropout == 0.1
    assert any("--rotary-base 1e+06 is used" in note for note in notes)


def test_a_sliding_window_is_that_of_the_model(tmp_path: Path) -> None:
    config = LLAMA | dict(model_type="mistral", sliding_window=40)
    run, _ = load_run(flags_for(tmp_path, config, "--seq-length", "64"), 1, files=False)
    assert layer_windows(run.model) == (40, 40) and run.model.max_position_embeddings == 64
    assert hugging_face_config(FAMILIES[1], run.model, "float32")["sliding_window"] == 40
    assert misfits(FAMILIES[0], run.model) == ["it has no sliding window"]
    assert layer_windows(load_run(flags_for(tmp_path, config, "--window-size", "8"), 1, files=False)[0].model) == (8, 8)


def test_qwens_windows_begin_at_a_layer_or_are_listed(tmp_path: Path) -> None:
    config = LLAMA | dict(model_type="qwen2", use_sliding_window=True, sliding_window=40, max_window_layers=1)
    listed = config | dict(layer_types=["sliding_attention", "full_attention"])
    for some, windows in ((config, (0, 40)), (listed, (40, 0)), (config | dict(max_window_layers=2), (0, 0)),
                          (config | dict(use_sliding_window=False), (0, 0))):
        model = load_run(flags_for(tmp_path, some, "--seq-length", "64"), 1, files=False)[0].model
        assert layer_windows(model) == windows
        written = hugging_face_config(FAMILIES[2], model, "float32")
        assert written["use_sliding_window"] == any(windows)
        assert not any(windows) or [kind == "sliding_attention" for kind in written["layer_types"]] == [
            window > 0 for window in windows]


def test_the_tokenizer_of_the_directory_is_taken_unless_flags_name_one(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    words = flags_for(tmp_path, LLAMA)
    assert parse(words).run.data.tokenizer_type == "NullTokenizer"
    data = parse(words[:-2]).run.data
    assert (data.tokenizer_type, data.tokenizer_model) == ("HuggingFaceTokenizer", str(tmp_path))


@pytest.mark.parametrize("content, message", [
    (None, "cannot be read"), ("{", "is not JSON"), ("[]", "no model_type"), ('{"model": {}}', "no model_type")])
def test_a_directory_that_is_no_model_is_one_message(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    problems = parse([*TRAINING, "--load-hf", str(tmp_path)]).problems
    assert len(problems) == 1 and message in problems[0] and str(tmp_path) in problems[0]
