"""Read files that ``torch.save`` wrote, without running code from them.

Such a file is a pickle, and an ordinary unpickler calls any function that the file names. torch's restricted unpickler
(``weights_only``) calls a few functions that make tensors, and refuses all others. Checkpoints of Megatron and
DeepSpeed also hold flags, enumerations and random states, whose classes it would refuse. Here an inert object takes the
place of each: it keeps what it was made of and does nothing. So neither Megatron nor DeepSpeed needs to be installed.
"""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from megatron_sp.convert.lazy import LazyTensor, lazy_of
from megatron_sp.errors import CheckpointError

#: Packages whose classes and functions get an inert stand-in. Everything outside these and ``NAMES`` is refused.
PACKAGES = ("megatron.", "deepspeed.", "transformer_engine.", "apex.", "numpy.", "torch.distributed.",
            "torch.nn.functional.", "torch._C._nn.", "transformers.")
#: Single names with an inert stand-in: flags, random states, and how Python stores members of an enumeration.
NAMES = ("argparse.Namespace", "_codecs.encode", "types.SimpleNamespace", "pathlib.PosixPath", "pathlib.PurePosixPath",
         "pathlib._local.PosixPath", "_io.BytesIO", "io.BytesIO", "copyreg._reconstructor", "signal.Signals",
         "datetime.timedelta", "datetime.datetime", "builtins.object", "__builtin__.object",
         "builtins.getattr", "__builtin__.getattr", "torch.torch_version.TorchVersion")


class Inert:
    """Stands for an object of a class that is not loaded; keeps the arguments and attributes that a file gives it."""

    arguments: tuple[Any, ...] = ()

    def __init__(self, *arguments: Any, **named: Any):
        self.arguments = arguments
        self.__dict__.update(named)

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update({key: value for key, value in state.items() if isinstance(key, str)})


def load_torch_file(path: Path) -> Any:
    """Return the content of a file. Tensors stay in the file until they are read, where its format allows it.

    Raises:
        CheckpointError: the file is missing or damaged, or it names a class or function that could run code.
    """
    try:
        is_zip = _is_zip(path)
        stand_ins: list[Any] = [(Inert, name) for name in (_foreign_names(path) if is_zip else NAMES)]
        with torch.serialization.safe_globals(stand_ins):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True if is_zip else None)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except CheckpointError:
        raise
    except Exception as error:      # a damaged file raises almost anything
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    """Return the message for a file that torch's restricted unpickler refuses. torch's own advises to run the code."""
    text = str(error).strip()
    if named := re.search(r"GLOBAL (\S+)", text):
        return _refused(path, [named[1]])
    reason = text.partition("WeightsUnpickler error: ")[2] or text or type(error).__name__
    return CheckpointError(f"{path} cannot be read as a file of torch.save: {reason.splitlines()[0]}")


def _refused(path: Path, names: list[str]) -> CheckpointError:
    return CheckpointError(f"{path} is refused: it names {', '.join(names[:5])}, which no checkpoint needs and which "
                           "could run code. Use the file only if you trust who made it, and write it again without "
                           "these objects")


def _is_zip(path: Path) -> bool:
    """Return whether torch 1.6 or newer wrote the file; older files are not zip archives.

    Raises:
        CheckpointError: an entry of the archive would take more memory than the file has bytes. torch never compresses.
    """
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            return False
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    if packed := [entry.filename for entry in entries if entry.compress_type != zipfile.ZIP_STORED]:
        raise CheckpointError(f"{path} is refused: its entry {packed[0]} is compressed, which torch.save never does. It"
                              " could take any amount of memory. Write the file again with torch.save")
    if sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise CheckpointError(f"{path} is damaged: its entries are larger than the file. Copy or download it again")
    return True


def _foreign_names(path: Path) -> list[str]:
    """Return the names of classes and functions in a file that get a stand-in.

    Raises:
        CheckpointError: the file names others, which could run code.
    """
    named = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    refused = sorted(name for name in named if name not in NAMES and not name.startswith(PACKAGES))
    if refused:
        raise _refused(path, refused)
    return named


def read_tensors(path: Path) -> dict[str, LazyTensor]:
    """Return the tensors of a file that holds a plain dictionary of them, such as ``pytorch_model.bin``."""
    content = load_torch_file(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold tensors by name")
    return {name: lazy_of(tensor, f"{path}: {name}") for name, tensor in content.items()
            if isinstance(name, str) and isinstance(tensor, torch.Tensor)}
