"""The command lines that help texts and documents show are run, with small inputs in a temporary directory.

A line of a program's help counts when it stands under "Example:" or "Examples". A document's block counts when it is
fenced with ``sh runnable``.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tests.integration.programs import ROOT, run_program

#: Need a trained model; tests/distributed/test_tools.py runs these programs.
NEED_A_CHECKPOINT = {"evaluate.py", "generate_text.py", "needle_in_a_haystack.py"}


def commands(text: str) -> list[str]:
    """Return the command lines in a text, continued lines joined."""
    joined = re.sub(r"\\\n\s*", "", text)
    return [line.strip() for line in joined.splitlines() if line.strip().startswith("python ")]


def of_help(program: Path) -> list[str]:
    description = ast.get_docstring(ast.parse(program.read_text())) or ""
    return commands(description[description.index("Example"):]) if "Example" in description else []


EXAMPLES = [line for program in sorted(ROOT.glob("tools/*.py")) for line in of_help(program)
            if program.name not in NEED_A_CHECKPOINT]
EXAMPLES += [line for document in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
             for block in re.findall(r"```sh runnable\n(.*?)```", document.read_text(), re.DOTALL)
             for line in commands(block)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a directory with what the examples read: a corpus, a tokenizer, token sets and runs."""
    folder = tmp_path_factory.mktemp("examples")
    text = " ".join(f"word{number % 97} and, {number}\n" for number in range(6000))
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text[start:]}) + "\n" for start in range(9)))
    model = ROOT / "tests" / "fixtures" / "tok" / "spm_bpe_4k.model"
    shutil.copy(model, folder / "tokenizer.model")
    (folder / "data").mkdir()
    for ending in (".bin", ".idx"):
        shutil.copy(f"{ROOT}/tests/fixtures/bin/gpt2_small_a_eod_text_document{ending}",
                    folder / "data" / f"corpus_text_document{ending}")
        shutil.copy(f"{ROOT}/tests/fixtures/bin/gpt2_small_a_eod_text_document{ending}",
                    folder / "data" / f"corpus_00001-of-00008_text_document{ending}")
    for name in ("a", "b", "one_process", "ulysses"):
        (folder / "runs" / name).mkdir(parents=True)
        rows = [{"iteration": i, "consumed_tokens": 64 * i, "consumed_samples": i, "lm_loss": 5 / i} for i in (1, 2, 3)]
        (folder / "runs" / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_every_program_shows_an_example() -> None:
    shown = {Path(shlex.split(line)[1]).name for line in EXAMPLES}
    ours = {"preprocess_data.py", "train_tokenizer.py", "data_statistics.py", "gather_corpus.py", "plot_run.py",
            "plot_schedule.py", "plot_memory.py", "plot_attention.py"}
    assert ours <= shown


@pytest.mark.parametrize("line", EXAMPLES)
def test_examples_run(line: str, prepared: Path) -> None:
    words = shlex.split(line)
    if words[1].endswith("peak_memory.py"):
        pytest.skip("runs a training; examples/long_sequence_cpu.sh is tested")
    if words[1].endswith("verify_layout.py"):
        pytest.skip("starts many processes; tests/parity runs it")
    if words[1].endswith("train_tokenizer.py"):
        words[words.index("--vocab-size") + 1] = "400"  # the corpus here is small
    if words[1].endswith("plot_memory.py") and "--published" not in words and "--output" not in words:
        words += ["--output", "memory.png"]  # the picture of the documents stays as it is
    done = run_program(sys.executable, ROOT / words[1], *words[2:], cwd=prepared)
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    if "--output" in words:
        assert (prepared / words[words.index("--output") + 1]).stat().st_size > 100
