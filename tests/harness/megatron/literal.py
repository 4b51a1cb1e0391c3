"""Megatron's zero-shot tasks as their description says, window by window with masks, in float64.

Nothing is shared with the package but the model's logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Logits = Callable[[Tensor], Tensor]
"""Tokens [s] -> logits [s, v]."""


def windows(tokens: Sequence[int], s: int, o: int, eod: int) -> list[tuple[list[int], list[int]]]:
    """Each window's s + 1 tokens and the mask of its s targets, the padded ones at the end included."""
    targets = len(tokens) - 1
    count = max(math.ceil(max(targets - o, 0) / o) + 1, 1)
    result = []
    for i in range(count):
        row = list(tokens[i * o : i * o + s + 1])
        mask = [1] * len(row) + [0] * (s + 1 - len(row))
        row += [eod] * (s + 1 - len(row))
        mask = mask[1:]
        if i > 0 and o != s:
            mask = [0] * (s - o) + mask[s - o :]
        result.append((row, mask))
    return result


def loss(logits: Logits, rows: Sequence[tuple[list[int], list[int]]]) -> float:
    """The sum of masked losses over windows."""
    total = 0.0
    for row, mask in rows:
        log_p = logits(torch.tensor(row[:-1])).double().log_softmax(-1)
        total -= sum(float(log_p[i, row[i + 1]]) for i, counts in enumerate(mask) if counts)
    return total


def wikitext_line(logits: Logits, tokens: Sequence[int], text: str, s: int, o: int, eod: int) -> str:
    """The printed line, between its rules."""
    original = len(text.strip().split(" "))
    value = loss(logits, windows(tokens, s, o, eod)) / (len(tokens) - 1)
    ratio = (len(tokens) - 1) / (original - 1)
    return (
        " validation results on WIKITEXT103 | "
        f"avg loss: {value:.4E} | ppl: {math.exp(min(20, value)):.4E} | "
        f"adjusted ppl: {math.exp(min(20, value * ratio)):.4E} | token ratio: {ratio} |"
    )


def lambada_correct(logits: Logits, texts: Sequence[str], encode, *, strict: bool) -> list[bool]:
    """Whether the argmax equals every token of each label, given the true ones before."""
    correct = []
    for text in texts:
        if strict:
            word = text.split()[-1]
            context = encode(text[: text.rfind(word)].strip())
            label = encode(" " + word)
        else:
            *context, last = encode(text)
            label = [last]
        row = context + label
        best = logits(torch.tensor(row[:-1])).argmax(-1).tolist()
        correct.append(best[len(context) - 1 :] == label)
    return correct
