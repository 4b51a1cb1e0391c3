"""The order of the oracle's samples: Megatron-Core's, written out token by token.

Documents are shuffled epoch by epoch and laid end to end; sample k is the tokens from k s on, one more than
the sequence is long; then the samples are shuffled. A last epoch of which less than 80% is needed is kept
apart in both shuffles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

Documents = Sequence[Sequence[int]]


def training_samples(flags: Mapping, datasets: Sequence[Documents], count: int) -> np.ndarray:
    """The first `count` training samples, int64 [count, s + 1]; `datasets` are those of `--data-path`."""
    parts = [_part_for_training(flags["split"], documents) for documents in datasets]
    length, seed = flags["seq-length"], flags["seed"]
    if len(flags["data-path"]) == 1:
        return np.array(_samples(parts[0], length, seed, count)[:count])
    weights = [float(weight) for weight in flags["data-path"][::2]]
    shares = [weight / sum(weights) for weight in weights]
    asked = [math.ceil(math.ceil(count * share) * 1.005) for share in shares]
    samples = [_samples(part, length, seed, each) for part, each in zip(parts, asked, strict=True)]
    taken, rows = [0] * len(samples), []
    for i in range(count):
        behind = [share * max(i, 1) - number for share, number in zip(shares, taken, strict=True)]
        chosen = behind.index(max(behind))
        rows.append(samples[chosen][taken[chosen]])
        taken[chosen] += 1
    return np.array(rows)


def _part_for_training(split: str, documents: Documents) -> Documents:
    shares = [float(share) for share in split.split(",")]
    return documents[: round(shares[0] / sum(shares) * len(documents))]


def _samples(documents: Documents, length: int, seed: int, asked: int) -> list[list[int]]:
    """All samples of as many epochs as it takes for those `asked` for."""
    epoch = sum(map(len, documents))
    epochs = 1
    while epochs * epoch < asked * length + 1:
        epochs += 1
    total, before_last = (epochs * epoch - 1) // length, ((epochs - 1) * epoch - 1) // length
    apart = epochs > 1 and asked - before_last < int(0.8 * ((epoch - 1) // length))
    random = np.random.RandomState(seed)
    order: list[int] = []
    for repeats in (epochs - 1, 1) if apart else (epochs,):
        block = np.array(list(range(len(documents))) * repeats, dtype=np.int32)
        random.shuffle(block)
        order += block.tolist()
    stream = [token for number in order for token in documents[number]]
    shuffled: list[int] = []
    for block in ((0, before_last), (before_last, total)) if apart else ((0, total),):
        numbers = np.arange(*block, dtype=np.uint32)
        random.shuffle(numbers)
        shuffled += numbers.tolist()
    return [stream[k * length : k * length + length + 1] for k in shuffled]
