"""The command `megazero score`: log-probabilities or rewards of a file's answers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megazero.commands.outputs import output_file
from megazero.config.resolve import parse_config
from megazero.config.tree.config import Config
from megazero.errors import CheckpointError, ConfigError, exit_status
from megazero.train.folders import read_folder


def build_parser() -> argparse.ArgumentParser:
    """Build a parser of the flags that this command adds to those of a training."""
    parser = argparse.ArgumentParser(
        prog="megazero score",
        allow_abbrev=False,
        description="Score the answers of a file: by their log-probabilities under a language model, or by a "
        "reward model. Other flags are a training's: layout, precision, micro-batch size, --seq-length, "
        "--chat-template. torchrun starts several ranks.",
    )
    add = parser.add_argument
    add("checkpoint", metavar="CKPT", help="a checkpoint, a run's folder, or a folder of transformers")
    add("--data", required=True, metavar="FILE", help="conversations or pairs, as JSON lines or Parquet")
    add("--out", required=True, type=output_file, metavar="FILE", help="JSON lines, in the order of the data")
    add("--per-token", action="store_true", help="add the log-probability of each token of an answer")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command with its flags; returns the exit status."""
    flags, rest = build_parser().parse_known_args(argv)

    def work() -> None:
        config = config_of(flags, rest)
        from megazero.post_training.score import read_lines, score_on
        from megazero.train.process import in_job

        lines, out, per_token = read_lines(config), str(flags.out), flags.per_token
        in_job(config, None, lambda joined: score_on(config, joined, lines, out, per_token=per_token))

    return exit_status(work)


def config_of(flags: argparse.Namespace, rest: Sequence[str], world_size: int | None = None) -> Config:
    """The configuration of a scoring on this many ranks, by default those of the environment.

    Raises:
        CheckpointError: there is no model in the folder.
        ConfigError: tokens of a reward model are asked for.
    """
    hugging_face = (Path(flags.checkpoint) / "config.json").exists()
    name = "checkpoint.load_hf" if hugging_face else "finetune.pretrained_checkpoint"
    stated = read_folder({name: flags.checkpoint})
    if stated is None:
        raise CheckpointError(f"`CKPT` must hold a model, but {flags.checkpoint} has none; check the path")
    classes, bias = stated.model.num_classes, stated.model.classifier_bias
    if (rewards := classes is not None) and (classes, bias) != (1, False):
        raise CheckpointError(
            f"`CKPT` must be a model of words or of rewards, but {flags.checkpoint} is a classifier of a "
            "task; `megazero finetune --epochs 0 --predictions FILE` writes its answers"
        )
    if rewards and flags.per_token:
        raise ConfigError("`per_token` must be left out for a reward model, which scores whole answers")
    given = ["--load-hf" if hugging_face else "--pretrained-checkpoint", flags.checkpoint]
    given += ["--task", "reward" if rewards else "preference", "--epochs", "0", "--valid-data", flags.data]
    # A score takes no step, but a configuration has the size and the rate of one.
    given += ["--lr", "1", "--micro-batch-size", "1"]
    return parse_config([*given, *rest], world_size=world_size, reader=read_folder).config
