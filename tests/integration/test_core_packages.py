"""torch and numpy are enough to import everything, to preprocess and to train with evaluations."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tests.helpers.configs import STYLES, TRAINING
from tests.integration.programs import ROOT, run_program

#: Packages that only some flags need, or that only draw or log.
OPTIONAL = ("transformers", "tokenizers", "sentencepiece", "regex", "tqdm", "matplotlib", "tensorboard", "wandb",
            "flash_attn")
IMPORT_ALL = """
import importlib, pathlib, sys
for folder in ("megatron_sp", "tools"):
    for path in sorted(pathlib.Path(folder).rglob("*.py")):
        importlib.import_module(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
        print(path)
"""


def test_training_and_preprocessing_need_no_optional_package(tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    for name in OPTIONAL:
        (blocked / f"{name}.py").write_text(f"raise ImportError('{name} is blocked in this test')\n")
    environment: dict[str, Any] = {"PYTHONPATH": os.pathsep.join((str(blocked), str(ROOT))),
                                   "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

    text = tmp_path / "numbers.jsonl"
    text.write_text('{"text": "1 2 3 4 5"}\n' * 400)
    program = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "97", "--output-prefix", tmp_path / "data")
    made = run_program(sys.executable, ROOT / "tools" / "preprocess_data.py", "--input", text, *program,
                       "--workers", "1", **environment)
    assert made.returncode == 0, made.stderr
    (prefix,) = {path.with_suffix("") for path in tmp_path.glob("data*.bin")}

    flags = [*(word for word in TRAINING if word != "--mock-data"), *STYLES["llama"].split(), "--train-iters", "2",
             "--eval-iters", "1", "--eval-interval", "1", "--data-path", prefix, "--split", "90,5,5"]
    trained = run_program(sys.executable, ROOT / "pretrain_gpt.py", *flags, cwd=tmp_path, **environment)
    assert trained.returncode == 0, trained.stderr
    assert "validation loss at iteration 2" in trained.stdout

    imported = run_program(sys.executable, "-c", IMPORT_ALL, **environment)
    assert imported.returncode == 0, imported.stderr
