"""Every kind of file of a checkpoint flipped, cut, deleted, swapped; every kind of wrong tracker."""

from __future__ import annotations

import functools
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_sp.checkpoint import files
from megatron_sp.checkpoint.verification import choose_checkpoint
from megatron_sp.errors import CheckpointError
from tests.helpers.configs import STYLES
from tests.helpers.spawn import run_ranks
from tests.helpers.training import train

MODEL = Path(__file__).parents[1] / "fixtures" / "tok" / "spm_bpe_4k.model"
FLAGS = f"{STYLES['llama']} --save-interval 2 --exit-interval 6 --vocab-size 4096 " \
        f"--tokenizer-type SentencePieceTokenizer --tokenizer-model {MODEL}"
NEWEST = "iter_0000006"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run on two ranks with the checkpoints of iterations 2, 4 and 6."""
    directory = tmp_path_factory.mktemp("source")
    assert run_ranks(train, 2, f"{FLAGS} --zero-stage 3 --save {directory}") == ["", ""]
    return directory


def outcome(directory: Path, iteration: int | None = None, verify: str = "full") -> str:
    """Return the iteration that a run would load and the notes about it, or the error."""
    try:
        chosen = choose_checkpoint(directory, iteration, verify)
    except CheckpointError as error:
        return f"refused: {error}"
    return "nothing" if chosen is None else f"iteration {chosen.state['iteration']}: {' '.join(chosen.notes)}"


def flip(path: Path, place: float) -> None:
    """Change one bit at a place between 0 (the first byte) and 1 (the last)."""
    data = bytearray(path.read_bytes())
    data[round(place * (len(data) - 1))] ^= 1
    path.write_bytes(bytes(data))


def swap(path: Path) -> None:
    """Exchange a file with the one of the same name in the checkpoint of iteration 4."""
    other = Path(str(path).replace(NEWEST, "iter_0000004"))
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


def harms() -> Iterator[tuple[str, Callable[[Path], object]]]:
    """Yield the name of each harm to a file, and a function that does it."""
    chance = random.Random(3)
    for place in (0.0, 0.5, 1.0, *(chance.random() for _ in range(4))):
        yield f"bit flipped at {place:.2f}", functools.partial(flip, place=place)
    cuts: dict[str, Callable[[bytes], bytes]] = {
        "emptied": lambda data: b"", "cut in half": lambda data: data[:len(data) // 2],
        "last byte cut": lambda data: data[:-1], "a byte added": lambda data: data + b"\0",
        "zeroed": lambda data: bytes(len(data))}
    for name, cut in cuts.items():
        yield name, functools.partial(rewrite, change=cut)
    yield "deleted", Path.unlink
    yield "a directory", replace_by_directory


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def harm_every_file(source: str, work: str) -> list[tuple[str, str, str, str]]:
    """Do each harm to each file of the newest checkpoint.

    Returns:
        file, harm, the outcome, and the outcome when the newest one was asked for by name
    """
    found = []
    for name in (files.MANIFEST, *files.read_manifest(Path(source) / NEWEST)):
        for harm, do in harms():
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(source, work)
            do(Path(work) / NEWEST / name)
            found.append((name, harm, outcome(Path(work)), outcome(Path(work), 6)))
    return found


def test_every_harm_to_every_file_is_found(source: Path, tmp_path: Path) -> None:
    """The run falls back to iteration 4 and names the file; iteration 6 asked for by name is refused."""
    found = run_ranks(harm_every_file, 1, str(source), str(tmp_path / "work"), timeout=120)[0]
    assert {name for name, *_ in found} >= {"manifest.json", "state.json", ".metadata", "__0_0.distcp",
                                            "__1_0.distcp", "tokenizer/spm_bpe_4k.model"}
    for name, harm, automatic, named in found:
        assert named.startswith("refused"), (name, harm, named)
        if name == files.MANIFEST and automatic.startswith("refused: "):
            # Its own format number was changed into that of a newer version, or the file cannot be opened at all.
            assert "newer version" in automatic or harm == "a directory", (name, harm, automatic)
            continue
        assert automatic.startswith("iteration 4: "), (name, harm, automatic)
        assert "THE CHECKPOINT BEFORE IS USED: iteration 4" in automatic and NEWEST in automatic
        assert name in automatic or name == files.MANIFEST, (name, harm, automatic)


def harm_directories(source: str, work: str) -> dict[str, str]:
    """Return the outcome of each harm to the directory as a whole."""
    def tracker(content: bytes) -> Callable[[Path], object]:
        return lambda save: (save / files.TRACKER).write_bytes(content)

    def exchange(save: Path) -> None:
        (save / NEWEST).rename(save / "aside")
        (save / "iter_0000004").rename(save / NEWEST)
        (save / "aside").rename(save / "iter_0000004")

    def harm_all(save: Path) -> None:
        for path in files.complete_checkpoints(save).values():
            (path / "state.json").unlink()

    found = {}
    for name, do in {
            "tracker emptied": tracker(b""), "tracker garbage": tracker(b"garbage"),
            "tracker binary": tracker(b"\xff\x80"), "tracker to nowhere": tracker(b"9"),
            "tracker to an older one": tracker(b"4\n"),
            "tracker deleted": lambda save: (save / files.TRACKER).unlink(),
            "newest deleted": lambda save: shutil.rmtree(save / NEWEST), "directories exchanged": exchange,
            "file swapped": lambda save: swap(save / NEWEST / "__0_0.distcp"),
            "files added": lambda save: (save / NEWEST / "more.txt").write_text(""), "all harmed": harm_all,
    }.items():
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(source, work)
        do(Path(work))
        found[name] = outcome(Path(work))
    flip(Path(work) / "iter_0000006" / "__0_0.distcp", 0.5)
    return found


def test_wrong_trackers_and_swapped_directories(source: Path, tmp_path: Path) -> None:
    found = run_ranks(harm_directories, 1, str(source), str(tmp_path / "work"))[0]
    expected = {
        "tracker emptied": ("iteration 6: ", "holds '', not an iteration"),
        "tracker garbage": ("iteration 6: ", "holds 'garbage', not an iteration"),
        "tracker binary": ("iteration 6: ", "cannot read the tracker"),
        "tracker to nowhere": ("iteration 6: ", "iter_0000009 does not exist"),
        "tracker to an older one": ("iteration 4: ", "later iterations: 6"),
        "tracker deleted": ("iteration 6: ", "has no tracker"),
        "newest deleted": ("iteration 4: ", "iter_0000006 does not exist"),
        "directories exchanged": ("iteration 2: ", "holds the checkpoint of iteration 4 under the name of another"),
        "file swapped": ("iteration 2: ", "__0_0.distcp is damaged"),
        "files added": ("iteration 6: ", "does not list; they are not read: more.txt"),
        "all harmed": ("refused: ", "holds no other checkpoint"),
    }
    assert found.keys() == expected.keys()
    for name, (start, words) in expected.items():
        assert found[name].startswith(start) and words in found[name], (name, found[name])


def compare_modes(source: str, work: str) -> list[str]:
    """Return the outcome of each --verify-checkpoint for a changed, then for a cut file of tensors."""
    shutil.copytree(source, work)
    path, found = Path(work) / NEWEST / "__0_0.distcp", []
    flip(path, 0.5)
    found += [outcome(Path(work), verify=verify) for verify in ("full", "size", "off")]
    path.write_bytes(path.read_bytes()[:-1])
    return found + [outcome(Path(work), verify=verify) for verify in ("full", "size", "off")]


def test_what_each_mode_of_verification_finds(source: Path, tmp_path: Path) -> None:
    found = run_ranks(compare_modes, 1, str(source), str(tmp_path / "work"))[0]
    assert [text.split(":")[0].split()[1] for text in found] == ["4", "6", "6", "4", "4", "6"]
