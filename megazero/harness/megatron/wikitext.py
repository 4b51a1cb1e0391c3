"""Perplexity of a text by Megatron's task WIKITEXT103, and by the rules of lm-evaluation-harness."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from megazero.data.tokenizers.base import Tokenizer
from megazero.errors import ConfigError, DataError
from megazero.harness.megatron.detokenize import detokenize
from megazero.harness.megatron.windows import Scorer, Window


def report(content: str, path: str, tokenizer: Tokenizer, spans: tuple[int, int], score: Scorer) -> list[str]:
    """Evaluate the text of a file; returns Megatron's figures, the count of tokens, the harness's figures.

    Every rank calls this; `spans` are the tokens that a window predicts, and those between two begins.

    Raises:
        DataError: the text is too short, or the path names no corpus.
        ConfigError: windows would leave tokens out.
    """
    length, stride = spans
    if stride > length:
        raise ConfigError(
            f"`--overlapping-eval` must be at most the sequence length {length}, but is {stride}; lower it"
        )
    words = len(content.strip().split(" "))  # as in Megatron, where the end of a line parts no words
    tokens = tokenizer.encode(detokenize(content, path))
    if words < 2 or len(tokens) < 2:
        raise DataError(f"`--valid-data` must hold two words or more, but {path} does not; name a text")
    windows = list(overlapping(tokens, length, stride))
    loss, ratio = score(windows)[:, 0].sum() / (len(tokens) - 1), (len(tokens) - 1) / (words - 1)
    lines = [
        f"avg loss: {loss:.4E} | ppl: {_exp(loss):.4E} | adjusted ppl: {_exp(loss * ratio):.4E} | "
        f"token ratio: {ratio} |",
        f"scored {len(tokens) - 1:,} tokens, each once, in {len(windows):,} windows",
    ]
    if tokenizer.eod is None:
        return [*lines, f"no figures of lm-evaluation-harness: {tokenizer.name} has no token to begin with"]
    loss = float(score(list(rolling(tokens, tokenizer.eod, length)))[:, 0].sum())
    words, size = len(re.split(r"\s+", content)), len(content.encode())
    return [
        *lines,
        f"by lm-evaluation-harness, as one document: word_perplexity: {_exp(loss / words, 700):.6g}, "
        f"byte_perplexity: {_exp(loss / size, 700):.6g}, bits_per_byte: {loss / size / math.log(2):.6g}",
    ]


def overlapping(tokens: Sequence[int], length: int, stride: int) -> Iterator[Window]:
    """Megatron's windows over a text: each begins `stride` tokens after the last, and predicts `length`.

    The first counts whole, and every other its last `stride` places, of which those behind the text's end
    count nothing; windows of which nothing would count are left out. So each token but the first counts once.
    """
    targets = len(tokens) - 1
    for start in range(0, max(targets - stride, 0) + stride, stride):
        predicted = min(length, targets - start)
        counted = predicted if start == 0 else predicted - (length - stride)
        if counted > 0:
            yield Window(tokens[start : start + predicted + 1], counted)


def rolling(tokens: Sequence[int], prefix: int, length: int) -> Iterator[Window]:
    """The windows of lm-evaluation-harness over one document: each counts what none before has.

    The first begins with the id `prefix`. The last ends where the text does, with all the context that fits.
    """
    whole = [prefix, *tokens]
    for done in range(0, len(tokens), length):
        end = min(done + length, len(tokens))
        yield Window(whole[max(0, end - length) : end + 1], end - done)


def _exp(x: float, most: float = 20) -> float:
    return math.exp(min(most, x))
