"""Errors that are also what DeepSpeed raises there: it asserts, and scripts catch what it raises."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from types import MappingProxyType
from typing import ParamSpec, TypeVar

from megazero.errors import CheckpointError, ConfigError, MegazeroError

P = ParamSpec("P")
R = TypeVar("R")


class AssertedError(MegazeroError, AssertionError):
    """A call out of turn."""


class AssertedConfigError(ConfigError, AssertionError, ValueError):
    """A configuration or an argument that is refused; pydantic's errors there are of `ValueError`."""


class AssertedCheckpointError(CheckpointError, AssertionError):
    """A checkpoint that is not as it must be, or a tag on which ranks differ."""


_KINDS: Mapping[type[MegazeroError], type[MegazeroError]] = MappingProxyType(
    {MegazeroError: AssertedError, ConfigError: AssertedConfigError, CheckpointError: AssertedCheckpointError}
)


def asserts(call: Callable[P, R]) -> Callable[P, R]:
    """A call whose refusals a script may catch as `AssertionError` too."""

    @wraps(call)
    def asserting(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except MegazeroError as error:
            error.__class__ = _KINDS.get(type(error), type(error))
            raise

    return asserting
