"""The fp16 loss scale after overflows, after steps without overflow, and after a resume."""

from __future__ import annotations

from megatron_sp.config.schema import Precision
from megatron_sp.train.health.loss_scale import LossScaler


def test_no_scale_without_fp16() -> None:
    for precision in (Precision(), Precision(bf16=True, loss_scale=12.0)):
        scaler = LossScaler(precision)
        scaler.update(overflow=True)
        assert (scaler.scale, scaler.dynamic) == (1.0, False)


def test_static() -> None:
    scaler = LossScaler(Precision(fp16=True, loss_scale=128.0))
    scaler.update(overflow=True)
    assert (scaler.scale, scaler.dynamic) == (128.0, False)


def test_starts_high_and_is_halved_after_the_tolerance() -> None:
    scaler = LossScaler(Precision(fp16=True))
    assert scaler.scale == 2.0**24
    scales = []
    for _ in range(4):
        scaler.update(overflow=True)
        scales.append(scaler.scale)
    assert scales == [2.0**24, 2.0**23, 2.0**22, 2.0**21]      # the first overflow is tolerated


def test_floor() -> None:
    scaler = LossScaler(Precision(fp16=True, initial_loss_scale=4.0, min_loss_scale=2.0, hysteresis=1))
    scaler.update(overflow=True)
    assert scaler.scale == 2.0
    scaler.update(overflow=True)
    assert scaler.scale == 2.0


def test_grows_after_a_window_and_gets_its_tolerance_back() -> None:
    scaler = LossScaler(Precision(fp16=True, initial_loss_scale=8.0, loss_scale_window=3, hysteresis=2))
    scaler.update(overflow=True)                     # tolerated
    for _ in range(2):
        scaler.update(overflow=False)
    scaler.update(overflow=True)                     # not tolerated, and the window starts again
    assert scaler.scale == 4.0
    for _ in range(3):
        scaler.update(overflow=False)
    assert scaler.scale == 8.0
    scaler.update(overflow=True)                     # tolerated again
    assert scaler.scale == 8.0


def test_resumes_in_the_middle() -> None:
    precision = Precision(fp16=True, initial_loss_scale=8.0, loss_scale_window=3)
    scaler = LossScaler(precision)
    for overflow in (True, False, False):
        scaler.update(overflow)
    other = LossScaler(precision)
    other.load_state_dict(scaler.state_dict())
    for overflow in (False, True, True, False):
        scaler.update(overflow)
        other.update(overflow)
        assert other.state_dict() == scaler.state_dict()


def test_only_a_dynamic_scale_is_continued() -> None:
    dynamic = Precision(fp16=True, initial_loss_scale=8.0)
    for precision in (Precision(bf16=True), Precision(fp16=True, loss_scale=2.0)):
        other = LossScaler(precision)
        scaler = LossScaler(dynamic)
        assert "--initial-loss-scale 8" in scaler.load_state_dict(other.state_dict())
        assert scaler.scale == 8.0
        assert other.load_state_dict(scaler.state_dict()) == ""
        assert other.scale == LossScaler(precision).scale
