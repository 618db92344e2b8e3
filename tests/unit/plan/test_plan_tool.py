"""``tools/plan.py``: what it says about mistakes."""

from __future__ import annotations

import pytest

from megatron_sp.errors import ConfigError
from tools.plan import main


def problems_of(line: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        main(line.split())
    return caught.value.problems


def test_techniques_that_are_given_are_named_as_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--devices 1 --model-preset gpt3-1.3b --seq-length 2048 --bf16 --mlp-tile-size 512 --top 1 --json"
    assert main(line.split()) == 0
    shown = capsys.readouterr()
    assert shown.err.startswith("--mlp-tile-size 512: left out") and "--mlp-tile-size" not in shown.out
    assert '"host_memory": 0' in shown.out


def test_a_wrong_device_is_named_with_the_flags_that_were_given() -> None:
    [problem] = problems_of("--device A10 --model-preset llama3-8b")
    assert problem.startswith("--device: 'A10' is not one of") and "--device-memory 24GB" in problem
    both = problems_of("--device A10 --device-memory much --model-preset llama3-8b")
    assert [problem.split(":")[0] for problem in both] == ["--device-memory", "--device"]
