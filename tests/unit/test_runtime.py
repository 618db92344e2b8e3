"""What the launcher says, and how programs end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_sp.errors import ConfigError
from megatron_sp.runtime import Environment, launch_environment


def test_no_launcher_is_one_process() -> None:
    assert launch_environment({}) == Environment(0, 1, 0, launched=False)


def test_torchrun() -> None:
    variables = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    assert launch_environment(variables) == Environment(3, 4, 1, launched=True)


@pytest.mark.parametrize("variables", [{"RANK": "0"}, {"WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"},
                                       {"RANK": "x", "WORLD_SIZE": "2"}])
def test_contradictions_are_named(variables: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="RANK"):
        launch_environment(variables)


@pytest.mark.parametrize("error, code, said", [
    ("DataError('file x is missing')", 2, "DataError: file x is missing"), ("KeyboardInterrupt", 130, "interrupted")])
def test_mistakes_and_interrupts_leave_no_traceback(error: str, code: int, said: str) -> None:
    program = ("from megatron_sp.runtime import run_program\nfrom megatron_sp.errors import DataError\n"
               f"def main(argv):\n    raise {error}\nrun_program(main)")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == code and done.stderr.strip() == said


def test_importing_the_runtime_does_not_import_torch() -> None:
    code = "import sys, megatron_sp.runtime; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_same_mistake_of_two_ranks_is_printed_once_and_another_ones_too() -> None:
    code = ("import os, sys\nos.environ['RANK'] = sys.argv.pop(1)\nfrom megatron_sp.runtime import run_program\n"
            "from megatron_sp.errors import DataError\n"
            "def main(argv):\n    raise DataError(argv[0])\nrun_program(main)")
    one, other = f"file {id(code)}", f"another file {id(code)}"
    said = [subprocess.run([sys.executable, "-c", code, rank, message], capture_output=True, text=True).stderr.strip()
            for rank, message in (("1", one), ("0", one), ("2", other))]
    assert said == [f"DataError: {one}", "", f"DataError: {other}"]


@pytest.mark.parametrize("variables", [
    [{"RANK": "0", "WORLD_SIZE": "1"}] * 2,
    [{"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": str(count)} for count in range(2)]])
def test_the_same_mistake_in_the_next_attempt_is_said_again(variables: list[dict[str, str]]) -> None:
    code = ("from megatron_sp.runtime import run_program\nfrom megatron_sp.errors import DataError\n"
            f"def main(argv):\n    raise DataError('file {id(variables)} is missing')\nrun_program(main)")
    for attempt in variables:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | attempt)
        assert done.returncode == 2 and done.stderr.strip() == f"DataError: file {id(variables)} is missing"


def test_a_rank_that_lost_its_peer_does_not_bury_the_peers_message(tmp_path: Path) -> None:
    code = ("import os\nfrom megatron_sp.runtime import launch_environment, run_program\n"
            "from megatron_sp.errors import DataError\n"
            "def main(argv):\n    import torch\n    import torch.distributed as dist\n"
            "    rank = launch_environment().rank\n"
            "    dist.init_process_group('gloo', init_method=argv[0], rank=rank, world_size=2)\n"
            "    dist.all_reduce(torch.ones(3))\n"
            "    if rank == 1:\n        raise DataError(f'{argv[1]} {os.getppid()}: file x is damaged')\n"
            "    if argv[1] == 'bug':\n        raise RuntimeError('a bug')\n"
            "    try:\n        dist.all_reduce(torch.ones(3))\n"
            "    except RuntimeError as error:\n"
            "        raise (RuntimeError('stage 0 failed') if argv[1] == 'pipeline' else error) from error\n"
            "run_program(main)")

    def run_both(kind: str) -> list[tuple[int, str]]:
        both = [subprocess.Popen([sys.executable, "-c", code, f"file://{tmp_path / kind}", kind], text=True,
                                 stderr=subprocess.PIPE, env=os.environ | {"RANK": rank, "WORLD_SIZE": "2"})
                for rank in "01"]
        said = [process.communicate(timeout=60)[1].strip() for process in both]
        return [(process.returncode, text) for process, text in zip(both, said, strict=True)]

    for kind in ("peer", "pipeline"):
        left, failed = run_both(kind)
        assert failed == (2, f"DataError: {kind} {os.getpid()}: file x is damaged")
        assert left[0] == 1 and "\n" not in left[1]
        assert left[1].startswith("rank 0 stopped because another rank ended (")
    left, _ = run_both("bug")
    assert left[0] == 1 and "Traceback" in left[1] and "a bug" in left[1]


def test_a_closed_pipe_is_a_failure_only_where_other_ranks_wait() -> None:
    code = "from megatron_sp.runtime import run_program\ndef main(argv):\n    raise BrokenPipeError\nrun_program(main)"
    ends = [subprocess.run([sys.executable, "-c", code], env=os.environ | {"RANK": "0", "WORLD_SIZE": size}).returncode
            for size in ("1", "2")]
    assert ends == [0, 141]
