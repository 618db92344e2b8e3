"""``tools/plan.py``: what it says about mistakes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

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


@pytest.mark.parametrize("devices", [1, 2, 16])
def test_the_launch_file_starts(devices: int, tmp_path: Path) -> None:
    """It needs no more flags, the interpreter of this test, and, for two nodes, no variable that says how many."""
    file = tmp_path / "launch.sh"
    model = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 4096 --global-batch-size 4"
    assert main(f"--devices {devices} --device L40S {model} --output {file}".split()) == 0
    variables = {name: value for name, value in os.environ.items() if name not in ("NODES", "NPROC", "DEVICE")}
    variables["PATH"] = "/usr/bin:/bin"     # without the environment's python and torchrun
    command = ["bash", str(file), "--dry-run"]
    if devices > 8:
        variables |= {"SETTINGS": str(file), "DRY_RUN": "1"}
        command = ["bash", str(Path(__file__).resolve().parents[3] / "examples" / "slurm_pretrain.sh")]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"layout: {devices} rank" in done.stdout
    assert devices < 16 or "L40S" in done.stdout
