"""The last word of each text: Megatron's task LAMBADA, and ``lambada_openai`` of lm-evaluation-harness."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence

from megazero.data.tokenizers.base import Tokenizer
from megazero.errors import DataError
from megazero.harness.scoring import Scorer
from megazero.harness.text import HarnessTokenizer

Encode = Callable[[str], list[int]]
"""Text to ids."""
Split = tuple[list[int], list[int]]
"""The tokens of a text: its context, and those that count."""


def report(
    lines: Sequence[str], path: str, tokenizer: Tokenizer, scorer: Scorer, *, strict: bool
) -> list[str]:
    """Evaluate the texts of a file; returns Megatron's figures, the count of tokens, the harness's figures.

    Every rank calls this. All tokens of the last word must be right if `strict`, else the last token. A text
    that is too long for the model, which stops Megatron, loses its beginning.

    Raises DataError if a line has no usable `text`.
    """
    texts, most = read_texts(lines, path), scorer.max_length + 1
    splits = [
        last_word(text, tokenizer.encode) if strict else last_token(text, tokenizer.encode) for text in texts
    ]
    examples, correct = len(texts), sum(score.greedy for score in scorer.score(splits))
    cut = sum(len(context) + len(counted) > most for context, counted in splits)
    theirs = scorer.score([harness_split(text, HarnessTokenizer(tokenizer).encode) for text in texts])
    # The harness's perplexity is of words: the mean is over texts, not over tokens.
    mean = -sum(score.logprob for score in theirs) / examples
    return [
        f"number correct: {correct:.4E} | total examples: {examples:.4E} | avg accuracy: "
        f"{correct / examples:.4E}",
        f"scored {sum(len(counted) for _, counted in splits):,} tokens of {examples:,} texts, each once"
        + (f"; the beginning of {cut:,} was cut, to {most} tokens" if cut else ""),
        f"by lm-evaluation-harness: acc: {sum(score.greedy for score in theirs) / examples:.6g}, perplexity: "
        f"{math.exp(min(700, mean)):.6g}",
    ]


def read_texts(lines: Sequence[str], path: str) -> list[str]:
    """The texts of JSON lines. Raises DataError, naming the line, unless each is an object with a `text`."""
    texts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} must have JSON lines, but line {number} is none: {error}") from error
        text = entry.get("text") if isinstance(entry, dict) else None
        if not isinstance(text, str) or " " not in text.strip():
            raise DataError(
                f"`text` must be words with blanks in each line of {path}, but in line {number} is "
                f"{text!r:.80}; correct it"
            )
        texts.append(text)
    if not texts:
        raise DataError(f"`--valid-data` must have a line per text, but {path} is empty; write one")
    return texts


def last_token(text: str, encode: Encode) -> Split:
    """Megatron's loose split of a text: its last token counts."""
    ids = encode(text)
    return ids[:-1], ids[-1:]


def last_word(text: str, encode: Encode) -> Split:
    """Megatron's strict split of a text: its last word counts, encoded apart from what is before."""
    word = text.split()[-1]
    return encode(text[: text.rfind(word)].strip()), encode(f" {word}")


def harness_split(text: str, encode: Encode) -> Split:
    """The split of lm-evaluation-harness: what follows the last blank counts, encoded with the rest."""
    ids, before = encode(text), len(encode(text.rpartition(" ")[0].rstrip()))
    return ids[:before], ids[before:]
