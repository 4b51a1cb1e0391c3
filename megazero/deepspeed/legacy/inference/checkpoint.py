"""Weights for a model from the files of a checkpoint, one tensor at a time, each rank taking its slice."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from megazero.deepspeed.tensor_parallel.layers import fill
from megazero.errors import CheckpointError
from megazero.formats.deepspeed.pickles import load_states
from megazero.formats.pickles import parsed
from megazero.mpu.group import Group
from megazero.regular_file import read_regular_text

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WHOLE = ("model.safetensors", "pytorch_model.bin")


def checkpoint_files(checkpoint: str | Mapping[str, Any], base_dir: str = "") -> list[Path]:
    """The files of a checkpoint.

    Args:
        checkpoint: a folder of Hugging Face's layout, a file of weights, or a description (a dict, or the
            path of a JSON) with `checkpoints`, a list of files.
        base_dir: where the files of a description lie, unless it says so itself.

    Raises:
        CheckpointError: there are none, or they hold slices.
    """
    folder = Path(base_dir) if base_dir else Path()
    if isinstance(checkpoint, str):
        path = Path(checkpoint)
        if path.is_dir():
            return _in_folder(path)
        if not path.is_file():
            raise CheckpointError(
                f"`checkpoint` must be a folder or a file, but {path} is none; correct the path"
            )
        if path.suffix != ".json":
            return [path]
        folder = folder if base_dir else path.parent
        with parsed(path, "a list of files"):
            checkpoint = json.loads(read_regular_text(path))
            if isinstance(checkpoint, Mapping) and "weight_map" in checkpoint:
                return sorted({path.parent / name for name in checkpoint["weight_map"].values()})
    if not isinstance(checkpoint, Mapping) or not isinstance(checkpoint.get("checkpoints"), list):
        raise CheckpointError(
            "`checkpoint` must list the files of whole weights as `checkpoints`, but does not; give a "
            "list, or "
            "the folder that `save_pretrained` wrote"
        )
    if checkpoint.get("parallelization", "pp") == "tp" or checkpoint.get("tp_size", 1) not in (None, 1):
        raise CheckpointError(
            "`checkpoint` must hold whole weights, but says that it holds slices (`parallelization` tp or a "
            "`tp_size`); give the files from which they were made"
        )
    folder = Path(checkpoint.get("base_dir") or folder)
    return [folder / name for name in checkpoint["checkpoints"]]


def _in_folder(folder: Path) -> list[Path]:
    for name in _INDEXES:
        if (folder / name).is_file():
            with parsed(folder / name, "an index of weights"):
                weights = json.loads(read_regular_text(folder / name))["weight_map"]
                return sorted({folder / file for file in weights.values()})
    for name in _WHOLE:
        if (folder / name).is_file():
            return [folder / name]
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin"), *folder.glob("*.pt")])
    if not files:
        raise CheckpointError(
            f"`{folder}` must hold weights (.safetensors, .bin or .pt), but has none; give the folder that "
            "`save_pretrained` wrote"
        )
    return files


def _tensors(path: Path) -> Generator[tuple[str, Tensor], None, None]:
    """Name and value of each tensor in a file, read as `load_states` does."""
    with parsed(path, "weights"):
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                yield from ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118  # no dict
        else:
            state = load_states(path)
            for name, value in state.get("module", state).items():
                if isinstance(value, Tensor):
                    yield name, value


def load_weights(model: nn.Module, files: list[Path], group: Group) -> None:
    """Fill a model, sliced or whole, with the weights of files.

    Args:
        model: its parameters have memory.
        files: of whole weights; each weight lies in one of them.
        group: the ranks that the model is sliced over.

    Raises:
        CheckpointError: a file is damaged, or a weight of the model is in none.
    """
    state = model.state_dict(keep_vars=True)
    prefix = getattr(model, "base_model_prefix", "")
    done: set[int] = set()
    for path in files:
        with closing(_tensors(path)) as tensors:
            for name, value in tensors:
                known = _known(name, state, prefix)
                if known is not None:
                    _fill(model, known, value, group, path)
                    done.add(id(state[known]))
    missing = [name for name, value in state.items() if isinstance(value, Tensor) and id(value) not in done]
    if missing:
        raise CheckpointError(
            f"`checkpoint` must hold all weights of the model, but lacks {len(missing)}, such as "
            f"{missing[0]}; "
            "if it is of an older layout, load it with `from_pretrained` and leave `checkpoint` out"
        )


def _known(name: str, state: Mapping[str, Any], prefix: str) -> str | None:
    """The model's name of a weight, which may lack or have the name of the model without a head."""
    names = (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}."))
    return next((known for known in names if known in state), None)


def _fill(model: nn.Module, name: str, value: Tensor, group: Group, path: Path) -> None:
    try:
        fill(model, name, value, group)
    except RuntimeError as error:
        raise CheckpointError(f"`{name}` of {path} does not fit the model: {error}") from error


def give_memory(model: nn.Module, device: torch.device) -> None:
    """Give a model on the meta device memory, and its buffers that no checkpoint holds their values.

    Raises:
        CheckpointError: such a buffer has no way to be made again.
    """
    kept = model.state_dict().keys()
    empty = [
        (path, module)
        for path, module in model.named_modules()
        if any(
            buffer.is_meta and f"{path}.{name}".lstrip(".") not in kept
            for name, buffer in module.named_buffers(recurse=False)
        )
    ]
    for module in model.modules():  # only what is on the meta device: the rest has values
        for param in module.parameters(recurse=False):
            if param.is_meta:
                value = torch.empty_like(param, device=device)
                twin = nn.Parameter(value, param.requires_grad)
                twin.__dict__.update(param.__dict__)
                torch.utils.swap_tensors(param, twin)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device).fill_(float("nan"))
    for path, module in empty:
        initialize: Any = getattr(model, "_init_weights", None)
        if initialize is not None:
            with torch.no_grad():
                initialize(module)
        for name, buffer in module.named_buffers(recurse=False):
            if f"{path}.{name}".lstrip(".") not in kept and buffer.isnan().any():
                raise CheckpointError(
                    f"`{path}.{name}` must have values, but is on the meta device and in no checkpoint; "
                    "build the "
                    "model on the CPU"
                )
