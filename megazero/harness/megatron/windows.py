"""Windows of tokens under a model: the losses of a window's last tokens, and whether it expects them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from megazero.errors import NumericsError
from megazero.inference.staged import StagedModel
from megazero.models.batch import Batch
from megazero.mpu.group import Group

_ROWS = 512  # positions whose logits are in memory at once


@dataclass(frozen=True)
class Window:
    """Token ids in a row, of which the model predicts the last `counted`, each from all before it."""

    tokens: Sequence[int]
    counted: int


Scorer = Callable[[Sequence[Window]], np.ndarray]
"""`score`, with a model."""


@torch.no_grad()
def score(windows: Sequence[Window], model: StagedModel[Batch], batch_size: int, copies: Group) -> np.ndarray:
    """Score windows, `batch_size` in a pass on each of the ranks `copies` that hold the same part of a model.

    Every rank calls this, and gets for each window, float64 [windows, 2], the summed loss of its counted
    tokens in nats, and how many of them are not the most likely one. Each window counts once: a copy that
    has none left repeats another's and drops the result.

    Raises NumericsError if a loss is not finite.
    """
    order = sorted(range(len(windows)), key=lambda number: -len(windows[number].tokens))
    results = torch.zeros(len(windows), 2, dtype=torch.float64, device=model.device)
    for start in range(0, len(order), batch_size * copies.size):
        first = start + copies.rank * batch_size
        mine = order[first : first + batch_size]
        scored = _pass(model, [windows[number] for number in mine or order[start : start + 1]])
        results[mine] = scored[: len(mine)]
    copies.all_reduce(results).wait()
    scores: np.ndarray = results.cpu().numpy()
    if not np.isfinite(scores).all():
        raise NumericsError(
            "`loss` must be finite, but is not; the model is damaged, or its precision too low"
        )
    return scores


def _pass(model: StagedModel[Batch], windows: Sequence[Window]) -> Tensor:
    # What fills up a short window stands behind its end, where no token of it looks.
    length, device = max(len(window.tokens) for window in windows) - 1, model.device
    tokens = [[*window.tokens[:-1], *[0] * (length + 1 - len(window.tokens))] for window in windows]
    counted = [
        (row, place - 1, window.tokens[place])
        for row, window in enumerate(windows)
        for place in range(len(window.tokens) - window.counted, len(window.tokens))
    ]
    rows, columns, targets = torch.tensor(counted, device=device).t()

    def judge(head: nn.Module, hidden: Tensor) -> Tensor:
        pieces = zip(hidden[columns, rows].unsqueeze(1).split(_ROWS), targets.split(_ROWS), strict=True)
        return torch.cat([_judged(model.unsliced(head(x)).squeeze(1), target) for x, target in pieces], 1)

    judged = model.run(Batch(torch.tensor(tokens, device=device)), judge, (2, len(counted))).double()
    return torch.zeros(len(windows), 2, dtype=torch.float64, device=device).index_add_(0, rows, judged.t())


def _judged(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of each target under logits [n, v], and whether another is more likely: float32 [2, n]."""
    losses = -logits.float().log_softmax(-1).gather(1, targets.unsqueeze(1)).squeeze(1)
    return torch.stack([losses, (logits.argmax(-1) != targets).float()])
