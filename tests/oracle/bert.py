"""The oracle's BERT: the trainer of `trainer.py` on given samples, with the losses of `plain_bert.py`.

The order of the samples is a law of its own (`tests/data/bert`), so they are taken as data.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from tests.models.plain_bert import PlainBert
from tests.oracle.model import Flags, Weights
from tests.oracle.trainer import Training, follow


def formulas_of(flags: Flags) -> PlainBert:
    """The model that the flags describe."""
    return PlainBert(
        flags["num-layers"],
        flags["num-attention-heads"],
        flags["apply-residual-connection-post-layernorm"],
        flags["activation"] == "gelu_exact",
        flags["bert-head-activation"] == "gelu_exact",
        not flags["bert-no-binary-head"],
        flags["norm-epsilon"],
        flags.get("window-size", (-1, -1)),
        flags["softmax-type"],
    )


def train_bert(
    flags: Flags, arrays: Mapping[str, np.ndarray], initial: Weights, steps: int
) -> tuple[Training, list[dict[str, float | None]]]:
    """Train in float64 as the flags say; also each step's losses, None where nothing was to be restored."""
    formulas, both = formulas_of(flags), []

    def gradients(master: Weights, first: int, size: int, scale: float) -> tuple[float | None, Weights]:
        chosen = {name: array[first : first + size] for name, array in arrays.items()}
        leaves = {name: each.detach().requires_grad_() for name, each in master.items()}
        lm, sop = formulas.losses(leaves, chosen)
        masked, means = float(chosen["loss_mask"].sum()), {}
        if masked:
            means["lm_loss"] = lm / masked
        if formulas.binary:
            means["sop_loss"] = sop / size
        total = sum(means.values()) if means else None
        if total is not None:
            total.backward()
        both.append({"lm_loss": None, **{name: mean.item() for name, mean in means.items()}})
        grads = {
            name: torch.zeros_like(each) if each.grad is None else each.grad for name, each in leaves.items()
        }
        return None if total is None else total.item(), grads

    return follow(flags, initial, steps, gradients), both
