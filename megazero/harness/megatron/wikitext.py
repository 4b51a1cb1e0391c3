"""Perplexity of a text by Megatron's task WIKITEXT103, and by the rules of lm-evaluation-harness."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from megazero.data.tokenizers.base import Tokenizer
from megazero.errors import ConfigError, DataError
from megazero.harness.megatron.detokenize import detokenize
from megazero.harness.scoring import Scorer, rolling
from megazero.harness.text import HarnessTokenizer


def report(content: str, path: str, tokenizer: Tokenizer, stride: int, scorer: Scorer) -> list[str]:
    """Evaluate the text of a file; returns Megatron's figures, the count of tokens, the harness's figures.

    Every rank calls this; `stride` are the tokens between the begins of two windows.

    Raises:
        DataError: the text is too short, or the path names no corpus.
        ConfigError: windows would leave tokens out.
    """
    if stride > scorer.max_length:
        raise ConfigError(
            f"`--overlapping-eval` must be at most the sequence length {scorer.max_length}, but is {stride}; "
            "lower it"
        )
    text = detokenize(content, path)
    tokens = tokenizer.encode(text)
    words = len(content.strip().split(" "))  # as in Megatron, where the end of a line parts no words
    if words < 2 or len(tokens) < 2:
        raise DataError(f"`--valid-data` must hold two words or more, but {path} does not; name a text")
    windows = list(overlapping(tokens, scorer.max_length, stride))
    loss = -sum(score.logprob for score in scorer.score(windows)) / (len(tokens) - 1)
    ratio = (len(tokens) - 1) / (words - 1)
    lines = [
        f"avg loss: {loss:.4E} | ppl: {_exp(loss):.4E} | adjusted ppl: {_exp(loss * ratio):.4E} | "
        f"token ratio: {ratio} |",
        f"scored {len(tokens) - 1:,} tokens, each once, in {len(windows):,} windows",
    ]
    if tokenizer.eod is None:
        return [*lines, f"no figures of lm-evaluation-harness: {tokenizer.name} has no token to begin with"]
    theirs = HarnessTokenizer(tokenizer)
    loss = -rolling(scorer.score, [theirs.encode(text)], theirs.prefix, scorer.max_length)[0]
    words, size = len(re.split(r"\s+", content)), len(content.encode())
    return [
        *lines,
        f"by lm-evaluation-harness, as one document: word_perplexity: {_exp(loss / words, 700):.6g}, "
        f"byte_perplexity: {_exp(loss / size, 700):.6g}, bits_per_byte: {loss / size / math.log(2):.6g}",
    ]


def overlapping(tokens: list[int], length: int, stride: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (context, counted tokens) of Megatron's windows over a text, each of `length` targets.

    Each begins `stride` tokens after the last. The first counts whole, and every other its last `stride`
    places, of which those behind the text's end count nothing; windows of which nothing would count are left
    out. So each token but the first counts once.
    """
    for start in range(0, max(len(tokens) - 1 - stride, 0) + stride, stride):
        end = min(start + length + 1, len(tokens))
        counted = start + (1 if start == 0 else length + 1 - stride)
        if counted < end:
            yield tokens[start:counted], tokens[counted:end]


def _exp(x: float, most: float = 20) -> float:
    return math.exp(min(most, x))
