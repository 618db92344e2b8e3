"""What tools say about unknown flags: a guess at a typing mistake, and no wrong guess."""

from __future__ import annotations

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
