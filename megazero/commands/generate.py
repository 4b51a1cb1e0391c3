"""The command `megazero generate`: generate text from a checkpoint. Under torchrun, rank 0 prints."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megazero.checkpoint.remote.disk import put_file
from megazero.checkpoint.remote.mirror import local_path
from megazero.errors import ConfigError, DataError, exit_status
from megazero.inference.job import add_cache, add_sizes, check_texts, decode_lines, loaded_model
from megazero.inference.sampling import Sampling
from megazero.inference.text import TextGenerator
from megazero.inference.text_to_text import answer_texts
from megazero.models.batch import MicroBatch
from megazero.models.chunk import ModelChunk, StagedChunk
from megazero.models.language_model import LanguageModel
from megazero.mpu.launch import Launch
from megazero.report.run_folder import SAMPLES, add_samples


def build_parser() -> argparse.ArgumentParser:
    """Build a parser of the flags, which have the names of Megatron's text generation."""
    parser = argparse.ArgumentParser(prog="megazero generate", description="Generate text from a checkpoint.")
    parser.add_argument("--load", required=True, help="folder of the checkpoint")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--prompt",
        action="append",
        help="text to continue, or for a T5 to answer; may be given several times",
    )
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
    parser.add_argument(
        "--prefill-chunk",
        type=int,
        metavar="N",
        help="feed prompts in chunks of this many tokens, which bounds the memory that long ones take beside "
        "their keys and values (default: whole)",
    )
    add_cache(parser)
    parser.add_argument(
        "--save-samples", action="store_true", help="also add the texts to samples.jsonl in the run's folder"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command with its flags; returns the exit status."""
    flags = build_parser().parse_args(argv)
    return exit_status(lambda: _run(flags))


def _run(flags: argparse.Namespace) -> None:
    prompts = (
        read_prompts(flags.prompt_file) if flags.prompt is None else check_texts(flags.prompt, "--prompt")
    )
    if flags.num_samples < 1:
        raise ConfigError(f"`num_samples` must be at least 1, but is {flags.num_samples}; ask for one")
    sampling = Sampling(flags.temperature, flags.top_k, flags.top_p, flags.greedy, flags.seed)
    with loaded_model(flags, Launch.from_environment(), "generate", as_staged) as (loaded, model):
        repeated = [prompt for prompt in prompts for _ in range(flags.num_samples)]
        amounts = {"max_new_tokens": flags.max_new_tokens, "batch_size": flags.batch_size}
        if not isinstance(model.any_part, LanguageModel):
            if flags.prefill_chunk is not None:
                raise ConfigError(
                    "`--prefill-chunk` must be left out for a T5, whose encoder sees a prompt whole, but "
                    f"is {flags.prefill_chunk}; leave it out"
                )
            if model.coded_cache:
                raise ConfigError(
                    "`--kv-cache-dtype` must be auto for a T5, whose answers are short, but is int8; "
                    "leave it out"
                )
            shown_prompts = [""] * len(repeated)  # an answer does not begin with its prompt
            texts = answer_texts(model, loaded.tokenizer, repeated, sampling=sampling, **amounts)
        else:
            shown_prompts, chunk = repeated, flags.prefill_chunk
            generator = TextGenerator(model, loaded.tokenizer)
            texts = generator.complete(repeated, sampling=sampling, prefill_chunk=chunk, **amounts)
        if loaded.context.rank == 0:
            print(format_results(shown_prompts, texts, flags.num_samples))
            if flags.save_samples:
                run = local_path(flags.load)
                add_samples(run, loaded.iteration, zip(repeated, texts, strict=True))
                put_file(run / SAMPLES)


def as_staged(chunk: ModelChunk[MicroBatch]) -> StagedChunk[Any]:
    """Narrow a chunk's type: all families that make texts have staged chunks."""
    assert isinstance(chunk, StagedChunk), "this family's models make texts"
    return chunk


def format_results(prompts: Sequence[str], texts: Sequence[str], num_samples: int) -> str:
    """Format each prompt with its continuation, under a line with its number if there are several."""
    whole = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    if len(whole) == 1:
        return whole[0]
    return "\n".join(
        f"--- prompt {i // num_samples + 1}, sample {i % num_samples + 1} ---\n{text}"
        for i, text in enumerate(whole)
    )


def read_prompts(path: str) -> list[str]:
    """Read the lines of a UTF-8 file of prompts.

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
