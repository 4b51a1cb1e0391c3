"""The command `megazero generate`: generates text from a checkpoint. Under torchrun the first rank prints."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megazero.errors import ConfigError, DataError, MegazeroError
from megazero.inference.sampling import Sampling
from megazero.inference.staged import StagedModel
from megazero.inference.text import TextGenerator
from megazero.mpu import Launch, leave, reporting


def build_parser() -> argparse.ArgumentParser:
    """The flags, named as in Megatron's text generation where it has the same one."""
    parser = argparse.ArgumentParser(prog="megazero generate", description="Generate text from a checkpoint.")
    parser.add_argument("--load", required=True, help="folder of the checkpoint")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", action="append", help="text to continue; may be given several times")
    source.add_argument("--prompt-file", help="UTF-8 file with one prompt per line")
    add_sizes(parser)
    parser.add_argument("--max-new-tokens", type=int, default=64, help="most tokens to add (default 64)")
    parser.add_argument("--num-samples", type=int, default=1, help="continuations per prompt (default 1)")
    parser.add_argument("--temperature", type=float, default=1.0, help="divides the logits (default 1)")
    parser.add_argument(
        "--top-k", type=int, default=0, help="draw among this many most likely tokens; 0: all (default)"
    )
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="draw within this probability mass; 1: all (default)"
    )
    parser.add_argument("--greedy", action="store_true", help="always take the most likely token")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choices (default 0)")
    parser.add_argument("--batch-size", type=int, default=16, help="prompts at a time (default 16)")
    return parser


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """The flags for the sizes of the job."""
    for axis, what in (("tensor", "slices of each layer"), ("pipeline", "stages")):
        parser.add_argument(
            f"--{axis}-model-parallel-size",
            type=int,
            help=f"{what} over the ranks of this job (default: as trained, or 1 for a single process)",
        )


def main(argv: Sequence[str]) -> int:
    """Run the command with its flags; returns the exit status."""
    flags = build_parser().parse_args(argv)
    try:
        _run(flags)
    except MegazeroError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _run(flags: argparse.Namespace) -> None:
    prompts = (
        read_prompts(flags.prompt_file) if flags.prompt is None else check_texts(flags.prompt, "--prompt")
    )
    if flags.num_samples < 1:
        raise ConfigError(f"`num_samples` must be at least 1, but is {flags.num_samples}; ask for one")
    sampling = Sampling(flags.temperature, flags.top_k, flags.top_p, flags.greedy, flags.seed)
    # This imports every part of megazero, so it waits until the flags are known to be good.
    from megazero.train.trained import Sizes, load_for_inference

    sizes = Sizes(flags.tensor_model_parallel_size, flags.pipeline_model_parallel_size)
    loaded = load_for_inference(flags.load, Launch.from_environment(), sizes, verb="generate")
    with reporting(loaded.context):
        if loaded.context.rank == 0:
            for remark in loaded.remarks:
                print(f"warning: {remark}", file=sys.stderr)
        model = StagedModel(loaded.chunks, loaded.stage_of, loaded.context.pp)
        repeated = [prompt for prompt in prompts for _ in range(flags.num_samples)]
        texts = TextGenerator(model, loaded.tokenizer).complete(
            repeated, max_new_tokens=flags.max_new_tokens, sampling=sampling, batch_size=flags.batch_size
        )
        if loaded.context.rank == 0:
            print(format_results(repeated, texts, flags.num_samples))
    leave(loaded.context)


def format_results(prompts: Sequence[str], texts: Sequence[str], num_samples: int) -> str:
    """Each prompt with its continuation; if there are several, a line above each says which one it is."""
    whole = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    if len(whole) == 1:
        return whole[0]
    return "\n".join(
        f"--- prompt {i // num_samples + 1}, sample {i % num_samples + 1} ---\n{text}"
        for i, text in enumerate(whole)
    )


def check_texts(texts: list[str], flag: str) -> list[str]:
    """Return the values of a flag unchanged.

    Raises:
        DataError: one contains bytes that are not UTF-8, which Python passes on as lone surrogates.
    """
    for number, text in enumerate(texts, 1):
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise DataError(f"`{flag}` must be UTF-8, but number {number} is {text!r}; convert it")
    return texts


def read_prompts(path: str) -> list[str]:
    """The lines of a UTF-8 file.

    Raises:
        DataError: the file cannot be read, is not UTF-8 or has no lines.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"`--prompt-file` must be a readable file, but {path} is not: {error}") from error
    if not content:
        raise DataError(f"`--prompt-file` must have a line per prompt, but {path} is empty; write a prompt")
    return decode_lines(content, "`--prompt-file`", path)


def decode_lines(content: bytes, what: str, place: str) -> list[str]:
    """The lines of a UTF-8 text.

    Raises:
        DataError: a line is not UTF-8; calls the text `what`, and says in which `place` the line is.
    """
    # Not str.splitlines, which also splits at characters that a prompt may contain.
    lines = content.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    texts = []
    for number, line in enumerate(lines, 1):
        try:
            texts.append(line.removesuffix(b"\r").decode("utf-8"))
        except UnicodeDecodeError as error:
            raise DataError(
                f"{what} must be UTF-8, but {place} line {number} is not: {error.reason}; convert it"
            ) from error
    return texts
