"""Errors that a script can also catch as `AssertionError`, as it catches DeepSpeed's assertions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from types import MappingProxyType
from typing import ParamSpec, TypeVar

from megazero.errors import CheckpointError, ConfigError, MegazeroError

P = ParamSpec("P")
R = TypeVar("R")


class AssertedError(MegazeroError, AssertionError):
    """A call at a time when it is not allowed."""


class AssertedConfigError(ConfigError, AssertionError, ValueError):
    """A refused configuration or argument; a `ValueError` too, as DeepSpeed's errors of pydantic are."""


class AssertedCheckpointError(CheckpointError, AssertionError):
    """A checkpoint that cannot be read, or a tag that differs between ranks."""


_KINDS: Mapping[type[MegazeroError], type[MegazeroError]] = MappingProxyType(
    {MegazeroError: AssertedError, ConfigError: AssertedConfigError, CheckpointError: AssertedCheckpointError}
)


def asserts(call: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function whose errors of megazero are to be `AssertionError` too."""

    @wraps(call)
    def asserting(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except MegazeroError as error:
            error.__class__ = _KINDS.get(type(error), type(error))
            raise

    return asserting
