"""``tools/needle_in_a_haystack.py``: what it says before it loads a model."""

from __future__ import annotations

from dataclasses import replace

from megatron_sp.config.schema import Data, Run
from tools.needle_in_a_haystack import beyond_training


def test_texts_longer_than_the_training_are_named() -> None:
    run = Run(data=replace(Data(), seq_length=4096))
    assert beyond_training(run, [1024, 4096]) == ""
    warning = beyond_training(run, [4096, 8192, 16384])
    assert warning.startswith("WARNING: --lengths 8192 16384: ") and "sequences of 4096 tokens" in warning
