"""Samples of BERT made to measure, for the tests of its batches and its model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

VOCABULARY = 61


def samples(
    lengths: Sequence[int], masked: Sequence[int], width: int, seed: int = 0
) -> dict[str, np.ndarray]:
    """Arrays as a dataset gives them: samples of these lengths, so many tokens of each to restore.

    Tokens do not depend on how many are to be restored.
    """
    rng = np.random.default_rng(seed)
    shape, places = (len(lengths), width), np.arange(width)
    real = places < np.array(lengths)[:, None]
    tokens = np.where(real, rng.integers(0, VOCABULARY, shape), 0)
    labels = rng.integers(0, VOCABULARY, shape)
    is_random = rng.integers(0, 2, len(lengths))
    mask = np.zeros(shape, dtype=bool)
    for row, (length, count) in enumerate(zip(lengths, masked, strict=True)):
        mask[row, rng.permutation(length)[:count]] = True
    return {
        "tokens": tokens,
        "token_types": (real & (places >= np.array(lengths)[:, None] // 2)).astype(np.int64),
        "labels": np.where(mask, labels, -1),
        "loss_mask": mask.astype(np.float32),
        "lengths": np.array(lengths, dtype=np.int64),
        "is_random": is_random,
        "truncated": np.zeros(len(lengths), dtype=np.int64),
    }


def widened(arrays: dict[str, np.ndarray], width: int) -> dict[str, np.ndarray]:
    """The same samples in longer rows."""
    fill = {"tokens": 0, "token_types": 0, "labels": -1, "loss_mask": 0.0}
    more = dict(arrays)
    for name, value in fill.items():
        missing = width - arrays[name].shape[1]
        more[name] = np.pad(arrays[name], ((0, 0), (0, missing)), constant_values=value)
    return more


def taken(arrays: dict[str, np.ndarray], rows: slice) -> dict[str, np.ndarray]:
    """Some of the samples."""
    return {name: array[rows] for name, array in arrays.items()}
