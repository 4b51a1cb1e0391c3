"""`megazero checkpoint extend-positions`: write a model's weights with more learned positions."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from megazero.checkpoint.folder import saved_iterations
from megazero.checkpoint.locate import one_checkpoint
from megazero.checkpoint.part import WEIGHT, Key
from megazero.checkpoint.writer import write_checkpoint
from megazero.commands.checkpoint.stream import changed_tensors
from megazero.commands.outputs import output_run
from megazero.commands.show import one_line
from megazero.errors import CheckpointError, ConfigError
from megazero.formats.hf.convert import KIND
from megazero.train.resume.saved import Checkpoint
from megazero.version import VERSION

_POSITIONS = Key("embedding.position.weight")


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the flags of `extend-positions`."""
    parser = verbs.add_parser(
        "extend-positions",
        help="give a model more learned positions, to train on longer sequences",
        description="Write the weights of a checkpoint with a longer table of positions, which repeats the "
        "one that it has. Train it further with --load and --finetune. A Hugging Face folder is converted by "
        "from-hf first.",
    )
    parser.add_argument(
        "source", metavar="CKPT", help="a checkpoint, or a run's folder, whose newest is taken"
    )
    parser.add_argument(
        "out", metavar="OUT", type=output_run, help="folder of the new run; it must hold no checkpoints"
    )
    parser.add_argument(
        "--max-position-embeddings", type=int, required=True, metavar="N", help="positions of the result"
    )
    parser.set_defaults(run=run, trouble=1)


def run(flags: argparse.Namespace) -> int:
    """Extend, and print how to go on."""
    folder = one_checkpoint(flags.source)
    reader = Checkpoint(folder)
    with reader:
        written = extend_positions(reader, flags.out, flags.max_position_embeddings)
    print(f"read   {one_line(folder)}")
    print(f"wrote  {one_line(written)}: {flags.max_position_embeddings} positions")
    print(
        f"train it further with `pretrain_gpt.py --load {one_line(written.parent)} --finetune` and the "
        "flags of data, optimizer and length, such as a longer `pretrain_gpt.py --seq-length`"
    )
    return 0


def extend_positions(reader: Checkpoint, out: Path, positions: int) -> Path:
    """Write the weights with `positions` learned positions as checkpoint 0 in `out`; returns its folder.

    Of a model with n positions, position i gets the row of position i mod n (Beltagy et al. 2020).

    Raises:
        CheckpointError: the model has no learned positions, or `out` holds checkpoints or cannot be written.
        ConfigError: the model has `positions` positions or more.
        DamagedCheckpointError: the original is damaged.
    """
    if saved_iterations(out):
        raise CheckpointError(f"`{out}` must hold no checkpoints, but holds some; name another folder")
    if _POSITIONS not in reader.shapes:
        raise CheckpointError(
            f"`{reader.folder}` must have learned positions, but has none; rotary ones need no table: raise "
            "`--max-position-embeddings`"
        )
    known = reader.shapes[_POSITIONS][0]
    if positions <= known:
        raise ConfigError(
            f"`--max-position-embeddings` must be above {known}, but is {positions}; the model has as many"
        )
    saved = reader.model
    facts = {
        "kind": KIND,
        "extended_from": {"megazero": VERSION, "positions": known},
        "vocab_size": saved.vocab_size,
        **{name: reader.facts[name] for name in ("token_ids", "converted_from") if name in reader.facts},
        **{name: dict(saved.sections[name]) for name in ("tokenizer", "finetune") if name in saved.sections},
        "model": {**saved.sections["model"], "max_position_embeddings": positions},
    }

    def form(key: Key) -> tuple[torch.dtype, tuple[int, ...]]:
        shape = reader.shapes[key]
        return reader.dtype(key), (positions, *shape[1:]) if key == _POSITIONS else shape

    def repeated(key: Key, tensor: Tensor) -> Tensor:
        return tensor[torch.arange(positions) % len(tensor)] if key == _POSITIONS else tensor

    keys = [key for key in reader.shapes if key.kind == WEIGHT]
    return write_checkpoint(out, 0, changed_tensors(reader, keys, form, repeated), facts)
