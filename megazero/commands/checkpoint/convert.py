"""`megazero checkpoint convert`: rewrite a checkpoint as whole tensors in few files."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

from megazero.checkpoint.disk import Disk
from megazero.checkpoint.folder import iteration_folder
from megazero.checkpoint.locate import one_checkpoint
from megazero.checkpoint.part import WEIGHT, Key
from megazero.checkpoint.reader import CheckpointReader
from megazero.checkpoint.remote.mirror import in_mirror
from megazero.checkpoint.tensor_file import narrowed
from megazero.checkpoint.writer import NAMES, write_checkpoint
from megazero.commands.checkpoint.hf import parse_size
from megazero.commands.checkpoint.stream import changed_tensors
from megazero.commands.outputs import output_run
from megazero.commands.show import one_line, size_text
from megazero.errors import CheckpointError
from megazero.formats.megatron.export import ExportOptions, export_megatron
from megazero.version import VERSION

OURS, TORCH_DIST = "megazero", "torch_dist"
_DTYPES = (("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16))


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the flags of `convert`."""
    parser = verbs.add_parser(
        "convert",
        help="rewrite a checkpoint as whole tensors in few files",
        description="Rewrite a checkpoint with every tensor whole, in as few files as their size allows, and "
        f"an index by which other programs find the weights ({NAMES}). The result is a checkpoint of the "
        "same iteration, which loads as the original does.",
    )
    parser.add_argument(
        "source", metavar="CKPT", help="a checkpoint, or a run's folder, whose newest is taken"
    )
    parser.add_argument(
        "out", metavar="OUT", type=output_run, help="folder of a run for the result, made if missing"
    )
    parser.add_argument(
        "--dtype",
        choices=[name for name, _ in _DTYPES],
        help="type of the weights (default: as stored, which is fp32); from a narrower one, training does "
        "not continue bit for bit",
    )
    parser.add_argument("--weights-only", action="store_true", help="leave out optimizer and random state")
    parser.add_argument(
        *("--max-shard-size", "--shard-size"), default="5GB", help="most tensor bytes per file (default 5GB)"
    )
    parser.add_argument(
        "--format",
        choices=[OURS, TORCH_DIST],
        default=OURS,
        help=f"{TORCH_DIST} writes the model as Megatron-LM reads it, with optimizer state and progress "
        "unless --weights-only (default megazero)",
    )
    parser.set_defaults(run=run, trouble=1)


@dataclass(frozen=True)
class ConvertOptions:
    """The form of the converted checkpoint.

    Attributes:
        dtype: dtype of the weights; None leaves it as stored.
        weights_only: whether to leave out optimizer and random state.
        shard_bytes: the most tensor bytes per file; a larger tensor gets a file of its own.
    """

    dtype: torch.dtype | None = None
    weights_only: bool = False
    shard_bytes: int = 5 * 10**9


def run(flags: argparse.Namespace) -> int:
    """Convert, and print the result."""
    dtype = None if flags.dtype is None else dict(_DTYPES)[flags.dtype]
    if flags.format == TORCH_DIST:
        if in_mirror(flags.out):
            raise CheckpointError(
                f"`OUT` must be a local folder for {TORCH_DIST}, but is {flags.out}; copy it"
            )
        most = parse_size(flags.max_shard_size)
        options = ExportOptions(dtype or torch.float32, not flags.weights_only, most)
        exported = export_megatron(CheckpointReader(one_checkpoint(flags.source)), flags.out, options)
        print(f"wrote  {one_line(exported.folder)}: {exported.tensors} tensors, {size_text(exported.size)}")
        print(
            f"load it with Megatron-LM's --load {one_line(exported.folder.parent)} --ckpt-format torch_dist"
        )
        return 0
    choice = ConvertOptions(dtype, flags.weights_only, parse_size(flags.max_shard_size))
    with CheckpointReader(one_checkpoint(flags.source)) as reader:
        written = CheckpointReader(convert(reader, flags.out, choice))
    print(f"read   {one_line(reader.folder)}")
    size = sum(entry.size for entry in written.directory.files().values())
    files = sum(name.endswith(".safetensors") for name in written.directory.files())
    tensors = f"{len(written.shapes)} tensors in {files} file{'s' * (files != 1)}"
    print(f"wrote  {one_line(written.folder)}: {tensors}, {size_text(size)}")
    return 0


def convert(
    reader: CheckpointReader, directory: Path, choice: ConvertOptions, disk: Disk | None = None
) -> Path:
    """Write the checkpoint to a new folder of `directory`, and return that folder.

    Raises:
        CheckpointError: `directory` has this iteration already or cannot be written, or a weight is too large
            for the dtype.
        DamagedCheckpointError: the original is damaged.
    """
    iteration = reader.manifest.iteration
    if iteration_folder(directory, iteration).exists():
        raise CheckpointError(
            f"`{directory}` must not hold iteration {iteration} yet, but does; name another folder"
        )
    facts = dict(reader.facts)
    facts["converted"] = {
        "megazero": VERSION,
        "dtype": None if choice.dtype is None else str(choice.dtype).removeprefix("torch."),
        "weights_only": choice.weights_only,
    }
    if choice.weights_only:
        facts |= {"scaler": None, "updates": None}
    keys = [key for key in reader.shapes if key.kind == WEIGHT or not choice.weights_only]
    # The files hold weights first, and tensors are read in the order in which they are written.
    keys.sort(key=lambda key: key.kind != WEIGHT)

    def form(key: Key) -> tuple[torch.dtype, tuple[int, ...]]:
        dtype = reader.dtype(key)
        if choice.dtype is not None and key.kind == WEIGHT and dtype.is_floating_point:
            dtype = choice.dtype
        return dtype, reader.shapes[key]

    tensors = changed_tensors(reader, keys, form, lambda key, tensor: narrowed(key, tensor, form(key)[0]))
    return write_checkpoint(directory, iteration, tensors, facts, disk=disk, shard_bytes=choice.shard_bytes)
