"""A user's own function as a metric, and what may come out of one."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import numpy as np

from megazero.data_efficiency.metrics import Metric
from megazero.data_efficiency.samples import Samples
from megazero.errors import DataError

_INT64 = np.iinfo(np.int64)


@dataclass(frozen=True)
class UserMetric:
    """A function of a user's module, `module:function` or `path/to/file.py:function`.

    It is called with a dict of numpy arrays, those of `Samples.as_dict`, and returns integers: [b], one for
    each sample; or, if it accumulates, a vector that is summed over the dataset. Raises DataError if there is
    no such function.
    """

    spec: str
    accumulates: bool = False
    name: str = field(init=False)
    source_hash: str = field(init=False)
    function: Callable[[dict[str, np.ndarray]], object] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        function = load_function(self.spec)
        object.__setattr__(self, "name", self.spec.rpartition(":")[2])
        object.__setattr__(self, "source_hash", _source_hash(function))
        object.__setattr__(self, "function", function)

    def __reduce__(self) -> tuple[type, tuple[str, bool]]:
        """Pickles as the function's name: a process that is started afresh looks it up itself."""
        return type(self), (self.spec, self.accumulates)

    @property
    def identity(self) -> Mapping[str, object]:
        """The function's file is part of it: values of a function that has changed since are made again."""
        return {"metric": self.name, "accumulates": self.accumulates, "source": self.source_hash}

    def measure(self, samples: Samples) -> np.ndarray:
        return self.function(samples.as_dict())


def load_function(spec: str) -> Callable[[dict[str, np.ndarray]], object]:
    """The function that `module:function` or `file.py:function` names. DataError if there is none."""
    place, _, name = spec.rpartition(":")
    if not place or not name.isidentifier():
        raise DataError(f"`metric` must be module:function or file.py:function, but is {spec}; correct it.")
    try:
        module = _module_of_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:
        # A user's module may raise anything while it is imported.
        raise DataError(
            f"`metric` {spec} must be of a module that can be imported, but {place} cannot be "
            f"({type(error).__name__}: {error}); correct the path or the module."
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise DataError(f"`metric` {spec} must name a function, but {place} has no function {name}.")
    return function


def _module_of_file(path: Path) -> ModuleType:
    """The module of a file, with what stands there now: Python's own cache misses a quick edit."""
    text = path.read_bytes()
    where = str(path.resolve())
    module = ModuleType(f"megazero_user_metric_{hashlib.blake2b(where.encode() + text).hexdigest()[:16]}")
    module.__file__ = where
    sys.modules[module.__name__] = module  # where dataclasses and pickles of the module look for it
    try:
        exec(compile(text, where, "exec"), module.__dict__)
    except BaseException:
        del sys.modules[module.__name__]
        raise
    return module


def _source_hash(function: Callable) -> str:
    """Of the file that a function is defined in; empty for one without a file, such as a builtin."""
    try:
        path = inspect.getsourcefile(function)
    except TypeError:
        return ""
    return "" if path is None else hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()


def measured(metric: Metric, samples: Samples) -> np.ndarray:
    """What a metric says of samples, int64, checked.

    Raises DataError if it raises, or returns no integers, or not one for each sample (a vector, if it
    accumulates).
    """
    first, last = int(samples.index[0]), int(samples.index[-1])
    where = f"metric `{metric.name}` on samples {first}..{last}"
    try:
        values = np.asarray(metric.measure(samples))
    except DataError:
        raise
    except Exception as error:
        # A user's function may raise anything; its own line helps more than ours.
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise DataError(
            f"{where} must return numbers, but raised {type(error).__name__}: {error} "
            f"({at.filename}:{at.lineno}); correct the function."
        ) from error
    if values.dtype.kind not in "iu":
        raise DataError(
            f"{where} must return integers, but returned {values.dtype}; round them, for example with "
            "np.round(1000 * values).astype(np.int64)."
        )
    shape = "[any length]" if metric.accumulates else f"[{len(samples.index)}]"
    if values.ndim != 1 or not values.size or (not metric.accumulates and len(values) != len(samples.index)):
        raise DataError(
            f"{where} must return an array of shape {shape}, but returned {list(values.shape)}; "
            + ("it is added up over the dataset." if metric.accumulates else "one integer for each sample.")
        )
    if values.dtype == np.uint64 and int(values.max()) > _INT64.max:
        raise DataError(f"{where} must return integers below 2**63, but returned {int(values.max())}.")
    return values.astype(np.int64, copy=False)


def added(total: np.ndarray | None, values: np.ndarray, name: str) -> np.ndarray:
    """`total` + `values`, both int64 [n]. Raises DataError if their lengths differ or a sum is too large."""
    if total is None:
        return values.copy()
    if total.shape != values.shape:
        raise DataError(
            f"metric `{name}` must return vectors of one length, but returned {total.size} and {values.size} "
            "numbers; give np.bincount a `minlength`."
        )
    result = total + values
    # The sign of a sum of two of one sign differs from theirs only if it did not fit.
    if (((total ^ result) & (values ^ result)) < 0).any():
        raise DataError(f"metric `{name}` must add up to less than 2**63, but does not; scale it down.")
    return result
