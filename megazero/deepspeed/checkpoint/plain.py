"""A script's values as JSON and tensors, and back.

Only values that JSON and tensors cannot express are pickled, if the caller allows it. Each is pickled by
itself, so that one that cannot be read back does not affect the others.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from megazero.errors import CheckpointError
from megazero.formats.deepspeed.pickles import dump_object, load_object


def encode(value: object, name: str, tensors: dict[str, Tensor], *, objects: bool = False) -> object:
    """Encode a value as JSON and tensors; `decode` restores it, including tuples and keys that are numbers.

    Args:
        value: None, numbers, text, lists, tuples, mappings, namespaces and tensors.
        name: the name of the value, for errors and for the keys of tensors.
        tensors: receives the tensors by key.
        objects: whether to pickle objects of other classes.

    Raises:
        CheckpointError: the value is of another class, and `objects` is false.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Tensor):
        return {"tensor": _keep(value.detach(), name, tensors)}
    if isinstance(value, (list, tuple)):
        items = [encode(item, f"{name}.{i}", tensors, objects=objects) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, (Mapping, Namespace)):
        # As pairs, because JSON would turn keys that are numbers into text.
        content = vars(value) if isinstance(value, Namespace) else value
        pairs = [
            [
                encode(key, name, tensors, objects=objects),
                encode(item, f"{name}.{key}", tensors, objects=objects),
            ]
            for key, item in content.items()
        ]
        return {"namespace" if isinstance(value, Namespace) else "mapping": pairs}
    if objects:
        return {"object": [_keep(dump_object(value, name), name, tensors), name]}
    raise CheckpointError(
        f"`{name}` must be made of numbers, text, lists, dictionaries and tensors to be saved, but holds a "
        f"{type(value).__name__}; convert or leave it out"
    )


def _keep(tensor: Tensor, name: str, tensors: dict[str, Tensor]) -> str:
    key = f"{name}/state.{len(tensors)}"
    tensors[key] = tensor
    return key


def decode(value: object, tensors: Mapping[str, Tensor]) -> Any:
    """Restore the value that `encode` was given.

    Raises:
        CheckpointError: the value holds a pickled object of a class that is neither known nor trusted.
    """
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "object":
        key, name = content
        return load_object(tensors[key], name)
    if kind == "tuple":
        return tuple(decode(item, tensors) for item in content)
    pairs = {decode(key, tensors): decode(item, tensors) for key, item in content}
    return Namespace(**pairs) if kind == "namespace" else pairs
