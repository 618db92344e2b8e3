"""What the launcher says, and how programs end."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from megatron_sp.errors import ConfigError
from megatron_sp.launchers import Environment
from megatron_sp.runtime import _lost_peer, announced_world_size, choose_gpu, meet, planning_environment


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


FAILS = ("import sys, time\nfrom megatron_sp.runtime import run_program\nfrom megatron_sp.errors import DataError\n"
         "def main(argv):\n    time.sleep(float(argv[1]))\n    raise DataError(argv[0])\nrun_program(main)")
MEET = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29711"}


def fail_together(*mistakes: str, delay: float = 0.0) -> list[str]:
    """What ranks with these mistakes print; rank r fails ``r delay`` seconds late."""
    ranks = [subprocess.Popen(
        [sys.executable, "-c", FAILS, mistake, str(delay * rank)], stderr=subprocess.PIPE, text=True,
        env=os.environ | MEET | {"RANK": str(rank), "WORLD_SIZE": str(len(mistakes)),
                                 "LOCAL_WORLD_SIZE": str(len(mistakes))}) for rank, mistake in enumerate(mistakes)]
    said = [rank.communicate(timeout=60)[1].strip() for rank in ranks]
    assert {rank.returncode for rank in ranks} == {2}
    return said


def test_ranks_print_the_same_mistake_once_and_different_ones_each() -> None:
    said = fail_together("file x", "file x", "file y")
    assert sorted(said) == ["", "DataError: file x", "DataError: file y"]
    said = fail_together("file x", "file x", delay=0.3)
    assert said == ["DataError: file x", ""], "the first rank prints, however late the second is"


def test_every_attempt_says_why_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for _ in range(2):
        assert sorted(fail_together("file x", "file x")) == ["", "DataError: file x"]
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_the_output_cannot_show_is_replaced() -> None:
    program = ("from megatron_sp.runtime import run_program\n"
               "def main(argv):\n    print('path \\u03b1 \\udcff')\nrun_program(main)")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "path \\u03b1 \\udcff\n", "")


@pytest.mark.parametrize("local_rank, visible, gpu", [(0, 8, 0), (3, 8, 3), (3, 1, 0)])
def test_each_rank_takes_its_gpu_or_the_only_one_it_sees(local_rank: int, visible: int, gpu: int) -> None:
    assert choose_gpu(local_rank, visible) == gpu


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match="local rank 2 has no GPU: 2 are visible"):
        choose_gpu(2, 2)


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
                                 stderr=subprocess.PIPE, env=os.environ | MEET | {"RANK": rank, "WORLD_SIZE": "2"})
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
    ends = [subprocess.run([sys.executable, "-c", code],
                           env=os.environ | MEET | {"RANK": "0", "WORLD_SIZE": size}).returncode for size in "12"]
    assert ends == [0, 141]


def test_an_attempt_does_not_see_the_keys_of_the_one_before() -> None:
    """torchrun keeps one store over its restarts."""
    import torch.distributed as dist

    held = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [meet(Environment(1, 2, 1, 2, "127.0.0.1", held.port, launcher_holds_store=True, attempt=attempt),
                   timedelta(seconds=5)) for attempt in range(2)]
    stores[0].set("address of rank 0", "gone")
    assert stores[0].check(["address of rank 0"]) and not stores[1].check(["address of rank 0"])


@pytest.mark.parametrize("text", ["x", "0", "-4", "2.5"])
def test_an_announced_world_size_that_is_no_count_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", text)
    for read in (announced_world_size, planning_environment):
        with pytest.raises(ConfigError, match=f"WORLD_SIZE={text} must be"):
            read()
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert announced_world_size() == 16
    assert planning_environment() == Environment(world_size=16)
    for name, value in (MEET | {"RANK": "3"}).items():
        monkeypatch.setenv(name, value)
    assert planning_environment().rank == 3
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    assert announced_world_size() == 0 and planning_environment() == Environment()


@pytest.mark.parametrize("said, sign", [
    ("Gloo connectFullMesh failed with [pair.cc:144] no error: Connection refused", "connectFullMesh failed"),
    ("[pair.cc:552] Connection closed by peer [127.0.1.1]:2340", "Connection closed by peer"), ("another mistake", "")])
def test_signs_of_a_lost_peer_are_known(said: str, sign: str) -> None:
    error = RuntimeError("stage 0 failed")
    error.__cause__ = RuntimeError(said)
    assert _lost_peer(error) == sign
