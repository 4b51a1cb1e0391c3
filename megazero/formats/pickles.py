"""Reads pickles without running what they name.

A pickle names functions to call, so one of unknown origin can run anything. torch's restricted unpickler
calls only functions that it was allowed. Megatron and DeepSpeed store objects of many classes besides tensors
and arguments. `Inert` stands in for these classes, by name, so none is called or needs to be installed.
"""

from __future__ import annotations

import argparse
import errno
import pickle
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from megazero.errors import CheckpointError, DamagedCheckpointError
from megazero.regular_file import open_regular

# Classes of objects besides tensors and plain values: states of numpy's generators, enums among the
# arguments, loss scalers, Transformer Engine's extra states. numpy 2 has moved `core` to `_core`, and Python
# 3.13 paths to `pathlib._local`.
INERT = (
    *("numpy.ndarray", "numpy.dtype", "numpy.dtypes.UInt32DType"),
    *("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"),
    *("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"),
    *("types.SimpleNamespace", "signal.Signals", "io.BytesIO", "_io.BytesIO"),
    *("pathlib.PosixPath", "pathlib._local.PosixPath"),
    *("megatron.enums.ModelType", "megatron.model.enums.ModelType", "megatron.core.enums.ModelType"),
    *("megatron.core.transformer.enums.AttnBackend", "megatron.core.transformer.enums.CudaGraphScope"),
    "megatron.core.optimizer.optimizer_config.OptimizerConfig",
    *(f"megatron.core.rerun_state_machine.Rerun{name}" for name in ("Diagnostic", "Mode", "State")),
    *("fp16.loss_scaler.LossScaler", "fp16.loss_scaler.DynamicLossScaler"),
    *("megatron.fp16.loss_scaler.LossScaler", "megatron.fp16.loss_scaler.DynamicLossScaler"),
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
)
SafeGlobal = Callable[..., Any] | tuple[Any, str]
"""A function or class that torch's unpickler may call under its own name, or (function, another name)."""

Saved = Mapping[str, Any]
"""A mapping out of a file of `torch.save`, whose values may be anything."""
_ZIP = b"PK\x03\x04"
_NAMED = re.compile(r"GLOBAL ([\w.]+)")
# Before this, torch's message advises to load the file without restrictions.
_REASON = re.compile(r"WeightsUnpickler error:\s*")


class Inert:
    """Stands in for an object that is not needed: accepts any arguments and state, and keeps nothing."""

    def __new__(cls, *arguments: object) -> Inert:
        return super().__new__(cls)

    def __init__(self, *arguments: object):
        pass

    def __setstate__(self, state: object) -> None:
        pass

    def __repr__(self) -> str:
        return "an object that is not read"


class KeptState:
    """Stands in for an object of a class that is not installed, and keeps its state as attributes."""

    def __new__(cls, *arguments: object) -> KeptState:
        return super().__new__(cls)

    def __init__(self, *arguments: object):
        self.arguments = arguments

    def __setstate__(self, state: object) -> None:
        if isinstance(state, Mapping):
            self.__dict__.update(state)


_SCALER = "deepspeed.runtime.fp16.loss_scaler."
KEPT = (
    *((KeptState, _SCALER + name) for name in ("LossScalerBase", "LossScaler", "DynamicLossScaler")),
    (KeptState, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (KeptState, "deepspeed.utils.tensor_fragment.fragment_address"),
    (KeptState, "deepspeed.runtime.zero.offload_config.OffloadDeviceEnum"),
)
"""The classes of objects in the files of DeepSpeed's optimizers."""


class PositionEmbedding(Enum):
    """BigScience's ``megatron.enums.PositionEmbeddingType``, which is pickled by number."""

    rotary = 1
    absolute = 2
    alibi = 3


def load_pickle(
    path: Path,
    inert: Iterable[str] = (),
    known: Iterable[SafeGlobal] = (),
    remedy: str = "if it is a class whose objects are not needed, add `--inert-class {}`",
) -> object:
    """Return the object in a file of `torch.save`; tensors are memory-mapped where the format allows it.

    Args:
        path: the file.
        inert: further classes, by full name, whose objects are not needed.
        known: further functions and classes that may be called; these take precedence.
        remedy: the message's advice about a class that is not allowed, with `{}` for its name.

    Raises:
        CheckpointError: the file names a class or function that is not allowed, which was not called.
        DamagedCheckpointError: the file is missing or cannot be read.
    """
    try:
        with open_regular(path) as file:
            mapped = file.read(len(_ZIP)) == _ZIP  # files from before torch 1.6 are no archives to map
        with _allowing([*{_name(entry): entry for entry in (*_allowed(inert), *known)}.values()]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        named = _NAMED.search(str(error))
        if named is None:
            raise unreadable(path, "be a file of torch.save", error) from error
        name = named[1] if "." in named[1] else f"builtins.{named[1]}"
        raise CheckpointError(
            f"`{path}` must hold only tensors and plain values, but names {name}, which was not called; "
            + remedy.format(name)
        ) from error
    except Exception as error:  # a damaged pickle can fail in any way
        raise unreadable(path, "be a file of torch.save", error) from error


def reason_of(error: Exception) -> str:
    """The reason why a file could not be read, without torch's advice to lift the restrictions."""
    if isinstance(error, pickle.UnpicklingError):
        return _REASON.split(str(error))[-1].partition("\n")[0]
    return f"{type(error).__name__}: {error}"


@contextmanager
def parsed(path: Path, what: str) -> Iterator[None]:
    """Turn any exception of the block, which takes a file's content apart, into a refusal of the file.

    Raises:
        DamagedCheckpointError: the block raised; the message says that the file must hold `what`.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise unreadable(path, f"hold {what}", error) from error


@contextmanager
def _allowing(allowed: list[SafeGlobal]) -> Iterator[None]:
    """Let torch call only these functions: what other libraries have allowed must not replace `Inert`."""
    others = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(allowed)
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(others)


def _name(allowed: SafeGlobal) -> str:
    """The name under which a pickle asks for a function."""
    return allowed[1] if isinstance(allowed, tuple) else f"{allowed.__module__}.{allowed.__qualname__}"


def unreadable(path: Path, what: str, error: Exception) -> CheckpointError:
    """The error for a file that could not be read: it is damaged, unless memory was exhausted."""
    out_of_it = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if out_of_it or isinstance(error, MemoryError) or "allocate memory" in str(error):
        return CheckpointError(
            f"`{path}` must be read into memory, but there is too little ({reason_of(error)}); free some, or "
            "raise `ulimit -v`"
        )
    return DamagedCheckpointError(
        f"`{path}` must {what}, but cannot be read: {reason_of(error)}; copy it again"
    )


def _allowed(inert: Iterable[str]) -> list[SafeGlobal]:
    positions = [f"megatron.{module}.PositionEmbeddingType" for module in ("enums", "model.enums")]
    return [
        argparse.Namespace,
        *((Inert, name) for name in (*INERT, *inert)),
        *((PositionEmbedding, name) for name in positions),
        # Some versions of Python 3.11 store signals by their own names.
        *((Inert(), f"signal.{number.name}") for number in signal.Signals),
        (_member, "builtins.getattr"),
    ]


def _member(owner: object, name: str) -> PositionEmbedding | Inert:
    """Stand in for `getattr`, by which some versions of Python pickle members of enums."""
    return PositionEmbedding[name] if owner is PositionEmbedding else Inert()
