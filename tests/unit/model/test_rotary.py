"""Rotary embedding: exact angles at long positions, true relative positions, options."""

import math

import pytest
import torch

from megatron_sp.config.schema import Model
from megatron_sp.model.rotary import apply_rotary, frequencies, rotation


def model(**options: object) -> Model:
    return Model(kv_channels=16, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("position", [4096, 131072, 1_000_000, 10_000_000])
def test_angles_are_exact_at_long_positions(position: int) -> None:
    cos, sin = rotation(model(), torch.tensor([[position]]), torch.bfloat16)
    assert cos.dtype == torch.float32
    for pair in range(8):
        angle = math.fmod(position * 10000.0 ** (-2 * pair / 16), 2 * math.pi)
        assert abs(cos[0, 0, 0, pair].item() - math.cos(angle)) < 1e-6
        assert abs(sin[0, 0, 0, pair].item() - math.sin(angle)) < 1e-6


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
