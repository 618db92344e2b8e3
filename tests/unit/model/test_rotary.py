"""Rotary embedding: exact angles at long positions, true relative positions, options."""

import math
from decimal import Decimal, localcontext
from typing import Any

import pytest
import torch

from megatron_sp.config.families import FAMILIES, hugging_face_config, model_fields
from megatron_sp.config.resolve import resolve
from megatron_sp.config.schema import Data, Model, Run
from megatron_sp.model.rotary import apply_rotary, frequencies, rotation
from megatron_sp.proof.reference import rotary_frequencies

PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899")


def model(**options: object) -> Model:
    return Model(kv_channels=16, **options)  # type: ignore[arg-type]


def exact_angle(position: int, base: int, pair: int, width: int, factor: Decimal = Decimal(1)) -> float:
    """Return position x base^(-2 pair / width) / factor modulo 2 pi, from 80 digits."""
    with localcontext() as context:
        context.prec = 80
        angle = position * (Decimal(base).ln() * (Decimal(-2 * pair) / width)).exp() / factor
        return float(angle % (2 * PI))


@pytest.mark.parametrize("position", [4096, 131_072, 1_000_000, 9_999_999, 10_000_000])
@pytest.mark.parametrize("base", [10_000, 500_000])
def test_angles_are_exact_at_ten_million_positions(position: int, base: int) -> None:
    """Compare with 80 digits. fp32 products of position and frequency, as many programs form them, are far off."""
    width, at = 128, torch.tensor([[position]])
    exact = torch.tensor([exact_angle(position, base, pair, width) for pair in range(width // 2)], dtype=torch.float64)
    for dtype, tolerance in ((torch.bfloat16, 1e-7), (torch.float64, 1e-8)):
        cos, sin = rotation(Model(kv_channels=width, rotary_base=base), at, dtype)
        assert cos.dtype == torch.promote_types(dtype, torch.float32)
        assert (cos.flatten() - exact.cos()).abs().max() < tolerance
        assert (sin.flatten() - exact.sin()).abs().max() < tolerance
    single = at.float() * frequencies(Model(kv_channels=width, rotary_base=base), at.device).float()
    error = (single.double().cos() - exact.cos()).abs().max()
    assert error > (0.1 if position > 9_000_000 else 0 if position < 1_000_000 else 1e-2)


def test_scaled_angles_are_exact_at_ten_million_positions() -> None:
    """The slowest pairs of YaRN turn by position x frequency / factor."""
    yarn = Model(kv_channels=128, rope_scaling_type="yarn", rotary_scaling_factor=1220.0,
                 original_max_position_embeddings=8192)
    cos, _ = rotation(yarn, torch.tensor([[9_999_999]]), torch.float64)
    exact = math.cos(exact_angle(9_999_999, 10_000, 63, 128, Decimal(1220)))
    assert abs(cos[..., 63].item() - exact * (0.1 * math.log(1220) + 1)) < 1e-8


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_distance_only(interleaved: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64, generator=generator)

    def score(at_q: int, at_k: int) -> torch.Tensor:
        turned = [apply_rotary(x, rotation(model(), torch.tensor([[at]]), torch.float64), interleaved)
                  for x, at in ((q, at_q), (k, at_k))]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(7, 3), score(1007, 1003))
    assert not torch.isclose(score(7, 3), score(8, 3))


def test_only_the_given_share_is_turned() -> None:
    x = torch.ones(1, 1, 1, 16)
    turned = apply_rotary(x, rotation(model(rotary_percent=0.25), torch.tensor([[5]]), x.dtype), False)
    assert torch.equal(turned[..., 4:], x[..., 4:]) and not torch.equal(turned[..., :4], x[..., :4])


def test_interpolation_divides_positions() -> None:
    near = rotation(model(), torch.tensor([[10]]), torch.float64)
    far = rotation(model(rotary_seq_len_interpolation_factor=4.0), torch.tensor([[40]]), torch.float64)
    torch.testing.assert_close(near, far)


def test_llama3_scaling_keeps_short_and_stretches_long_waves() -> None:
    plain = frequencies(model(rotary_base=500000.0), torch.device("cpu"))
    scaled = frequencies(model(rotary_base=500000.0, use_rope_scaling=True), torch.device("cpu"))
    assert plain[0] == scaled[0]
    torch.testing.assert_close(scaled[-1], plain[-1] / 8)


# --- scalings: against transformers' functions, and against the reference ------------------------------------------

YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=4096)
LLAMA3 = dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=8192)


def hugging_face_frequencies(rope: dict[str, Any], length: int | None = None) -> tuple[torch.Tensor, float]:
    """Return frequencies and attention factor of a Llama with heads of 64, by transformers' own functions."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(hidden_size=256, num_attention_heads=4, max_position_embeddings=16384, rope_parameters=rope)
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"), seq_len=length)


def of_config(rope: dict[str, Any]) -> Model:
    """Return the model that a config.json with these rope_parameters makes."""
    config = dict(model_type="llama", hidden_size=256, num_attention_heads=4, max_position_embeddings=16384,
                  rope_parameters=rope)
    fields, problems = model_fields(config)
    assert not problems
    return resolve(Run(model=Model(**fields), data=Data(seq_length=64)), 1).model


@pytest.mark.parametrize("rope", [
    dict(rope_type="linear", factor=4.0), LLAMA3, YARN,
    YARN | dict(factor=40.0, mscale=0.707, mscale_all_dim=0.5),
    YARN | dict(mscale=2.0), YARN | dict(attention_factor=1.3), YARN | dict(truncate=False),
    YARN | dict(beta_fast=16.0, beta_slow=2.0), YARN | dict(factor=1.0),
    YARN | dict(original_max_position_embeddings=1),
], ids=lambda rope: ",".join(f"{name}={value}" for name, value in rope.items()))
@pytest.mark.parametrize("base", [10000.0, 1e6])
def test_scalings_agree_with_transformers(rope: dict[str, Any], base: float) -> None:
    """config.json -> frequencies and attention factor as in transformers; the written config.json gives them again."""
    theirs, attention_factor = hugging_face_frequencies(rope | {"rope_theta": base})
    ours = of_config(rope | {"rope_theta": base})
    for made in (ours, of_config(_written(ours))):
        torch.testing.assert_close(frequencies(made, torch.device("cpu")).float(), theirs, rtol=2e-6, atol=0)
        assert made.rotary_attention_factor == pytest.approx(attention_factor, rel=1e-12)
    torch.testing.assert_close(frequencies(ours, torch.device("cpu")), rotary_frequencies(64, ours), rtol=1e-12, atol=0)
    again, factor = hugging_face_frequencies({"rope_type": "default"} | _written(ours))
    torch.testing.assert_close(again, theirs, rtol=0, atol=0)
    assert factor == pytest.approx(attention_factor, rel=1e-12)


def _written(model: Model) -> dict[str, Any]:
    """Return the keys of positions of the config.json that is written for a model."""
    written = hugging_face_config(FAMILIES[0], model, "float32")
    return {"rope_theta": written["rope_theta"]} | (written["rope_scaling"] or {})


def test_yarn_without_a_factor_stretches_to_the_longest_position() -> None:
    made = of_config({"rope_type": "yarn", "original_max_position_embeddings": 4096, "rope_theta": 10000.0})
    assert made.rotary_scaling_factor == 16384 / 4096


@pytest.mark.parametrize("factor, length", [(2.0, 32768), (4.0, 100_000)])
def test_ntk_is_the_dynamic_scaling_of_transformers_at_one_length(factor: float, length: int) -> None:
    """transformers' "dynamic" depends on the length of each text; at one length it is NTK-aware scaling."""
    theirs, _ = hugging_face_frequencies({"rope_type": "dynamic", "factor": factor, "rope_theta": 10000.0}, length)
    ours = Model(kv_channels=64, rope_scaling_type="ntk", rotary_scaling_factor=factor * length / 16384 - (factor - 1))
    torch.testing.assert_close(frequencies(ours, torch.device("cpu")).float(), theirs, rtol=2e-6, atol=0)
    torch.testing.assert_close(frequencies(ours, torch.device("cpu")), rotary_frequencies(64, ours), rtol=1e-12, atol=0)


def test_ntk_keeps_the_fastest_and_divides_the_slowest_frequency() -> None:
    plain = frequencies(model(), torch.device("cpu"))
    scaled = frequencies(model(rope_scaling_type="ntk", rotary_scaling_factor=8.0), torch.device("cpu"))
    assert scaled[0] == plain[0]
    torch.testing.assert_close(scaled[-1], plain[-1] / 8)


def test_the_attention_factor_lengthens_queries_and_keys() -> None:
    yarn = model(rope_scaling_type="yarn", rotary_scaling_factor=4.0, original_max_position_embeddings=64)
    x = torch.randn(1, 1, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    turned = apply_rotary(x, rotation(yarn, torch.tensor([[7]]), x.dtype), False)
    torch.testing.assert_close(turned.norm(), x.norm() * (0.1 * math.log(4) + 1))
