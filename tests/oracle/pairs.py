"""The oracle's T5: the trainer of `trainer.py` on given samples, with the losses of `plain_t5.py`.

The order of the samples is a law of its own (`tests/data/t5`), so they are taken as data.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from tests.models.plain_t5 import PlainT5
from tests.oracle.model import Flags, Weights
from tests.oracle.trainer import Training, follow


def formulas_of(flags: Flags) -> PlainT5:
    """The model that the flags describe."""
    return PlainT5(
        (flags["encoder-num-layers"], flags["decoder-num-layers"]),
        flags["num-attention-heads"],
        {"learned_absolute": "learned"}.get(
            flags["position-embedding-type"], flags["position-embedding-type"]
        ),
        (flags.get("relative-attention-num-buckets", 32), flags.get("relative-attention-max-distance", 128)),
        flags["t5-style"] == "google",
        flags["activation"],
        flags["normalization"] == "RMSNorm",
        not flags["untie-embeddings-and-output-weights"],
        flags["norm-epsilon"],
    )


def train_pairs(flags: Flags, arrays: Mapping[str, np.ndarray], initial: Weights, steps: int) -> Training:
    """Train in float64 as the flags say."""
    formulas = formulas_of(flags)

    def gradients(master: Weights, first: int, size: int, scale: float) -> tuple[float, Weights]:
        chosen = {name: array[first : first + size] for name, array in arrays.items()}
        leaves = {name: each.detach().requires_grad_() for name, each in master.items()}
        mean = formulas.losses(leaves, chosen) / float(chosen["loss_mask"].sum())
        mean.backward()
        return mean.item(), {
            name: torch.zeros_like(each) if each.grad is None else each.grad for name, each in leaves.items()
        }

    return follow(flags, initial, steps, gradients)
