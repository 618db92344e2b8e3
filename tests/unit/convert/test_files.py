"""Files of other systems: damaged ones, and ones that would run code, are refused by name."""

from __future__ import annotations

import argparse
import enum
import json
import os
import pickle
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_sp.convert.lazy import column_part, columns_joined, lazy_of, row_part, rows_joined, transposed
from megatron_sp.convert.safetensors_file import read_safetensors, write_safetensors
from megatron_sp.convert.torch_file import load_torch_file
from megatron_sp.errors import CheckpointError


def test_safetensors_are_those_of_the_package(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(7, 5), "b": torch.randn(3), "none": torch.empty(0, 4)}
    save_file(tensors, tmp_path / "theirs")
    found = read_safetensors(tmp_path / "theirs")
    assert {name: tensor.shape for name, tensor in found.items()} == {k: tuple(v.shape) for k, v in tensors.items()}
    assert all(torch.equal(found[name].whole(), tensors[name]) for name in tensors)
    assert torch.equal(found["a"].read(2, 5), tensors["a"][2:5])
    with (tmp_path / "ours").open("wb") as file:
        write_safetensors(file, [("a", (7, 5), iter(tensors["a"].split(2))), ("b", (3,), iter([tensors["b"]]))],
                          torch.bfloat16)
    again = load_file(tmp_path / "ours")
    assert torch.equal(again["a"], tensors["a"].bfloat16()) and torch.equal(again["b"], tensors["b"].bfloat16())


@pytest.mark.parametrize("damage, message", [
    (lambda data: data[:-4], "is cut short"),
    (lambda data: data[:5], "does not begin with the header"),
    (lambda data: b"\xff" * 8 + data[8:], "does not begin with the header"),
    (lambda data: data.replace(b'"F32"', b'"F99"'), "entry of the tensor a"),
    (lambda data: data.replace(b'"shape":[4,5]', b'"shape":[4,6]'), "entry of the tensor a"),
    (lambda data: data.replace(b'"dtype":"F32"', b'"dtype":"U16"'), "has the type U16"),
    (lambda data: data.replace(b"[80,160]", b"[40,120]") + b"0" * 40, "bytes of the tensor b overlap those of a"),
    (lambda data: data.replace(b"[80,160]", b"[84,164]") + b"0" * 4, "bytes of the tensor b do not begin where"),
])
def test_damaged_safetensors_are_refused(tmp_path: Path, damage: Any, message: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(4, 5), "b": torch.ones(5, 4)}, path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=message) as error:
        read_safetensors(path)
    assert str(path) in str(error.value)


def test_a_compressed_archive_is_not_unpacked(tmp_path: Path) -> None:
    """20 kB would become 20 MB of memory."""
    torch.save({"a": torch.ones(3)}, tmp_path / "sound.pt")
    with zipfile.ZipFile(tmp_path / "sound.pt") as sound, zipfile.ZipFile(
            tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as bomb:
        for entry in sound.infolist():
            bomb.writestr(entry.filename, sound.read(entry) + b"\0" * 20_000_000 * entry.filename.endswith("data.pkl"))
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=r"bomb.pt is refused: its entry .* is compressed"):
        load_torch_file(tmp_path / "bomb.pt")
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
    assert load_torch_file(tmp_path / "sound.pt")["a"].sum() == 3


def test_parts_of_tensors() -> None:
    x = torch.arange(24.0).view(6, 4)
    one = lazy_of(x, "x")
    assert torch.equal(transposed(one).read(1, 3), x.T[1:3])
    assert torch.equal(column_part(one, 1, 3).read(2, 4), x[2:4, 1:3])
    assert torch.equal(row_part(one, 2, 5).whole(), x[2:5])
    halves = [row_part(one, 0, 2), row_part(one, 2, 6)]
    assert all(torch.equal(rows_joined(halves).read(a, b), x[a:b]) for a in range(6) for b in range(a + 1, 7))
    assert torch.equal(columns_joined([one, one]).read(1, 2), torch.cat((x, x), 1)[1:2])


class Kind(enum.Enum):
    """Stands in for an enumeration of another program."""

    ONE = 1


def as_if_of(path: Path, old: bytes, new: bytes) -> None:
    """Rename a module within the pickle of a file of ``torch.save``; both names are equally long."""
    assert len(old) == len(new)
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in content.items():
            archive.writestr(name, data.replace(old, new))


def test_flags_and_random_states_are_read_without_their_classes(tmp_path: Path) -> None:
    path = tmp_path / "model_optim_rng.pt"
    args = argparse.Namespace(num_layers=2, kind=Kind.ONE, params_dtype=torch.bfloat16)
    torch.save({"args": args, "weight": torch.ones(2), "rng_state": [np.random.RandomState(0).get_state()]}, path)
    name = Kind.__module__.encode()
    as_if_of(path, name + b"\n", (b"megatron." + b"x" * 99)[:len(name)] + b"\n")
    content = load_torch_file(path)
    assert content["args"].num_layers == 2 and content["args"].params_dtype is torch.bfloat16
    assert not isinstance(content["args"], argparse.Namespace) and torch.equal(content["weight"], torch.ones(2))


class _Call:
    """Pickles as a call of a function."""

    def __init__(self, *call: Any):
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


@pytest.mark.parametrize("call, name", [
    ((os.system, "touch HERE"), "posix.system"), ((eval, "open('HERE', 'w')"), "eval"),
    ((exec, "open('HERE', 'w')"), "exec"), ((pickle.loads, b""), "loads")])
@pytest.mark.parametrize("new_format", [True, False])
def test_code_is_named_and_not_run(tmp_path: Path, call: tuple[Any, ...], name: str, new_format: bool) -> None:
    path, trace = tmp_path / "evil.pt", tmp_path / "trace"
    call = (call[0], *(str(word).replace("HERE", str(trace)) if isinstance(word, str) else word for word in call[1:]))
    torch.save({"args": _Call(*call)}, path, _use_new_zipfile_serialization=new_format)
    with pytest.raises(CheckpointError) as error:
        load_torch_file(path)
    assert name in str(error.value) and str(path) in str(error.value)
    assert not trace.exists()


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 not an archive", b"text", json.dumps({"a": 1}).encode()])
def test_what_is_no_torch_file_is_one_message(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_torch_file(tmp_path / "x.pt")
