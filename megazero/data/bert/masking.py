"""Masking whole words and runs of words, in Megatron-Core's order of draws.

15% of the tokens are predicted (Devlin et al. 2019), in runs of one to three words (n-gram masking, Joshi et
al. 2020 and others). Of these tokens 80% become [MASK], 10% become a random id and 10% stay.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megazero.data.bert.word_pieces import WordPieces

LONGEST_RUN = 3  # words


def run_chances() -> np.ndarray:
    """The probabilities of runs of 1, 2 and 3 words, 6/11, 3/11 and 2/11: inverse to the length.

    They are normalized twice, as in Megatron-Core, to equal its numbers bit for bit.
    """
    inverse = 1.0 / np.arange(1, LONGEST_RUN + 1)
    once = inverse / inverse.sum()
    chances: np.ndarray = once / once.sum()
    return chances


def words_of(tokens: Sequence[int], words: WordPieces) -> list[list[int]]:
    """The places of the pieces of each word in `tokens`; [CLS] and [SEP] belong to no word.

    A piece that continues a word joins the last word, even across a [SEP], where truncation can leave it.
    """
    pieces: list[list[int]] = []
    for place, token in enumerate(tokens):
        if token in (words.cls, words.sep):
            continue
        if pieces and 0 <= token < words.size and words.continues[token]:
            pieces[-1].append(place)
        else:
            pieces.append([place])
    return pieces


def mask_tokens(
    tokens: list[int], target: int, prob: float, words: WordPieces, random: np.random.RandomState
) -> tuple[list[int], list[int]]:
    """Mask some of `tokens`; return the masked tokens, and the places to predict in ascending order.

    tokens: a sample with its special tokens; target: the sample's target length without special tokens; prob:
    the share to predict.
    """
    pieces = words_of(tokens, words)
    budget = min(prob * target, max(1, round(len(tokens) * prob)))
    order = list(range(len(pieces)))
    random.shuffle(order)
    masked, chances = list(tokens), run_chances()
    places: set[int] = set()
    for start in order:
        # Upstream goes on to draw lengths that cannot fit; nothing is drawn afterwards, so they are left out.
        if len(places) + 1 > budget:
            break
        count = int(random.choice(LONGEST_RUN, p=chances)) + 1
        run = fitting_run(pieces[start : start + count], budget - len(places))
        if run and places.isdisjoint(run):
            for place in run:
                masked[place] = _masked(tokens[place], words, random)
            places.update(run)
    return masked, sorted(places)


def fitting_run(run: list[list[int]], room: float) -> list[int]:
    """The places of the longest prefix of a run of words that has at most `room` pieces."""
    for count in range(len(run), 0, -1):
        places = [place for word in run[:count] for place in word]
        if len(places) <= room:
            return places
    return []


def _masked(token: int, words: WordPieces, random: np.random.RandomState) -> int:
    if random.random_sample() < 0.8:
        return words.mask
    if random.random_sample() >= 0.5:
        return int(words.replacements[random.randint(0, words.replacements.size)])
    return token
