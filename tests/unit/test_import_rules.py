"""Who may import whom, and the few things that may happen in one place only (ARCHITECTURE.md).

Read from the source text, so that nothing is imported and imports inside functions count too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_sp"
FILES = sorted(PACKAGE.rglob("*.py"))
PROGRAMS = [ROOT / "pretrain_gpt.py", *sorted((ROOT / "tools").rglob("*.py")),
            *sorted((ROOT / "benchmarks").rglob("*.py"))]

#: For each room, the modules of the package it may import. A more exact entry wins.
MAY_IMPORT = {
    "errors": (),
    "progress": (),
    "output_files": ("errors",),
    "pictures": ("errors", "output_files"),
    "config.schema": ("errors",),
    "user_function": ("errors",),
    "layout": ("errors", "user_function", "config.schema", "layout"),
    "config": ("errors", "user_function", "config", "layout"),
    "plan": ("errors", "config", "layout", "plan"),
    "launchers": ("errors",),
    "__main__": (),
    "check_in": ("errors",),
    "runtime": ("errors", "config", "launchers", "check_in", "torch_internals"),
    "torch_internals": ("errors",),
    "transport": ("errors", "torch_internals", "transport"),
    "activations": ("activations", "torch_internals"),
    "parallel.mesh": ("errors", "config.schema", "layout", "torch_internals", "transport"),
    "parallel.random": ("errors", "config.schema", "layout", "parallel.mesh"),
    "parallel.collectives": ("errors", "config.schema", "layout", "parallel.mesh", "torch_internals", "transport"),
    "parallel": ("errors", "config.schema", "layout", "torch_internals", "transport", "parallel"),
    "data": ("errors", "output_files", "progress", "user_function", "config", "layout", "data"),
    "model": ("errors", "progress", "config", "layout", "torch_internals", "parallel", "activations", "model"),
    "inference": ("errors", "config", "parallel", "model", "inference"),
    "checkpoint": ("errors", "config", "parallel.mesh", "model", "checkpoint"),
    "convert": ("errors", "progress", "torch_internals", "config", "checkpoint", "convert"),
    "proof": ("errors", "runtime", "config", "layout", "parallel", "data", "model", "torch_internals",
              "train", "proof"),
    "proof.reference": ("config.schema", "proof.reference_masks"),
    "proof.reference_masks": ("config.schema",),
    "proof.small": ("errors", "config", "layout", "proof.small"),
    "train": ("errors", "runtime", "config", "layout", "plan", "activations", "parallel", "data", "model",
              "checkpoint", "convert", "train", "progress"),
}


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def _module(path: Path) -> str:
    """Name within the package: ``parallel.mesh``; a package's __init__ is the package."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__").removesuffix("__init__")


def _imports(tree: ast.AST) -> Iterator[str]:
    """Absolute dotted names; ``from a import b`` gives ``a.b``, since b may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _within(name: str, room: str) -> bool:
    return name == room or name.startswith(f"{room}.")


def _allowed(module: str) -> tuple[str, ...]:
    rooms = [room for room in MAY_IMPORT if _within(module, room)]
    assert rooms, f"{module} is in no room of MAY_IMPORT"
    return MAY_IMPORT[max(rooms, key=len)]


def _ids(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.mark.parametrize("path", FILES, ids=_ids(FILES))
def test_rooms_import_only_what_they_may(path: Path) -> None:
    module = _module(path)
    if not module:
        return  # the package itself holds only its version
    allowed = _allowed(module)
    ours = [name.removeprefix("megatron_sp.") for name in _imports(_tree(path)) if _within(name, "megatron_sp")]
    wrong = [name for name in ours if not any(_within(name, room) for room in allowed)]
    assert not wrong, f"{module} imports {wrong}; it may import only {allowed}"


def test_only_programs_and_their_proof_import_train() -> None:
    for path in FILES:
        if not _within(_module(path), "train") and not _within(_module(path), "proof"):
            assert not [name for name in _imports(_tree(path)) if _within(name, "megatron_sp.train")], path


@pytest.mark.parametrize("path", [path for path in FILES if _within(_module(path), "config")
                                  or _module(path) in ("errors", "layout.heads")], ids=lambda path: path.stem)
def test_config_needs_only_the_standard_library(path: Path) -> None:
    foreign = {name.split(".")[0] for name in _imports(_tree(path))} - {"megatron_sp"} - set(sys.stdlib_module_names)
    assert not foreign, f"{path.name} imports {foreign}"


@pytest.mark.parametrize("path", [path for path in FILES if _within(_module(path), "data")], ids=lambda path: path.stem)
def test_data_knows_no_process_groups(path: Path) -> None:
    assert not [name for name in _imports(_tree(path)) if _within(name, "torch.distributed")]
    assert "torch.distributed" not in path.read_text()


def test_wrong_flags_are_found_before_torch_is_imported() -> None:
    modules = ["megatron_sp.errors", "megatron_sp.runtime", "megatron_sp.config.load", "megatron_sp.config.serialize",
               "megatron_sp.layout.tokens"]
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


#: Benchmarks may set variables: they start other programs with them.
INSTALLED = [path for path in FILES + PROGRAMS if "benchmarks" not in path.relative_to(ROOT).parts]


@pytest.mark.parametrize("path", INSTALLED, ids=_ids(INSTALLED))
def test_environment_is_read_only_in_runtime(path: Path) -> None:
    if path == PACKAGE / "runtime.py":
        return
    names = {node.attr for node in ast.walk(_tree(path)) if isinstance(node, ast.Attribute)}
    names |= {name.rsplit(".", 1)[-1] for name in _imports(_tree(path))}
    assert not names & {"environ", "getenv", "putenv", "unsetenv", "environb"}


@pytest.mark.parametrize("path", FILES + PROGRAMS, ids=_ids(FILES + PROGRAMS))
def test_groups_are_made_only_in_mesh(path: Path) -> None:
    used = {node.attr if isinstance(node, ast.Attribute) else node.id for node in ast.walk(_tree(path))
            if isinstance(node, ast.Attribute | ast.Name)}
    if path != PACKAGE / "parallel" / "mesh.py":
        assert not used & {"new_group", "new_subgroups", "new_subgroups_by_enumeration", "init_device_mesh",
                           "split_group"}
    if path in FILES and path != PACKAGE / "runtime.py":  # programs may: a benchmark measures bare torch
        assert "init_process_group" not in used


def _global_statements(path: Path) -> list[int]:
    return [node.lineno for node in ast.walk(_tree(path)) if isinstance(node, ast.Global)]


def _mutable_state(path: Path) -> list[str]:
    """Names of module-level lists, dicts, sets and objects of lower-case names; CONSTANT tables are fine."""
    found = []
    for node in _tree(path).body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(
            node, ast.AnnAssign) else []
        value = getattr(node, "value", None)
        mutable = isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp) or (
            isinstance(value, ast.Call) and isinstance(value.func, ast.Name)
            and value.func.id in ("list", "dict", "set", "defaultdict", "deque"))
        found += [target.id for target in targets
                  if mutable and isinstance(target, ast.Name) and target.id.upper() != target.id]
    return found


@pytest.mark.parametrize("path", FILES + PROGRAMS, ids=_ids(FILES + PROGRAMS))
def test_no_global_state(path: Path) -> None:
    assert not _global_statements(path)
    assert not [name for name in _mutable_state(path) if name != "__all__"]


def test_every_room_has_a_rule() -> None:
    rooms = {_module(path).split(".")[0] for path in FILES} - {""}
    assert rooms <= {room.split(".")[0] for room in MAY_IMPORT}
