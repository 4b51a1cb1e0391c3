"""Cutting spans of words out of a text, in Megatron-Core's order of draws.

15% of the tokens are cut out (Raffel et al. 2020), in spans of one to ten words with lengths from a geometric
distribution (SpanBERT, Joshi et al. 2020). In the encoder's text a sentinel replaces each span; in the
decoder's text the same sentinel precedes the span.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megazero.data.bert.masking import fitting_run, words_of
from megazero.data.t5.vocabulary import SpanVocabulary

LONGEST_SPAN = 10  # words
_END_OF_SPAN = 0.2  # probability that a span ends after a word

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class PairShape:
    """The widths of a batch's arrays in tokens, and the id that pads them."""

    encoder: int
    decoder: int
    pad: int

    def arrays(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], start: int) -> Arrays:
        """Make the arrays of a batch of (encoder's text, decoder's text).

        The encoder's text becomes `tokens` int64 [b, S] and `lengths` [b]. The decoder's text, which ends
        with the token that ends a text, becomes `labels` int64 [b, T], `loss_mask` float32 [b, T] and
        `decoder_lengths` [b]; `decoder_tokens` int64 [b, T] are the labels shifted right behind `start`.
        `truncated` int64 [b] is 1 where a text was too long.
        """
        b = len(pairs)
        arrays: Arrays = {
            "tokens": np.full((b, self.encoder), self.pad, dtype=np.int64),
            "decoder_tokens": np.full((b, self.decoder), self.pad, dtype=np.int64),
            "labels": np.full((b, self.decoder), self.pad, dtype=np.int64),
            "loss_mask": np.zeros((b, self.decoder), dtype=np.float32),
            **{name: np.zeros(b, dtype=np.int64) for name in ("lengths", "decoder_lengths", "truncated")},
        }
        for i, (source, target) in enumerate(pairs):
            s, t = min(len(source), self.encoder), min(len(target), self.decoder)
            arrays["tokens"][i, :s] = source[:s]
            arrays["decoder_tokens"][i, :t] = [start, *target[: t - 1]]
            arrays["labels"][i, :t] = target[:t]
            arrays["loss_mask"][i, :t] = 1.0
            arrays["lengths"][i], arrays["decoder_lengths"][i] = s, t
            arrays["truncated"][i] = s < len(source) or t < len(target)
        return arrays


def cut_spans(
    tokens: list[int], target: int, prob: float, vocabulary: SpanVocabulary, random: np.random.RandomState
) -> tuple[list[int], list[int]]:
    """Cut spans out of `tokens`; return the encoder's text and the decoder's, which ends with the end token.

    target: the target length of the sample, in tokens; prob: the share of tokens to cut out. The vocabulary
    must have as many sentinels as tokens are cut out.
    """
    pieces = words_of(tokens, vocabulary.words)
    budget = min(prob * target, max(1, round(len(tokens) * prob)))
    order = list(range(len(pieces)))
    random.shuffle(order)
    taken: set[int] = set()
    spans: list[list[int]] = []
    for first in order:
        # Upstream goes on to draw lengths that cannot fit; nothing is drawn afterwards, so they are left out.
        if len(taken) + 1 > budget:
            break
        count = min(int(random.geometric(_END_OF_SPAN)), LONGEST_SPAN)
        span = fitting_run(pieces[first : first + count], budget - len(taken))
        if span and taken.isdisjoint(span):
            taken.update(span)
            spans.append(span)
    source: list[int] = []
    answer: list[int] = []
    begin = 0
    for span, sentinel in zip(sorted(spans), vocabulary.sentinels, strict=False):
        source += [*tokens[begin : span[0]], sentinel]
        answer += [sentinel, *(tokens[place] for place in span)]
        begin = span[-1] + 1
    return source + tokens[begin:], [*answer, vocabulary.end]
