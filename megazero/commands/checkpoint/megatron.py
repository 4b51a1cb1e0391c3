"""The command `megazero checkpoint import-megatron`: make a checkpoint from one of Megatron's."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from megazero.checkpoint.box import Box
from megazero.checkpoint.part import WEIGHT
from megazero.commands.outputs import output_run
from megazero.config.fields import names_with
from megazero.config.tree.roles import Role
from megazero.config.tree.tokenizer import TokenizerConfig
from megazero.errors import ConfigError, exit_status
from megazero.formats.megatron.convert import import_megatron
from megazero.formats.megatron.folder import CheckpointForm
from megazero.formats.megatron.reader import ImportOptions, MegatronReader
from megazero.regular_file import read_regular_text

_TOKENIZER_FLAGS = ("tokenizer_type", *names_with(Role.FILE, "tokenizer"))


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command's flags."""
    parser = argparse.ArgumentParser(
        prog="megazero checkpoint import-megatron",
        description="Import the weights of a GPT or BERT from a checkpoint of Megatron-LM or "
        "Megatron-DeepSpeed, of any tensor- and pipeline-parallel sizes, into a megazero checkpoint, which "
        "loads on any layout.",
    )
    parser.add_argument(
        "source", metavar="SRC", help="a run's folder, whose newest checkpoint is taken, or one checkpoint's"
    )
    parser.add_argument("out", metavar="OUT", type=output_run, help="run folder for the new checkpoint")
    parser.add_argument(
        "--trust-pickle",
        action="store_true",
        help="required, because the files are pickles, which can name any function; only those that make "
        "tensors are called",
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        help="entries of the vocabulary before padding; default: the tokenizer's",
    )
    parser.add_argument(
        "--megatron-args",
        metavar="FILE",
        help="JSON object of Megatron's arguments, to add to those in the checkpoint or to correct them",
    )
    parser.add_argument(
        "--average-replicas",
        action="store_true",
        help="take the mean if copies of a tensor differ over the tensor-parallel ranks",
    )
    parser.add_argument(
        "--with-optimizer",
        action="store_true",
        help="take masters, Adam's moments, iteration and consumed samples too, so that a run goes on where "
        "Megatron stopped",
    )
    parser.add_argument(
        "--inert-class",
        action="append",
        default=[],
        metavar="NAME",
        help="full name of a class whose objects in the files are not needed; may be given several times",
    )
    for name in _TOKENIZER_FLAGS:
        parser.add_argument(
            f"--{name.replace('_', '-')}", help="as in training; default: that of Megatron's arguments"
        )
    return parser


def main_import_megatron(argv: Sequence[str]) -> int:
    """Run the command with its flags; returns the exit status."""
    flags = build_parser().parse_args(argv)
    return exit_status(lambda: _run(flags))


def _run(flags: argparse.Namespace) -> None:
    tokenizer = _tokenizer(flags)
    options = ImportOptions(
        flags.trust_pickle,
        flags.vocab_size,
        {} if flags.megatron_args is None else _read_arguments(flags.megatron_args),
        flags.average_replicas,
        tuple(flags.inert_class),
        flags.with_optimizer,
        tokenizer,
    )
    with MegatronReader(flags.source, options) as reader:
        folder = import_megatron(reader, flags.out)
        print(report(reader, folder))


def report(reader: MegatronReader, folder: Path) -> str:
    """Describe what was read and written, and how to train it further."""
    shapes = {key.name: shape for key, shape in reader.shapes.items() if key.kind == WEIGHT}
    elements = sum(Box.whole(shape).numel for shape in shapes.values())
    goes_on = reader.options.with_optimizer
    files = reader.files
    parts = "modules" if files.form is CheckpointForm.LAYERS else "pipeline stages"
    left = "random states" if goes_on else "the optimizer's state, progress and random states"
    after = "" if reader.iteration is None else f", iteration {reader.iteration}"
    return "\n".join(
        [
            f"read        {files.folder} ({files.form.value}{after})",
            f"from        {files.tensor_ranks} tensor-parallel ranks x {len(files.stages)} {parts}",
            f"vocabulary  {reader.model.vocab_size} of {reader.padded_vocab_size} rows, the rest was padding",
            f"wrote       {folder}: {len(reader.shapes)} tensors, {elements:,} parameters, fp32",
            f"left out    {left}",
            f"train on with `pretrain_gpt.py --load {folder.parent}{'' if goes_on else ' --finetune'}` and "
            "the flags of data, length and optimizer",
        ]
    )


def _tokenizer(flags: argparse.Namespace) -> TokenizerConfig | None:
    values = {name: getattr(flags, name) for name in _TOKENIZER_FLAGS}
    try:
        return TokenizerConfig(**values).located() if any(values.values()) else None
    except ValidationError as error:
        raise ConfigError([f"`{fault['loc'][0]}`: {fault['msg']}" for fault in error.errors()]) from error


def _read_arguments(path: str) -> Mapping[str, object]:
    try:
        arguments = json.loads(read_regular_text(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"`--megatron-args` must be a JSON file, but {path} cannot be read: {error}; correct it"
        ) from error
    if not isinstance(arguments, dict):
        raise ConfigError(
            f"`--megatron-args` must hold a JSON object, but {path} holds a {type(arguments).__name__}; "
            "write one"
        )
    return arguments
