"""What tools say about unknown flags: a guess at a typing mistake, and no wrong guess."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from megatron_sp.errors import ConfigError
from tools import convert_checkpoint, preprocess_data


@pytest.mark.parametrize("line, problems", [
    ("hf-to-megatron-sp --lod x --save y", ["--lod is not known; did you mean --load?"]),
    ("hf-to-megatron-sp --load x --save y --svae=z", ["--svae is not known; did you mean --save?"]),
    ("hf-to-megatron-sp --load x --save y --frobnicate 3", ["--frobnicate is not known; --help lists all flags."]),
    ("hf-to-megatron-sp --save y", ["the following arguments are required: --load"])])
def test_convert_checkpoint(line: str, problems: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        convert_checkpoint.main(line.split())
    assert caught.value.problems == problems


@pytest.mark.parametrize("flag, said", [("--skip-bad-records", "--help lists all flags."),
                                        ("--append-eodd", "did you mean --append-eod?")])
def test_preprocess_data(flag: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        preprocess_data.parse(["--input", "x", "--output-prefix", "y", "--tokenizer-type", "NullTokenizer",
                               "--vocab-size", "10", flag])
    assert caught.value.problems == [f"{flag} is not known; {said}"]


@pytest.mark.parametrize("name", sorted(path.stem for path in Path(__file__).parents[3].glob("tools/*.py")
                                        if path.stem not in ("build_index", "verify_layout", "peak_memory")))
def test_every_tool_guesses_what_was_meant(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The tools left out read flags of a run, or start another program."""
    tool = importlib.import_module(f"tools.{name}")
    with pytest.raises(ConfigError) as caught:
        tool.main(["--frobnicate"])
    assert any("--frobnicate" in problem or "required" in problem or "COMMAND" in problem
               for problem in caught.value.problems)
    assert not capsys.readouterr().err


@pytest.mark.parametrize("line", ["plot_run x --output p.jpg", "plot_schedule --pp 2 --microbatches 2 --output p.jpg",
                                  "plot_memory --output p.jpg", "plan --plot p.jpg", "plot_attention --output p.jpg"])
def test_pictures_are_png_files(line: str) -> None:
    name, *words = line.split()
    with pytest.raises(ConfigError, match=r"p\.jpg must end in \.png"):
        importlib.import_module(f"tools.{name}").main(words)
