"""Pickles in the checkpoints of DeepSpeed's users, read without running what they name.

torch's restricted unpickler reads tensors, plain values and the classes below. A file that names anything
else is refused by that name, unless the environment has ``MEGAZERO_TRUST_PICKLE=1``: whoever wrote such a
file can run any code in the process that loads it. The switch is in the environment because it must also
reach loads inside other libraries.
"""

from __future__ import annotations

import io
import os
import pathlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megazero.errors import CheckpointError, DamagedCheckpointError
from megazero.formats.pickles import KEPT, SafeGlobal, load_pickle, parsed, reason_of

TRUST = "MEGAZERO_TRUST_PICKLE"
REMEDY = f"if you trust who wrote it, set {TRUST}=1 in the environment, which lets it run any code"


def trusts_pickle() -> bool:
    """Whether the environment lets pickles run what they name."""
    return os.environ.get(TRUST, "") not in ("", "0")


def load_states(path: Path) -> Any:
    """The object in one of DeepSpeed's files.

    Raises:
        CheckpointError: the file names a class that is not known, which was not called.
        DamagedCheckpointError: the file cannot be read.
    """
    if not trusts_pickle():
        return load_pickle(path, known=_known(), remedy=REMEDY)
    with parsed(path, "what torch can load"):
        return torch.load(path, map_location="cpu", weights_only=False)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Copy nested lists, tuples and dictionaries, with their tensors on `device`.

    `torch.save` writes the whole storage behind a view; a copy has a storage of its own size.
    """
    if isinstance(item, Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, (list, tuple)):
        cloned = [clone_tensors_for_torch_save(entry, device) for entry in item]
        if hasattr(item, "_fields"):  # a named tuple
            return type(item)(*cloned)
        return type(item)(cloned)
    if isinstance(item, dict):
        pairs = ((key, clone_tensors_for_torch_save(value, device)) for key, value in item.items())
        return type(item)(pairs) if type(item) is not dict else dict(pairs)
    return item


def dump_object(value: object, name: str) -> torch.Tensor:
    """Pickle an object of any class into a tensor of bytes; `name` is for messages.

    Raises:
        CheckpointError: the object cannot be pickled.
    """
    file = io.BytesIO()
    try:
        torch.save(value, file)
    except Exception as error:  # an object's own code runs here, and may raise anything
        raise CheckpointError(
            f"`{name}` must be an object that can be pickled to be saved, but is a {type(value).__name__}: "
            f"{error}; convert or leave it out"
        ) from error
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def load_object(content: torch.Tensor, name: str) -> object:
    """Unpickle the object that `dump_object` was given.

    Raises:
        CheckpointError: the object is of an unknown class, and the environment does not trust pickles.
    """
    file = io.BytesIO(content.numpy().tobytes())
    try:
        with torch.serialization.safe_globals(_known()):
            return torch.load(file, map_location="cpu", weights_only=not trusts_pickle())
    except pickle.UnpicklingError as error:
        named = str(error).partition("GLOBAL ")[2].partition(" ")[0] or "unknown"
        raise CheckpointError(
            f"`{name}` must hold only plain values and tensors, but holds an object of another class "
            f"({named}), which was not made; {REMEDY}"
        ) from error
    except Exception as error:  # a damaged pickle can fail in any way
        raise DamagedCheckpointError(f"`{name}` must be what torch can load: {reason_of(error)}") from error


def _known() -> list[SafeGlobal]:
    """Classes whose construction runs no code that a file could choose."""
    arrays = (np.ndarray, np.dtype, *(kind for kind in vars(np.dtypes).values() if isinstance(kind, type)))
    rebuild = np._core if hasattr(np, "_core") else np.core
    return [
        *arrays,
        rebuild.multiarray._reconstruct,
        rebuild.multiarray.scalar,
        (rebuild.multiarray._reconstruct, "numpy.core.multiarray._reconstruct"),
        (rebuild.multiarray.scalar, "numpy.core.multiarray.scalar"),
        pathlib.PosixPath,
        (pathlib.PosixPath, "pathlib._local.PosixPath"),
        *KEPT,
    ]
