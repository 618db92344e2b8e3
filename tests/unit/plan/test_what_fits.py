"""docs/how-to/what-fits.md: its figures follow from its flags, and longer sequences do not fit."""

from __future__ import annotations

import pytest

from docs.make.what_fits_page import PAGE, QUESTIONS, Question, planned, read, render
from megatron_sp.plan.memory import predict
from megatron_sp.plan.report import with_length
from megatron_sp.plan.techniques import USABLE

ANSWERS = read(PAGE.read_text(encoding="utf-8"))


def test_every_figure_follows_from_the_flags_beside_it() -> None:
    assert render(ANSWERS) == PAGE.read_text(encoding="utf-8"), "run: python docs/make/what_fits_page.py"
    assert tuple(question for question, _, _ in ANSWERS) == QUESTIONS


@pytest.mark.parametrize("question,tokens,flags", [answer for answer in ANSWERS if not answer[0].tokens],
                         ids=lambda value: value if isinstance(value, str) else "")
def test_the_longest_sequence_is_the_longest_with_its_flags(question: Question, tokens: int, flags: str) -> None:
    run = planned(question, tokens, flags)
    chunk = run.memory.sequence_chunk_size
    longer = with_length(run, -(-tokens * 65 // 64 // (chunk or 1)) * (chunk or 1))
    assert not question.hardware.holds(predict(longer, device="gpu"), USABLE)


def test_the_largest_statements_hold() -> None:
    """A million tokens of the 1.2B model fit 8 small GPUs, and of the 8B model one large GPU in a node of 2 TB."""
    longest = {(question.model, question.devices, question.device, question.host): tokens
               for question, tokens, _ in ANSWERS if not question.tokens}
    assert longest["1.2B", 8, "A100-40", "1TB"] >= 1 << 20
    assert longest["8B", 1, "H100", "2TB"] >= 1 << 20 and longest["8B", 8, "H100", "2TB"] >= 1 << 20
    for device in ("H100", "H200"):
        lengths = [longest["8B", 1, device, host] for host in ("256GB", "512GB", "2TB")]
        assert lengths == sorted(lengths)
