"""Loading a checkpoint into a model, one tensor at a time; each rank keeps its slice."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
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
    """Return the files of a checkpoint.

    Args:
        checkpoint: a Hugging Face folder, a file of weights, or a description (a dict or the path of a JSON)
            with `checkpoints`, a list of files.
        base_dir: the folder of the files in a description without `base_dir`.

    Raises:
        CheckpointError: there are no files, or they hold slices.
    """
    folder = Path(base_dir) if base_dir else Path()
    if isinstance(checkpoint, str):
        path = Path(checkpoint)
        if path.is_dir():
            return _in_folder(path)
        if not path.is_file():
            raise CheckpointError(
                f"`checkpoint` must be a folder or a file, but {path} is neither; correct the path"
            )
        if path.suffix != ".json":
            return [path]
        folder = folder if base_dir else path.parent
        with parsed(path, "a list of files"):
            checkpoint = json.loads(read_regular_text(path))
            if isinstance(checkpoint, Mapping) and "weight_map" in checkpoint:
                return _files_of_index(checkpoint, path.parent)
    if not isinstance(checkpoint, Mapping) or not isinstance(checkpoint.get("checkpoints"), list):
        raise CheckpointError(
            "`checkpoint` must list the files of whole weights as `checkpoints`, but does not; give a list, "
            "or the folder that `save_pretrained` wrote"
        )
    if checkpoint.get("parallelization", "pp") == "tp" or checkpoint.get("tp_size", 1) not in (None, 1):
        raise CheckpointError(
            "`checkpoint` must hold whole weights, but says that it holds slices (`parallelization` tp or a "
            "`tp_size`); give the files that were sliced"
        )
    folder = Path(checkpoint.get("base_dir") or folder)
    return [folder / name for name in checkpoint["checkpoints"]]


def _in_folder(folder: Path) -> list[Path]:
    for name in _INDEXES:
        if (folder / name).is_file():
            with parsed(folder / name, "an index of weights"):
                return _files_of_index(json.loads(read_regular_text(folder / name)), folder)
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


def _files_of_index(index: Mapping[str, Any], folder: Path) -> list[Path]:
    return sorted({folder / name for name in index["weight_map"].values()})


def _tensors(path: Path) -> Generator[tuple[str, Tensor], None, None]:
    """Yield the name and the value of each tensor in a file."""
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
    """Load whole weights from files into a model, which may be sliced.

    Args:
        model: the model, not on the meta device.
        files: the files, which together hold every weight.
        group: the ranks that the model is sliced over.

    Raises:
        CheckpointError: a file is damaged, or a weight of the model is missing.
    """
    state = model.state_dict(keep_vars=True)
    prefix = getattr(model, "base_model_prefix", "")
    done: set[int] = set()
    for path in files:
        with closing(_tensors(path)) as tensors:
            for name, value in tensors:
                own = _own_name(name, state, prefix)
                if own is None:
                    continue
                try:
                    fill(model, own, value, group)
                except RuntimeError as error:
                    raise CheckpointError(f"`{own}` of {path} does not fit the model: {error}") from error
                done.add(id(state[own]))
    missing = [name for name, value in state.items() if isinstance(value, Tensor) and id(value) not in done]
    if missing:
        raise CheckpointError(
            f"`checkpoint` must hold all weights of the model, but lacks {len(missing)}, such as "
            f"{missing[0]}; if it has an older layout, load it with `from_pretrained` and leave `checkpoint` "
            "out"
        )


def _own_name(name: str, state: Mapping[str, Tensor], prefix: str) -> str | None:
    """The model's name of a weight: transformers adds or drops the base model's prefix; None if unknown."""
    names = (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}."))
    return next((own for own in names if own in state), None)


def give_memory(model: nn.Module, device: torch.device) -> None:
    """Materialize a model on the meta device; the model's `_init_weights` recomputes non-persistent buffers.

    Raises:
        CheckpointError: `_init_weights` leaves such a buffer without values.
    """
    saved = model.state_dict().keys()
    incomplete = [
        (path, module)
        for path, module in model.named_modules()
        if any(
            buffer.is_meta and f"{path}.{name}".lstrip(".") not in saved
            for name, buffer in module.named_buffers(recurse=False)
        )
    ]
    for module in model.modules():
        for param in module.parameters(recurse=False):
            if param.is_meta:
                value = torch.empty_like(param, device=device)
                twin = nn.Parameter(value, param.requires_grad)
                twin.__dict__.update(param.__dict__)
                torch.utils.swap_tensors(param, twin)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device).fill_(float("nan"))
    initialize: Callable[[nn.Module], None] | None = getattr(model, "_init_weights", None)
    for path, module in incomplete:
        if initialize is not None:
            with torch.no_grad():
                initialize(module)
        for name, buffer in module.named_buffers(recurse=False):
            if f"{path}.{name}".lstrip(".") not in saved and buffer.isnan().any():
                raise CheckpointError(
                    f"`{path}.{name}` must have values, but is on the meta device and in no checkpoint; "
                    "build the model on the CPU"
                )
