"""Load a function that a user names on the command line: ``FILE.py:FUNCTION`` or ``package.module:FUNCTION``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from megatron_sp.errors import UserError

#: What a user's code may raise. It must not end the program either: an exit would look like the end of a good run.
FAILURES = (Exception, SystemExit)


def parts(spec: str) -> tuple[str, str]:
    """Return the file or module, and the function, that a flag names; "" for a missing part."""
    place, _, name = spec.rpartition(":")
    return place, name


def load_function(flag: str, spec: str, error_class: type[UserError]) -> Callable[..., Any]:
    """Return the function that a flag names. A file is run once, unless it changes.

    Args:
        flag: name of the flag, for messages.
        error_class: class of the errors to raise.

    Raises:
        error_class: there is no such file, it cannot be imported, or it has no such function.
    """
    place, name = parts(spec)
    if place.endswith(".py") and not os.path.isfile(place):
        raise error_class(f"{flag} {spec}: there is no file {place}; give its path from the directory of the run.")
    try:
        module = _load_file(place) if place.endswith(".py") else importlib.import_module(place)
    except FAILURES as error:
        raise error_class(f"{flag} {spec}: {place} cannot be imported: {in_words(error)}.") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise error_class(f"{flag} {spec}: {place} has no function {name}.")
    return function


def _load_file(place: str) -> Any:
    key = f"{os.path.abspath(place)} {os.stat(place).st_mtime_ns}"
    name = f"megatron_sp_user_{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}"
    if name not in sys.modules:
        description = importlib.util.spec_from_file_location(name, place)
        assert description is not None and description.loader is not None
        module = importlib.util.module_from_spec(description)
        sys.modules[name] = module  # as for any import: dataclasses and pickle look modules up there
        try:
            description.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def in_words(error: BaseException) -> str:
    """Return an exception of a user's function, in one line, with the line of the user's code where it happened."""
    package = os.path.dirname(os.path.abspath(__file__)) + os.sep
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)
              if not frame.filename.startswith((package, "<frozen "))]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}{': ' if said else ''}{said}{where}"
