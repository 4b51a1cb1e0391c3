"""Write the whole fp32 weights of a checkpoint to one or several files: DeepSpeed's ``zero_to_fp32``.

Reads the checkpoints of `DeepSpeedEngine.save_checkpoint` and DeepSpeed's own. The script that is saved
beside a checkpoint calls `main`, as does ``python -m megazero.deepspeed.zero_to_fp32``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor, nn

from megazero.checkpoint.part import Key
from megazero.checkpoint.tensor_file import Later
from megazero.checkpoint.writer import deal
from megazero.deepspeed.checkpoint.saved import Saved, open_saved
from megazero.deepspeed.checkpoint.tags import newest_tag
from megazero.deepspeed.weights_file import write_weights
from megazero.errors import CheckpointError, ConfigError, exit_status
from megazero.formats.deepspeed.files import find_files, inventory

SCRIPTS: Mapping[str, str] = MappingProxyType(
    {"zero_to_fp32.py": "main", "zero_to_torch.py": "main_of_torch"}
)
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        **dict.fromkeys(("fp32", "float32"), torch.float32),
        **dict.fromkeys(("fp16", "float16"), torch.float16),
        **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
    }
)


class LazyState(Mapping[str, Tensor]):
    """A state dict that reads a tensor from the checkpoint each time that it is looked up.

    Args:
        saved: the checkpoint.
        exclude_frozen: leave out frozen parameters.
        dtype: the type of floating-point weights; floating-point buffers are fp32.
    """

    def __init__(self, saved: Saved, exclude_frozen: bool, dtype: torch.dtype = torch.float32):
        self._saved, self._dtype = saved, dtype
        frozen = set(saved.names.frozen) if exclude_frozen else set()
        names = saved.weight_names() - frozen
        aliases = {alias for alias, name in saved.names.shared.items() if name in names}
        self._names = sorted(names | aliases)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        value = self._saved.source.tensor(Key(self._saved.names.shared.get(name, name))).detach()
        if not value.is_floating_point():
            return value
        return value.to(torch.float32 if name in self._saved.names.buffers else self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @property
    def first_names(self) -> dict[str, str]:
        """Name -> the first name of the same tensor, which differs for the others of a tied parameter."""
        return {name: self._saved.names.shared.get(name, name) for name in self._names}

    def later(self, name: str) -> Later:
        """Describe a tensor, which is read again when it is written."""
        value = self[name]
        return Later(value.dtype, tuple(value.shape), partial(self.__getitem__, name))

    def whole(self) -> dict[str, Tensor]:
        """All tensors; the names of a tied parameter share one tensor."""
        firsts = self.first_names
        tensors = {first: self[first] for first in dict.fromkeys(firsts.values())}
        return {name: tensors[first] for name, first in firsts.items()}


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> Mapping[str, Tensor]:
    """Read the whole fp32 weights of a checkpoint, on the CPU.

    Args:
        checkpoint_dir: the folder given to `save_checkpoint`.
        tag: by default the tag in ``latest``.
        exclude_frozen_parameters: leave out frozen parameters.
        lazy_mode: return a `LazyState`, so that not all tensors need to fit into memory.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be read.
    """
    state = LazyState(_open(checkpoint_dir, tag), exclude_frozen_parameters)
    return state if lazy_mode else state.whole()


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Move a model to the CPU and load a checkpoint's fp32 weights into it; returns the model.

    Missing and unexpected names are a warning and no error, as in DeepSpeed.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be read.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    result = model.cpu().load_state_dict(dict(state), strict=False)
    missing, unexpected = (", ".join(names[:5]) for names in (result.missing_keys, result.unexpected_keys))
    if missing or unexpected:
        warnings.warn(
            f"{checkpoint_dir} lacks weights of the model ({missing or 'none'}) or has others "
            f"({unexpected or 'none'})",
            stacklevel=2,
        )
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write a checkpoint's whole fp32 weights to a folder: one file, or several with an index.

    Args:
        checkpoint_dir: the folder given to `save_checkpoint`.
        output_dir: the folder for ``pytorch_model.bin`` or ``model.safetensors``.
        max_shard_size: the largest size of a file, such as ``5GB``; None writes one file.
        safe_serialization: write safetensors instead of torch's format.
        tag: by default the tag in ``latest``.
        exclude_frozen_parameters: leave out frozen parameters.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be read.
    """
    state = LazyState(_open(checkpoint_dir, tag), exclude_frozen_parameters)
    write_shards(state, Path(output_dir), max_shard_size, safe_serialization)


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    dtype: str | torch.dtype = torch.float32,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Like `convert_zero_checkpoint_to_fp32_state_dict`, with weights in the type `dtype`.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be read.
        ConfigError: `dtype` is not one of `DTYPES`.
    """
    chosen = dtype if isinstance(dtype, torch.dtype) else DTYPES.get(dtype)
    if chosen is None:
        raise ConfigError(f"`dtype` must be one of {', '.join(DTYPES)}, but is {dtype}")
    state = LazyState(_open(checkpoint_dir, tag), exclude_frozen_parameters, chosen)
    write_shards(state, Path(output_dir), max_shard_size, safe_serialization)


def write_shards(
    state: LazyState, folder: Path, largest: str | int | None, safe_serialization: bool = False
) -> None:
    """Write a state dict to files of at most `largest` bytes; a larger tensor gets a file of its own."""
    limit = sys.maxsize if largest is None else parse_size(largest)
    stem, suffix = ("model", ".safetensors") if safe_serialization else ("pytorch_model", ".bin")
    laters = {name: state.later(name) for name in state}
    sizes = {name: math.prod(later.shape) * later.dtype.itemsize for name, later in laters.items()}
    shards = deal(sizes, sizes.__getitem__, limit)
    if len(shards) < 2:
        distinct = dict.fromkeys(state.first_names.values())
        tensors = [(name, laters[name]) for name in distinct]
        write_weights(folder / f"{stem}{suffix}", tensors, state.first_names)
        return
    files: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        path = folder / f"{stem}-{number:05d}-of-{len(shards):05d}{suffix}"
        write_weights(path, [(name, laters[name]) for name in names], {name: name for name in names})
        files |= dict.fromkeys(names, path.name)
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": files}
    (folder / f"{stem}{suffix}.index.json").write_text(json.dumps(index, indent=2) + "\n")


def get_model_state_file(checkpoint_dir: str | os.PathLike[str], zero_stage: int) -> str:
    """The model's first file in a tag's folder that DeepSpeed wrote.

    Raises:
        CheckpointError: there is none.
    """
    files = find_files(Path(checkpoint_dir))
    name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if zero_stage == 3 else "mp_rank_00_model_states.pt"
    result = None if files is None else files.model.get((0, 0))
    if result is None or (result.name == "mp_rank_00_model_states.pt") != (zero_stage != 3):
        raise _no_file(checkpoint_dir, name)
    return str(result)


def get_optim_files(checkpoint_dir: str | os.PathLike[str]) -> list[str]:
    """The optimizer's files in a tag's folder that DeepSpeed wrote, in the order of ranks.

    Raises:
        CheckpointError: there is none.
    """
    files = find_files(Path(checkpoint_dir))
    if files is not None and files.optimizer:
        order = sorted(files.optimizer, key=lambda key: (key[1], key[0]))
        return [str(files.optimizer[key]) for key in order]
    named = [str(path) for path in Path(checkpoint_dir).glob("*_optim_states.pt")]
    if not named:
        raise _no_file(checkpoint_dir, "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    return sorted(named, key=lambda name: [int(part) for part in re.findall(r"\d+", Path(name).name)])


def _no_file(folder: str | os.PathLike[str], name: str) -> CheckpointError:
    return CheckpointError(
        f"`{folder}` must hold {name}, which DeepSpeed writes, but has {inventory(Path(folder))}; megazero's "
        "own checkpoints are read with get_fp32_state_dict_from_zero_checkpoint"
    )


def parse_size(size: str | int) -> int:
    """Parse a size such as ``5GB`` (decimal) or ``5GiB`` (binary) to bytes.

    Raises:
        ConfigError: it is no such size.
    """
    text = str(size).strip().upper()
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?", text)
    if match is None or not float(match[1]):
        raise ConfigError(f"`max_shard_size` must be a size such as 5GB, but is {size!r}")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " "))


def write_scripts(folder: Path) -> None:
    """Write the scripts `zero_to_fp32.py` and `zero_to_torch.py` beside a checkpoint."""
    for name, function in SCRIPTS.items():
        (folder / name).write_text(
            f'"""Whole weights from the checkpoint beside this file: python {name} FOLDER OUTPUT"""\n'
            f"from megazero.deepspeed.zero_to_fp32 import {function}\n\n{function}()\n"
        )


def main(words: Sequence[str] | None = None) -> None:
    """The command line of ``zero_to_fp32.py``."""
    _run(_parser("zero_to_fp32.py").parse_args(words), "fp32")


def main_of_torch(words: Sequence[str] | None = None) -> None:
    """The command line of ``zero_to_torch.py``."""
    parser = _parser("zero_to_torch.py")
    parser.add_argument("--dtype", required=True, choices=sorted(DTYPES), help="the type of the weights")
    arguments = parser.parse_args(words)
    _run(arguments, arguments.dtype)


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=name, description="Whole weights from a checkpoint.")
    parser.add_argument("checkpoint_dir", help="the folder given to save_checkpoint")
    parser.add_argument("output_dir", help="the folder for the weights")
    parser.add_argument("--max_shard_size", default="5GB", help="the largest size of a file (5GB)")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", help="the checkpoint; default: the one that `latest` names")
    parser.add_argument(
        "--exclude_frozen_parameters", action="store_true", help="leave out parameters that were not trained"
    )
    parser.add_argument("-d", "--debug", action="store_true", help="print the name and shape of each tensor")
    return parser


def _run(arguments: argparse.Namespace, dtype: str) -> None:
    def work() -> None:
        saved = _open(arguments.checkpoint_dir, arguments.tag)
        state = LazyState(saved, arguments.exclude_frozen_parameters, DTYPES[dtype])
        for name in state if arguments.debug else ():
            print(f"{name} {list(state[name].shape)}")
        write_shards(
            state, Path(arguments.output_dir), arguments.max_shard_size, arguments.safe_serialization
        )
        print(f"{len(state)} tensors in {arguments.output_dir}")

    if status := exit_status(work):
        raise SystemExit(status)


def _open(checkpoint_dir: str | os.PathLike[str], tag: object) -> Saved:
    folder = Path(checkpoint_dir)
    chosen = newest_tag(folder) if tag is None else str(tag)
    if chosen is None:
        raise CheckpointError(
            f"`{folder / 'latest'}` must name the checkpoint, but is missing; {folder} has "
            f"{inventory(folder)}; correct the path or give a tag"
        )
    return open_saved(folder / chosen)


if __name__ == "__main__":
    main()
