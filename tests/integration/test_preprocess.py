"""tools/preprocess_data.py as a person runs it, and the index cache with many processes at once."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import pytest

from megatron_sp.config.schema import Data
from megatron_sp.data.build import build_datasets
from megatron_sp.data.token_files.indexed_dataset import IndexedDataset
from tests.integration.programs import ROOT, run_program, run_tool
from tests.unit.data.test_indexed import FIXTURES, SET_A, checksums, digest

ODD = FIXTURES / "jsonl" / "odd.jsonl"
GPT2 = ("--tokenizer-type", "GPT2BPETokenizer", "--vocab", FIXTURES / "tok" / "gpt2" / "vocab.json",
        "--merge-file", FIXTURES / "tok" / "gpt2" / "merges.txt")
NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", 1000)


def preprocess(*words: object) -> subprocess.CompletedProcess[str]:
    return run_tool("preprocess_data.py", *words)


def test_many_processes_write_the_same_bytes(tmp_path):
    # Other tools' spellings and hints too.
    done = preprocess("--input", ODD, "--output_prefix", tmp_path / "gpt2_odd_eod", "--json-key", "text",
                      "--append-eod", "--workers", 2, "--dataset-impl", "mmap", "--partitions", 2,
                      "--keep-sequential-samples", "--checksum", *GPT2)
    assert done.returncode == 0, done.stderr
    for ending in ("bin", "idx"):
        file = f"gpt2_odd_eod_text_document.{ending}"
        assert digest(tmp_path / file) == checksums()[file]
    assert "16 documents, 44,696 tokens" in done.stdout and "2 empty" in done.stdout
    assert "longest document 40,579" in done.stdout
    assert [line for line in done.stdout.splitlines() if line.startswith("note")] == \
        ["note: accepted without effect: --dataset-impl"]
    assert (tmp_path / "gpt2_odd_eod_text_document.checksums.json").exists()
    assert "50% have at most 13" in done.stdout
    assert "WARNING" not in done.stdout and "tokenizing" in done.stderr


def test_results_are_in_input_order(tmp_path):
    lines = [json.dumps({"text": f"{i % 1000} " * (i % 7)}) for i in range(20_000)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    for workers in (1, 3):
        done = preprocess("--input", tmp_path / "*.jsonl", "--output-prefix", tmp_path / f"w{workers}",
                          "--workers", workers, *NULL)
        assert done.returncode == 0, done.stderr
        assert "WARNING: --append-eod" in done.stdout
    for ending in (".bin", ".idx"):
        assert digest(tmp_path / f"w1_text_document{ending}") == digest(tmp_path / f"w3_text_document{ending}")
    assert IndexedDataset(tmp_path / "w3_text_document").get(0).tolist() == [1]


def test_hugging_face_tokenizer_in_processes_does_not_hang(tmp_path):
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = FIXTURES / "tok" / "gpt2"
    fast = Tokenizer(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    (tmp_path / "tok").mkdir()
    fast.save(str(tmp_path / "tok" / "tokenizer.json"))
    (tmp_path / "tok" / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}))
    done = preprocess("--input", ODD, "--output-prefix", tmp_path / "gpt2_odd_eod", "--append-eod", "--workers", 2,
                      "--tokenizer-type", "PretrainedFromHF", "--tokenizer-name-or-path", tmp_path / "tok",
                      "--parse-special-tokens")
    assert done.returncode == 0, done.stderr
    assert digest(tmp_path / "gpt2_odd_eod_text_document.bin") == checksums()["gpt2_odd_eod_text_document.bin"]
    assert "Token indices" not in done.stderr


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_stops_or_is_skipped(tmp_path, workers):
    (tmp_path / "in.jsonl").write_text('{"text": "1 2"}\n{"text": 5}\n{"title": "x"}\n{"text": "3"}\n')
    words = ("--input", tmp_path / "in.jsonl", "--output-prefix", tmp_path / "out", "--append-eod", "--workers",
             workers, *NULL)
    done = preprocess(*words)
    assert done.returncode == 2 and "in.jsonl, line 2" in done.stderr and "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == ["in.jsonl"]
    done = preprocess(*words, "--on-error", "skip")
    assert done.returncode == 0 and "2 documents, 5 tokens" in done.stdout
    assert "skipped 1 record: 'text' is not a string (first:" in done.stdout and "no key 'text'" in done.stdout


@pytest.mark.parametrize("words, message", [
    (["--input", "nowhere.jsonl"], "--input nowhere.jsonl does not exist"),
    (["--input", "*.nothing"], "no file matches"),
    (["--split-sentences"], "--split-sentences: sentences are not split"),
    (["--tokeniser-type", "X"], "did you mean --tokenizer-type?"),
    (["--dataset-impl", "lazy"], "only mmap is written"),
    (["--input", "docs/images"], "has no files whose names end in"),
    (["--shard", "3/3"], "give I/N with I from 0 to N-1"),
    (["--separator", "x"], "--separator divides text files, and --input names none"),
    (["--input", "README.md", "--json-keys", "a", "b"], "give one key"),
    (["--input", "pyproject.toml", "--tokenizer-type", "GPT2BPETokenizer"], "needs --vocab-file FILE"),
    (["--max-documents=5"], "--max-documents"),
])
def test_mistakes_are_explained(tmp_path, words, message):
    base = ["--input", ODD, "--output-prefix", tmp_path / "out"]
    if "--input" in words:
        base = base[2:]
    done = preprocess(*base, *words)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_an_interrupted_run_leaves_nothing_that_looks_valid(tmp_path: Path, number: int, code: int) -> None:
    pipe = tmp_path / "in.jsonl"
    os.mkfifo(pipe)  # an input that never ends
    process = subprocess.Popen(
        [sys.executable, ROOT / "tools" / "preprocess_data.py", "--input", pipe, "--output-prefix", tmp_path / "out",
         "--workers", "1", *map(str, NULL)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    with open(pipe, "w") as source:
        for _ in range(30_000):
            source.write('{"text": "1 2 3"}\n')
        source.flush()
        wait_for(lambda: any(path.stat().st_size for path in tmp_path.glob("*.bin*")))
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == code and "Traceback" not in errors
    left = {path.name for path in tmp_path.iterdir()} - {"in.jsonl"}
    assert not any(name.endswith((".bin", ".idx")) for name in left)
    assert not left or number == signal.SIGKILL


#: Notes its progress after every block, and blocks are small.
NOTING = """
import sys
from megatron_sp.data.corpus import preprocess, readers
from tools import preprocess_data
preprocess.SECONDS_BETWEEN_NOTES = 0.0
readers.BLOCK_BYTES = 2000
sys.exit(preprocess_data.main(sys.argv[1:]))
"""


def test_a_killed_run_is_continued_and_its_workers_end(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": f"{i % 1000} 7"}) + "\n" for i in range(2000))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    words = [str(word) for word in ("--input", pipe, "--output-prefix", tmp_path / "out", "--workers", 2,
                                    "--append-eod", *NULL)]
    process = subprocess.Popen([sys.executable, "-c", NOTING, *words], cwd=ROOT, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    with open(pipe, "w") as source:
        source.write(lines[:len(lines) // 2])
        source.flush()
        wait_for((tmp_path / "out.unfinished.json").exists)
        workers = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        process.kill()
        process.wait()
    wait_for(lambda: not any(is_running(pid) for pid in workers))
    assert len(workers) >= 2 and not list(tmp_path.glob("*.bin"))
    assert "--resume" in run_program(sys.executable, "-c", NOTING, *words, cwd=ROOT).stderr
    threading.Thread(target=pipe.write_text, args=(lines,), daemon=True).start()
    done = preprocess(*words, "--resume")
    assert done.returncode == 0 and "2,000 documents, 6,000 tokens" in done.stdout, done.stderr
    (tmp_path / "in.jsonl").write_text(lines)
    assert preprocess("--input", tmp_path / "in.jsonl", "--output-prefix", tmp_path / "whole", "--append-eod",
                      *NULL).returncode == 0
    for ending in (".bin", ".idx"):
        assert digest(tmp_path / f"out_text_document{ending}") == digest(tmp_path / f"whole_text_document{ending}")
    assert not list(tmp_path.glob("*unfinished*"))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_pipe_is_read_like_a_file(tmp_path):
    lines = ''.join(json.dumps({"text": f"{i % 1000} 7"}) + "\n" for i in range(30_000))
    (tmp_path / "in.jsonl").write_text(lines)
    os.mkfifo(tmp_path / "pipe")
    threading.Thread(target=(tmp_path / "pipe").write_text, args=(lines,), daemon=True).start()
    for name in ("pipe", "in.jsonl"):
        done = preprocess("--input", tmp_path / name, "--output-prefix", tmp_path / f"{name}-out", *NULL)
        assert done.returncode == 0, done.stderr
    assert digest(tmp_path / "pipe-out_text_document.bin") == digest(tmp_path / "in.jsonl-out_text_document.bin")


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)


def _build(cache: str, start: float) -> list[int]:
    time.sleep(max(0.0, start - time.time()))
    data = Data(seq_length=64, data_path=("0.3", str(SET_A), "0.7", str(SET_A)), split="90,8,2", data_cache_path=cache)
    train = build_datasets(data, None, (3000, 0, 0), 1234).train
    assert train is not None
    return [int(train.window(sample, 0, 1)[0]) for sample in range(0, 3000, 100)]


def test_many_processes_share_an_empty_cache(tmp_path: Path) -> None:
    with get_context("spawn").Pool(4) as pool:
        for repeat in range(20):
            cache = str(tmp_path / f"cache{repeat}")
            results = pool.starmap(_build, [(cache, time.time() + 0.05)] * 4, chunksize=1)
            assert all(result == results[0] for result in results)
            names = os.listdir(cache)
            assert not [name for name in names if name.startswith(".building")]
            assert len([name for name in names if not name.endswith(".lock")]) == 3  # two members and the blend
