"""The command `megazero evaluate`: lines of Megatron's ``tasks/main.py``.

Two tasks score a language model as it is; the others are fine-tuning, and become `megazero finetune`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from megazero.commands import finetune
from megazero.config.document import Document, read_file
from megazero.config.fields import fields_with
from megazero.config.flags import scan
from megazero.config.resolve import resolve_or_exit
from megazero.config.stated import Stated
from megazero.config.tasks import TASKS
from megazero.config.tree.config import Config
from megazero.config.tree.roles import Role
from megazero.errors import CheckpointError, ConfigError, DataError, exit_status
from megazero.regular_file import read_regular, why_unreadable
from megazero.train.folders import described_by, read_folder

WIKITEXT, LAMBADA = "WIKITEXT103", "LAMBADA"


def build_parser() -> argparse.ArgumentParser:
    """Build a parser of the flags that Megatron's tasks add to those of a training."""
    parser = argparse.ArgumentParser(
        prog="megazero evaluate",
        allow_abbrev=False,
        description="Run a line of Megatron's tasks/main.py. Its other flags are a training's: --load names "
        "the checkpoint, flags of the model may be left out and must not contradict it, and what training "
        "alone needs has no effect. torchrun starts several ranks.",
    )
    add = parser.add_argument
    tasks = f"{WIKITEXT} or {LAMBADA} scores a language model; {', '.join(TASKS)}: fine-tuning"
    add("--task", required=True, help=tasks)
    add("--valid-data", nargs="*", default=[], metavar="FILE", help="what to evaluate on")
    between = f"{WIKITEXT}: tokens between the begins of two windows; 0: as many as a window has (default 32)"
    add("--overlapping-eval", type=int, default=32, metavar="N", help=between)
    whole = f"{LAMBADA}: all tokens of the last word must be right, not the last token alone"
    add("--strict-lambada", action="store_true", help=whole)
    add("--pretrained-checkpoint", metavar="DIR", help="the weights, where --load names none")
    add("--epochs", type=int, help="fine-tuning: passes over the training data; 0 evaluates only")
    add("--keep-last", action="store_true", help="no effect: the short last batch is always used")
    add("--trust-pickle", action="store_true", help="read a checkpoint of Megatron, whose files are pickles")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command with its flags; returns the exit status."""
    flags, rest = build_parser().parse_known_args(argv)
    run = _zero_shot if flags.task in (WIKITEXT, LAMBADA) else _fine_tune
    return exit_status(lambda: run(flags, rest))


def line_of(argv: Sequence[str]) -> list[str]:
    """The flags that a line becomes: of `megazero finetune`, or those of a training that say how to score.

    Raises ConfigError if the line lacks a checkpoint, a flag of its model is unknown, or so is the task.
    """
    flags, rest = build_parser().parse_known_args(argv)
    return (_scoring if flags.task in (WIKITEXT, LAMBADA) else _tuning)(flags, rest)


def _tuning(flags: argparse.Namespace, rest: list[str]) -> list[str]:
    if flags.task not in TASKS:
        raise ConfigError(
            f"`--task` must be one of {', '.join([WIKITEXT, LAMBADA, *TASKS])}, but is {flags.task}; "
            "retrieval and regression are not offered"
        )
    words, given = ["--task", flags.task, *rest], _given(rest)
    epochs = flags.epochs if flags.epochs is not None or given.get("finetune.train_data") else 0
    weights = flags.pretrained_checkpoint
    words += [] if epochs is None else ["--epochs", str(epochs)]
    words += ["--lr", "1"] if epochs == 0 and "schedule.lr" not in given else []  # of no optimizer
    words += [] if weights is None else ["--pretrained-checkpoint", weights]
    folder = {**given, "finetune.task": flags.task, "finetune.pretrained_checkpoint": weights}
    if "model.family" not in given and read_folder(folder) is None:
        words += ["--model-family", "bert"]  # as all of Megatron's
    return words + (["--valid-data", *flags.valid_data] if flags.valid_data else [])


def _fine_tune(flags: argparse.Namespace, rest: list[str]) -> int:
    words = _tuning(flags, rest)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{flags.task} is fine-tuning: megazero finetune {shlex.join(words)}", file=sys.stderr)
    return finetune.main(words)


def _scoring(flags: argparse.Namespace, rest: list[str]) -> list[str]:
    given = _given(rest)
    if "checkpoint.load" not in given:
        if flags.pretrained_checkpoint is None:
            raise ConfigError("`--load` must name the checkpoint to evaluate, but is missing; add it")
        rest = [*rest, "--load", flags.pretrained_checkpoint]
    if len(flags.valid_data) != 1:
        raise ConfigError(f"`--valid-data` must be one file, but is {len(flags.valid_data)}; name one")
    return [*rest, *_of_training(given)]


def _zero_shot(flags: argparse.Namespace, rest: list[str]) -> None:
    words = _scoring(flags, rest)
    config = resolve_or_exit(words, "megazero evaluate", partial(_checkpoint, flags))
    path = flags.valid_data[0]
    try:
        content = read_regular(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = why_unreadable(error) if isinstance(error, OSError) else error
        raise DataError(f"`--valid-data` must be readable UTF-8 text, but {path} is not: {why}") from error
    _evaluate(flags, _given(words), config, content)


def _given(words: list[str]) -> dict[str, Any]:
    """The values that a line and its file set, by path; errors are reported when it is resolved."""
    flags = scan(words)
    document = Document() if flags.config_file is None else read_file(flags.config_file)
    return {setting.spec.path: setting.value for setting in [*document.settings, *flags.settings]}


def _checkpoint(flags: argparse.Namespace, given: Mapping[str, Any]) -> Stated:
    """Read what `--load` says of its model. Raises MegazeroError if it holds none that can be read."""
    from megazero.formats.foreign import open_foreign
    from megazero.inference.job import import_options
    from megazero.train.resume.saved import read_saved_model

    place = _place(flags, given)
    if foreign := open_foreign(place.load, import_options(place), place.ckpt_step):
        with closing(foreign):
            saved = read_saved_model(foreign.facts, foreign.folder, foreign.shapes)
            return replace(described_by(saved, given, anew=True), place=str(foreign.folder))
    if stated := read_folder(given):
        return stated
    raise CheckpointError(f"`load` must hold a checkpoint, but {place.load} has none; check the path")


def _place(flags: argparse.Namespace, given: Mapping[str, Any]) -> argparse.Namespace:
    """The flags of `add_sizes`, by settings (path -> value)."""
    from megazero.inference.job import add_sizes

    parser = argparse.ArgumentParser()
    add_sizes(parser)
    place = parser.parse_args(["--tensor-model-parallel-size=1", "--pipeline-model-parallel-size=1"])
    names = {path.rpartition(".")[2]: value for path, value in given.items()}
    vars(place).update({name: names[name] for name in vars(place) if name in names})
    place.load, place.trust_pickle = given["checkpoint.load"], flags.trust_pickle
    return place


def _of_training(given: dict[str, Any]) -> list[str]:
    """Flags that a training must be given, and an evaluation makes no use of, unless the line has them."""
    lengths = {spec.path for spec in fields_with(Role.LENGTH | Role.SCHEDULE) if spec.section == "training"}
    lacking = {
        "--train-iters 1": lengths,
        "--mock-data": {spec.path for spec in fields_with(Role.SOURCE)},
        "--lr 1": {"schedule.lr"},
        "--micro-batch-size 1": {"batch.micro_batch_size"},
    }
    return [word for words, paths in lacking.items() if not paths & given.keys() for word in words.split()]


def _evaluate(flags: argparse.Namespace, given: Mapping[str, Any], config: Config, content: str) -> None:
    from megazero.harness.megatron import lambada, wikitext
    from megazero.harness.scoring import Scorer
    from megazero.inference.job import loaded_model
    from megazero.models.language_model import LanguageModel
    from megazero.mpu.launch import Launch
    from megazero.train.parts.families import family_of
    from megazero.train.parts.vocabulary import build_vocabulary

    if not family_of(config.model).models.causal:
        raise ConfigError(
            f"`--load` must hold a model that reads from left to right for {flags.task}, but its family is "
            f"{config.model.family}; name another"
        )
    place, launch = _place(flags, given), Launch.from_environment()
    with loaded_model(place, launch, "generate", LanguageModel.of, replicas=True) as (loaded, model):
        tokenizer, length = build_vocabulary(config).tokenizer, config.model.seq_length
        assert tokenizer is not None, "a model without a tokenizer was refused"
        row = config.batch.micro_batch_size * length
        scorer, path = Scorer(model, loaded.context, max_length=length, tokens=row), flags.valid_data[0]
        if flags.task == WIKITEXT:
            stride = max(1, flags.overlapping_eval or length)
            lines = wikitext.report(content, path, tokenizer, stride, scorer)
        else:
            texts, strict = content.split("\n"), flags.strict_lambada
            lines = lambada.report(texts, path, tokenizer, scorer, strict=strict)
        if loaded.context.rank == 0:
            wanted, dtype = given.get("precision.dtype"), model.placement.dtype
            if wanted and not str(dtype).endswith(wanted.replace("fp", ".float").replace("bf", "bfloat")):
                print(f"warning: the model computes in {dtype}, as trained, not {wanted}", file=sys.stderr)
            figures = f" validation results on {flags.task} | {lines[0]}"
            rule = "-" * (len(figures) + 1)
            print("\n".join([rule, figures, rule, *lines[1:]]))
