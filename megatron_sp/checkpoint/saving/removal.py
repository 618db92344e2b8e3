"""Remove what no run needs any more: old checkpoints, and what killed saves and removals left. Imports no torch.

A save does not need this to succeed. So what cannot be removed stays, and the log says so: files that are immutable, of
another owner or still open on a network file system, and files that this program did not write.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from megatron_sp.checkpoint import files


def remove(path: Path) -> str:
    """Remove a checkpoint directory, or the rest of one. Of a symbolic link only the link goes.

    Returns:
        "", or a sentence on what stays and why
    """
    try:
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)
    except OSError as error:
        return (f"WARNING: {path} cannot be removed ({error.filename or path}: {error.strerror}). No run needs it: "
                "remove it by hand to free its space")
    return ""


def remove_rest(path: Path) -> str:
    """Remove what is left of a checkpoint of this program; it stays if it holds files of another program.

    Returns:
        "", or a sentence on what stays and why
    """
    if not path.is_symlink() and path.is_dir():
        foreign = [name for name in files.file_names(path) if not files.OWN_FILE.fullmatch(name)]
        if foreign:
            return f"WARNING: {path} holds {foreign[0]}, which this program did not write, so it is not removed"
    return remove(path)


def remove_checkpoint(path: Path) -> str:
    """Remove a complete checkpoint. After a kill at any instant it is whole, or has a name that nobody loads.

    Returns:
        "", or a sentence on what stays and why
    """
    aside = path.with_name(path.name + files.REMOVING)
    if (aside.exists() or aside.is_symlink()) and (problem := remove_rest(aside)):
        return f"{problem}. {path} stays until then"
    try:
        path.rename(aside)
        files.sync_directory(path.parent)
    except OSError as error:
        return f"WARNING: {path} cannot be removed: {error.strerror}"
    return remove(aside)
