"""The last word of each text: Megatron's task LAMBADA, and ``lambada_openai`` of lm-evaluation-harness."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence

from megazero.errors import DataError
from megazero.harness.megatron.windows import Scorer, Window

Encode = Callable[[str], list[int]]
"""Text to ids."""


def report(
    lines: Sequence[str], path: str, encode: Encode, length: int, score: Scorer, *, strict: bool
) -> list[str]:
    """Evaluate the texts of a file; returns Megatron's figures, the count of tokens, the harness's figures.

    Every rank calls this. All tokens of the last word must be right if `strict`, else the last token. A text
    of more than `length` + 1 tokens, which stops Megatron, loses its beginning.

    Raises DataError if a line has no usable `text`.
    """
    texts = read_texts(lines, path)
    whole = [last_word(text, encode) if strict else Window(encode(text), 1) for text in texts]
    scores = score([fitted(window, length, path) for window in whole])
    theirs = score([fitted(harness_window(text, encode), length, path) for text in texts])
    examples, correct = len(texts), int((scores[:, 1] == 0).sum())
    cut = sum(len(window.tokens) > length + 1 for window in whole)
    return [
        f"number correct: {correct:.4E} | total examples: {examples:.4E} | avg accuracy: "
        f"{correct / examples:.4E}",
        f"scored {sum(window.counted for window in whole):,} tokens of {examples:,} texts, each once"
        + (f"; the beginning of {cut:,} was cut, to {length + 1} tokens" if cut else ""),
        # The harness's perplexity is of words: the mean is over texts, not over tokens.
        f"by lm-evaluation-harness: acc: {(theirs[:, 1] == 0).mean():.6g}, perplexity: "
        f"{math.exp(min(700, theirs[:, 0].mean())):.6g}",
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


def last_word(text: str, encode: Encode) -> Window:
    """Megatron's strict window of a text: its last word counts, encoded apart from what is before."""
    word = text.split()[-1]
    label = encode(f" {word}")
    return Window([*encode(text[: text.rfind(word)].strip()), *label], len(label))


def harness_window(text: str, encode: Encode) -> Window:
    """The window of lm-evaluation-harness: what follows the last blank counts, encoded with the rest."""
    ids, before = encode(text), text.rpartition(" ")[0]
    return Window(ids, len(ids) - len(encode(before.rstrip())))


def fitted(window: Window, length: int, path: str) -> Window:
    """Cut tokens at a window's front until it predicts at most `length`.

    Raises DataError if tokens that count would go, or if the first of all tokens counts.
    """
    if not 0 < window.counted <= min(length, len(window.tokens) - 1):
        raise DataError(
            f"`text` must have a token before those that count, and at most {length} of these, but one in "
            f"{path} has {len(window.tokens)} tokens, of which {window.counted} count; take it out"
        )
    return Window(window.tokens[-length - 1 :], window.counted)
