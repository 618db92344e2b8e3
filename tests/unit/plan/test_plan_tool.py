"""``tools/plan.py``: what it says about mistakes."""

from __future__ import annotations

import pytest

from megatron_sp.errors import ConfigError
from tools.plan import main


def problems_of(line: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        main(line.split())
    return caught.value.problems


def test_a_wrong_device_is_named_with_the_flags_that_were_given() -> None:
    [problem] = problems_of("--device A10 --model-preset llama3-8b")
    assert problem.startswith("--device: 'A10' is not one of") and "--device-memory 24GB" in problem
    both = problems_of("--device A10 --device-memory much --model-preset llama3-8b")
    assert [problem.split(":")[0] for problem in both] == ["--device-memory", "--device"]
