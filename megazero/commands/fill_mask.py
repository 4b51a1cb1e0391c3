"""The command `megazero fill-mask`: show the tokens that a model expects at masked positions."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megazero.errors import ConfigError, DataError, exit_status
from megazero.inference.fill import Candidate, MaskFiller
from megazero.inference.job import add_sizes, check_texts, decode_lines, loaded_model
from megazero.models.language_model import MaskedLanguageModel
from megazero.mpu.launch import Launch

VERB = "fill-mask"


def build_parser() -> argparse.ArgumentParser:
    """Build a parser of the command's flags."""
    parser = argparse.ArgumentParser(
        prog=f"megazero {VERB}",
        description="Show the likeliest tokens for each [MASK] in a text, as a pretrained BERT sees it.",
    )
    parser.add_argument("--load", required=True, help="folder of the checkpoint")
    parser.add_argument(
        "texts",
        nargs="*",
        metavar="TEXT",
        help="text with one or more [MASK]; a [SEP] separates two segments; without any, the lines of the "
        "standard input",
    )
    add_sizes(parser)
    parser.add_argument("--top-k", type=int, default=5, help="tokens to show for each mask (default 5)")
    parser.add_argument("--batch-size", type=int, default=16, help="texts at a time (default 16)")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command with its flags; returns the exit status."""
    flags = build_parser().parse_args(argv)
    return exit_status(lambda: _run(flags))


def _run(flags: argparse.Namespace) -> None:
    launch = Launch.from_environment()
    texts = check_texts(flags.texts, "TEXT") if flags.texts else _lines_of_input(launch)
    for name in ("top_k", "batch_size"):
        if getattr(flags, name) < 1:
            raise ConfigError(f"`{name}` must be at least 1, but is {getattr(flags, name)}; ask for one")
    with loaded_model(flags, launch, VERB, MaskedLanguageModel.of) as (loaded, model):
        filler = MaskFiller(model, loaded.tokenizer, loaded.collate)
        filled = filler.fill(texts, top_k=flags.top_k, batch_size=flags.batch_size)
        if loaded.context.rank == 0:
            print(format_candidates(texts, filled))


def format_candidates(texts: Sequence[str], filled: Sequence[Sequence[Sequence[Candidate]]]) -> str:
    """Format each text with its candidates below it, under a line per mask if it has several masks."""
    blocks = []
    for text, masks in zip(texts, filled, strict=True):
        lines = [text]
        for number, candidates in enumerate(masks, 1):
            lines += [f"  mask {number}"] if len(masks) > 1 else []
            lines += [f"  {candidate.probability:.4f}  {candidate.token}" for candidate in candidates]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _lines_of_input(launch: Launch) -> list[str]:
    if launch.world_size > 1:
        raise ConfigError(
            f"`TEXT` must be given to a job of {launch.world_size} ranks, but is not; only a single process "
            "reads the standard input"
        )
    if sys.stdin.isatty():
        raise ConfigError("`TEXT` must be given, or come in on the standard input, but neither is; write one")
    content = sys.stdin.buffer.read()
    if not content:
        raise DataError("the standard input must have a line per text, but is empty; write one")
    return decode_lines(content, "the standard input", "the standard input")
