"""Randomness from named streams.

A stream has no state to save: its key is a function of the seed and of what the numbers are for, and
counter-based generators turn keys into numbers. Recompute replays a stream by asking for it again, and a
resumed or reshaped run continues every stream because there is nothing to continue.

The streams of a training sample are many, one per place in the model: `sample_keys` goes to the device once
with the micro-batch, and a place mixes its `site_key` in there (`ops.counter_random.derive`), so nothing is
copied from the host on the way through the model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

import numpy as np


def derive_key(seed: int, *path: str | int) -> int:
    """A 63-bit key for the stream that `path` names under `seed`; different paths, unrelated keys."""
    text = json.dumps([seed, *path])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def sample_keys(seed: int, samples: Iterable[int | tuple[int, ...]]) -> np.ndarray:
    """int64 [b], a key for each sample, given as its place in the training order, or (place, row).

    A sample keeps its key wherever it is computed, so dropout is the same on every layout.
    """
    paths = ((sample,) if isinstance(sample, int) else sample for sample in samples)
    return np.array([derive_key(seed, "sample", *path) for path in paths], dtype=np.int64)


def site_key(*site: str | int) -> int:
    """The constant of a place in the model that its random numbers depend on, besides the sample's key."""
    return derive_key(0, "site", *site)
