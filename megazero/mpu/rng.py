"""Randomness from named streams.

A stream has no state to save: its key is a function of the seed and of what the numbers are for
(``"dropout", iteration, layer``, ...), and counter-based generators turn keys into numbers. Recompute
replays a stream by asking for it again, and a resumed or reshaped run continues every stream because
there is nothing to continue.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import torch
from torch import Tensor


def derive_key(seed: int, *path: str | int) -> int:
    """A 63-bit key for the stream that `path` names under `seed`; different paths, unrelated keys."""
    text = json.dumps([seed, *path])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class SampleStreams:
    """The random streams of one micro-batch: one per training sample and place in the model.

    A sample keeps its numbers wherever it is computed, so dropout is the same on every layout.

    `samples` are the positions of the micro-batch's sequences in the training order.
    """

    seed: int
    samples: tuple[int, ...]

    def keys(self, *site: str | int) -> Tensor:
        """int64 keys [b], one per sequence, of the stream at `site`."""
        return torch.tensor([derive_key(self.seed, *site, sample) for sample in self.samples])
