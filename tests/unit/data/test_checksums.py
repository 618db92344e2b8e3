"""The checksum file beside a token set: damage is found and named."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_sp.data.token_files import checksums
from megatron_sp.data.token_files.token_writer import IndexedDatasetBuilder
from megatron_sp.errors import DataError


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A token set of 200 bytes with checksums of blocks of 64 bytes."""
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 64)
    with IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
        builder.add_document(list(range(100)))
        builder.finalize()
    checksums.write_checksums(tmp_path / "x")
    return tmp_path / "x"


def test_files_as_written_are_whole(prefix: Path) -> None:
    seen: list[int] = []
    assert checksums.find_damage(prefix, seen.append) == []
    assert sum(seen) == 200 + prefix.with_suffix(".idx").stat().st_size
    content = json.loads(Path(checksums.checksum_path(prefix)).read_text())
    assert content["block_bytes"] == 64 and len(content["files"]["bin"]["blocks"]) == 4


def test_a_changed_token_is_found_and_its_place_is_named(prefix: Path) -> None:
    data = bytearray(prefix.with_suffix(".bin").read_bytes())
    data[130] ^= 1
    prefix.with_suffix(".bin").write_bytes(data)
    (problem,) = checksums.find_damage(prefix)
    assert "x.bin: bytes 128 to 191 are not what was written (block 2 of 4)" in problem


def test_a_file_of_another_size_is_found(prefix: Path) -> None:
    data = prefix.with_suffix(".bin").read_bytes()
    for other in (data[:128], data + b"ab"):
        prefix.with_suffix(".bin").write_bytes(other)
        assert any(f"has {len(other)} bytes, but had 200" in problem for problem in checksums.find_damage(prefix))


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"format": "x"}', '{"format": "megatron_sp checksums", '
                                     '"version": 1, "algorithm": "sha256", "block_bytes": 0, "files": {}}'])
def test_a_damaged_checksum_file_is_named(prefix: Path, content: str) -> None:
    Path(checksums.checksum_path(prefix)).write_text(content)
    with pytest.raises(DataError, match=r"x\.checksums\.json is damaged"):
        checksums.find_damage(prefix)


def test_missing_files_are_named(prefix: Path) -> None:
    prefix.with_suffix(".bin").unlink()
    with pytest.raises(DataError, match=r"x\.bin cannot be read"):
        checksums.find_damage(prefix)
    checksums.remove_checksums(prefix)
    with pytest.raises(DataError, match=r"x\.checksums\.json cannot be read"):
        checksums.find_damage(prefix)
    checksums.remove_checksums(prefix)
