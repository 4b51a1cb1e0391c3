"""A user's function as a metric, and checks of the values that metrics return."""

from __future__ import annotations

import hashlib
import inspect
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megazero.config.user_function import user_function
from megazero.data_efficiency.metrics import SampleMetric, Samples
from megazero.errors import DataError

_INT64 = np.iinfo(np.int64)


@dataclass(frozen=True)
class UserMetric:
    """A function given as `module:function` or `path/to/file.py:function`.

    It is called with the arrays of `Samples.as_dict` and returns integers: [b], one for each sample; or, if
    it accumulates, a vector that is summed over the dataset. Raises DataError if there is no such function.
    """

    spec: str
    accumulates: bool = False
    name: str = field(init=False)
    source_hash: str = field(init=False)
    function: Callable[[dict[str, np.ndarray]], object] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        function = user_function(self.spec, "metric", DataError)
        object.__setattr__(self, "name", self.spec.rpartition(":")[2])
        object.__setattr__(self, "source_hash", _source_hash(function))
        object.__setattr__(self, "function", function)

    def __reduce__(self) -> tuple[type, tuple[str, bool]]:
        """Pickle the function's name, by which another process imports it."""
        return type(self), (self.spec, self.accumulates)

    @property
    def identity(self) -> Mapping[str, object]:
        """The identity, with a hash of the function's file, so that an edit invalidates old values."""
        return {"metric": self.name, "accumulates": self.accumulates, "source": self.source_hash}

    def measure(self, samples: Samples) -> np.ndarray:
        return np.asarray(self.function(samples.as_dict()))


_: type[SampleMetric] = UserMetric


def _source_hash(function: Callable[..., object]) -> str:
    """A hash of the file that defines a function; empty for a builtin, which has no file."""
    try:
        path = inspect.getsourcefile(function)
    except TypeError:
        return ""
    return "" if path is None else hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()


def measured(metric: SampleMetric, samples: Samples) -> np.ndarray:
    """Measure samples and check the values, int64.

    Raises DataError if the metric raises, if it does not return integers, or if their shape is wrong.
    """
    first, last = int(samples.index[0]), int(samples.index[-1])
    where = f"metric `{metric.name}` on samples {first}..{last}"
    try:
        values = np.asarray(metric.measure(samples))
    except DataError:
        raise
    except Exception as error:
        # A user's function may raise anything; the message names the line in it.
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
    checked: np.ndarray = values.astype(np.int64, copy=False)
    return checked


def added(total: np.ndarray | None, values: np.ndarray, name: str) -> np.ndarray:
    """`total` + `values`, both int64 [n]. Raises DataError if their lengths differ or a sum is too large."""
    if total is None:
        return values.copy()
    if total.shape != values.shape:
        raise DataError(
            f"metric `{name}` must return vectors of one length, but returned {total.size} and {values.size} "
            "numbers; give np.bincount a `minlength`."
        )
    result: np.ndarray = total + values
    # The sum overflowed if its sign differs from the signs of both summands.
    if (((total ^ result) & (values ^ result)) < 0).any():
        raise DataError(f"metric `{name}` must add up to less than 2**63, but does not; scale it down.")
    return result
