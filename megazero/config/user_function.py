"""A user's own function, named as ``module:function`` or ``path/to/file.py:function``."""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from megazero.errors import MegazeroError
from megazero.regular_file import read_regular


def user_function(spec: str, what: str, error: type[MegazeroError]) -> Callable[..., Any]:
    """Import the function that `spec` names.

    Args:
        spec: ``module:function`` or ``path.py:function``.
        what: the setting that names it, for messages.
        error: the type of error to raise.

    Raises:
        error: `spec` has another form, its module cannot be imported, or there is no such function in it.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name.isidentifier():
        raise error(f"`{what}` must be module:function or path.py:function, but is {spec!r}; correct it")
    try:
        module = _module_of_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Exception as fault:  # a user's module may raise anything while it is imported
        raise error(
            f"`{what}` must name a module that can be imported, but {place} cannot: {type(fault).__name__}: "
            f"{fault}; correct the path or the module"
        ) from fault
    function: object = getattr(module, name, None)
    if not callable(function):
        raise error(f"`{what}` must name a function, but {place} has no function {name}; define it")
    return function


def _module_of_file(path: Path) -> ModuleType:
    """Return the module of a file's present text, made once per text.

    Python's own cache goes by the time of the last edit, and would miss a quick one.
    """
    text, where = read_regular(path), str(path.resolve())
    name = f"megazero_user_{hashlib.blake2b(where.encode() + text, digest_size=8).hexdigest()}"
    if name not in sys.modules:
        module = ModuleType(name)
        module.__file__ = where
        sys.modules[name] = module  # dataclasses and pickles of the module look for it there
        try:
            exec(compile(text, where, "exec"), module.__dict__)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
