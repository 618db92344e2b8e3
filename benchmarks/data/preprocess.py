#!/usr/bin/env python3
"""Measure how fast tools/preprocess_data.py tokenizes, against the tokenizer library alone, and its peak memory.

    python benchmarks/data/preprocess.py --vocab-file vocab.json --merge-file merges.txt --tokenizer-model spm.model

The input is made of the Python and text files of this interpreter and its packages, 50 MB as JSON lines; --input takes
a file of your own. In turn, with the same number of processes and start-up included, the benchmark runs

- the tool, which reads, parses, tokenizes, collects the tokens in order and writes them;
- the library alone: as many processes parse the same lines and encode them in batches, and throw the tokens away.

Wall time and processor time of all processes are reported, because other programs on the machine lengthen mostly the
first. With --memory the tool runs once more over ten copies of the input, and the peaks of both runs are compared:
memory may follow the largest document, but not the size of the input. The exit status is 1 if the tool is slower than
the library (--limit), or if its peak memory grows by more than a tenth.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron_sp.output_files import write_json  # noqa: E402
from megatron_sp.runtime import run_program  # noqa: E402

ENDINGS = (".py", ".txt", ".md", ".rst")

#: Encodes every line of sys.argv[1] with sys.argv[2] processes and prints the number of tokens.
LIBRARY = """
import itertools, json, multiprocessing, os, sys
os.environ["TOKENIZERS_PARALLELISM"] = "false"
files = sys.argv[3:]

def start():
    global encode
    if len(files) == 2:
        import tokenizers
        library = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(*files))
        library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.add_special_tokens(["<|endoftext|>"])
        encode = lambda texts: (e.ids for e in library.encode_batch_fast(texts, add_special_tokens=False))
    else:
        import sentencepiece
        library = sentencepiece.SentencePieceProcessor(model_file=files[0])
        encode = lambda texts: library.encode(texts, num_threads=1)

def count(lines):
    return sum(len(ids) for ids in encode([json.loads(line)["text"] for line in lines]))

def batches(file):
    while batch := file.readlines(1 << 19):
        yield batch

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(int(sys.argv[2]), start) as pool, open(sys.argv[1], "rb") as file:
        print(sum(pool.imap(count, batches(file))))
"""


def make_input(path: Path, size: int) -> None:
    """Write JSON lines of about ``size`` bytes; the files are repeated when there are too few."""
    folders = [sysconfig.get_paths()[name] for name in ("purelib", "stdlib")]
    written = 0
    with open(path, "w", encoding="ascii") as output:
        while written < size:
            before = written
            for text in _texts(folders):
                written += output.write(json.dumps({"text": text}) + "\n")
                if written >= size:
                    return
            if written == before:
                sys.exit(f"there is no text in {folders}; give --input")


def _texts(folders: list[str]) -> Iterator[str]:
    for folder in folders:
        for directory, names, files in os.walk(folder):
            names.sort()
            for name in sorted(files):
                if name.endswith(ENDINGS):
                    try:
                        text = Path(directory, name).read_text(encoding="utf-8")
                    except (OSError, UnicodeDecodeError):
                        continue
                    if len(text) > 200:
                        yield text


def run(command: list[str], watch_memory: bool = False) -> dict[str, float]:
    """Run a command and return wall seconds, processor seconds and, if asked for, the peak memory of all its processes.

    Raises:
        SystemExit: the command failed.
    """
    with tempfile.TemporaryFile("w+") as output:
        started = time.monotonic()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ,
                                                                                          "OMP_NUM_THREADS": "1"})
        peak = 0
        while watch_memory and not _ended(process.pid):  # Popen.poll would take the usage away from wait4
            peak = max(peak, sum(map(_memory, _family(process.pid))))
            time.sleep(0.1)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.monotonic() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        said = output.read()
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{said}")
    return {"wall": seconds, "processor": usage.ru_utime + usage.ru_stime, "peak_mib": peak / 2**20}


def _ended(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def _family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    try:
        children = [int(child) for task in Path(f"/proc/{pid}/task").iterdir()
                    for child in (task / "children").read_text().split()]
    except OSError:
        return []
    return [pid, *(each for child in children for each in _family(child))]


def _memory(pid: int) -> int:
    """Return the bytes of memory of a process; pages that several processes share count in parts (PSS)."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def measure(arguments: argparse.Namespace, name: str, flags: list[str], files: list[str], source: Path,
            scratch: Path) -> dict[str, Any]:
    """Return the times of the tool and of the library alone for one tokenizer. They take turns."""
    library = scratch / "library.py"
    library.write_text(LIBRARY)
    prefix = scratch / f"out_{name}"
    commands = {"tool": [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", str(source),
                         "--output-prefix", str(prefix), "--append-eod", "--workers", str(arguments.workers), *flags],
                "library": [sys.executable, str(library), str(source), str(arguments.workers), *files]}
    runs: dict[str, list[dict[str, float]]] = {"tool": [], "library": []}
    for _ in range(arguments.repeats):
        for program, command in commands.items():
            runs[program].append(run(command))
    report = json.loads(Path(f"{prefix}.report.json").read_text())
    found: dict[str, Any] = {"tokens": report["keys"]["text"]["tokens"], "load": os.getloadavg()[0]}
    for program, times in runs.items():
        for kind in ("wall", "processor"):
            found[f"{program}_{kind}"] = [round(each[kind], 2) for each in times]
    wall, processor = (statistics.median(found[f"tool_{kind}"]) for kind in ("wall", "processor"))
    found["tokens_per_second"] = round(found["tokens"] / wall)
    found["tokens_per_second_if_the_cores_were_free"] = round(found["tokens"] * arguments.workers / processor)
    found["times_the_library"] = {
        kind: round(statistics.median(found[f"library_{kind}"]) / statistics.median(found[f"tool_{kind}"]), 2)
        for kind in ("wall", "processor")}
    if arguments.memory:
        big = scratch / "big.jsonl"
        with open(big, "wb") as output:
            for _ in range(10):
                with open(source, "rb") as copy:
                    shutil.copyfileobj(copy, output)
        command = commands["tool"]
        found["peak_mib"] = [round(run([str(big) if word == str(source) else word for word in command] if large else
                                       command, True)["peak_mib"]) for large in (False, True)]
        big.unlink()
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, default=None, help="JSON lines to tokenize (default: made)")
    parser.add_argument("--megabytes", type=int, default=50, help="size of the input (default: %(default)s)")
    parser.add_argument("--vocab-file", default="", help="GPT-2's vocab.json; without it GPT-2 is not measured")
    parser.add_argument("--merge-file", default="", help="GPT-2's merges.txt")
    parser.add_argument("--tokenizer-model", default=str(ROOT / "tests/fixtures/tok/spm_bpe_4k.model"),
                        help="SentencePiece model (default: one of the tests)")
    parser.add_argument("--only", choices=("gpt2", "sentencepiece"), default=None, help="measure only this tokenizer")
    parser.add_argument("--workers", type=int, default=2, help="processes of each program (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each program (default: %(default)s)")
    parser.add_argument("--memory", action="store_true", help="compare peak memory with that of ten copies")
    parser.add_argument("--limit", type=float, default=1.0,
                        help="least processor time of the library by that of the tool (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=None, help="JSON file for the figures")
    arguments = parser.parse_args(argv)
    jobs = {"sentencepiece": (["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model",
                               arguments.tokenizer_model], [arguments.tokenizer_model])}
    if arguments.vocab_file and arguments.merge_file:
        files = [arguments.vocab_file, arguments.merge_file]
        jobs["gpt2"] = (["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", files[0], "--merge-file", files[1]],
                        files)
    results: dict[str, Any] = {"cores": os.cpu_count(), "workers": arguments.workers}
    failed = False
    with tempfile.TemporaryDirectory() as name:
        source = arguments.input or Path(name) / "input.jsonl"
        if not arguments.input:
            make_input(source, arguments.megabytes * 10**6)
        results["megabytes"] = round(source.stat().st_size / 1e6, 1)
        for kind, (flags, files) in jobs.items():
            if arguments.only not in (None, kind):
                continue
            found = results[kind] = measure(arguments, kind, flags, files, source, Path(name))
            print(json.dumps({kind: found}, indent=1), flush=True)
            small, large = found.get("peak_mib", (1, 1))
            failed |= found["times_the_library"]["processor"] < arguments.limit or large > 1.1 * small
    if arguments.output:
        write_json(arguments.output, results, "--output")
    return int(failed)


if __name__ == "__main__":
    run_program(main)
