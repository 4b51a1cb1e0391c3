"""The documents that the oracle and the product train on."""

from __future__ import annotations

from types import MappingProxyType

import numpy as np

VOCABULARY = 60  # ordinary ids; 60 itself ends a document
# Of the last epoch of `middle`, 16 of 21 samples are needed for 80 in all: just enough to shuffle it with
# the others, and 14 for 56.
_TOKENS = {"small": 300, "middle": 342, "long": 2000, "left": 1000, "right": 700}


def _documents(seed: int, tokens: int) -> tuple[tuple[int, ...], ...]:
    """Documents of 2 to 25 tokens, the last one an end of document, with so many tokens in all."""
    random, found = np.random.default_rng(seed), []
    while tokens:
        length = min(tokens, int(random.integers(2, 26)))
        found.append((*random.integers(0, VOCABULARY, length - 1).tolist(), VOCABULARY))
        tokens -= length
    return tuple(found)


DATASETS = MappingProxyType({name: _documents(i, tokens) for i, (name, tokens) in enumerate(_TOKENS.items())})
