"""Muon, which needs whole matrices: the update is as close to orthogonal as a few products make it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from types import MappingProxyType
from typing import ClassVar, Literal

import torch
from torch import Tensor

from megazero.optim.elementwise import Adam
from megazero.optim.rule import MatrixRule, Needs, Pieces, UpdateRule

Coefficients = tuple[tuple[float, float, float], ...]

NEWTON_SCHULZ: Mapping[str, Coefficients] = MappingProxyType(
    {
        "simple": ((3.4445, -4.7750, 2.0315),),
        "quintic": (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
    }
)
"""Coefficients (a, b, c): Jordan et al.'s for every step, and those tuned for five (Cesista et al. 2025)."""

_EPS = 1e-7  # the smallest norm by which a matrix is divided


def newton_schulz(
    matrices: Tensor, coefficients: Sequence[tuple[float, float, float]], dtype: torch.dtype
) -> Tensor:
    """Bring the singular values of matrices near 1 and keep their singular vectors (Jordan et al. 2024).

    ``X = a X + (b A + c A^2) X`` with ``A = X X^T``, from ``X = G / |G|`` on; tall matrices are transposed.

    Args:
        matrices: [n, rows, columns], any dtype; unchanged.
        coefficients: (a, b, c) of each step.
        dtype: the dtype of the products.

    Returns:
        [n, rows, columns] in the dtype of `matrices`.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = (x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=_EPS)).to(dtype)
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


@dataclass(frozen=True)
class NewtonSchulz:
    """The iteration of `newton_schulz` with its settings.

    Attributes:
        coefficients: (a, b, c) of the steps; used again from the first if there are more steps.
        steps: number of steps.
        dtype: the dtype of the products: fp32, or bf16 as Jordan et al. have it.
    """

    coefficients: Coefficients = NEWTON_SCHULZ["simple"]
    steps: int = 5
    dtype: Literal["fp32", "bf16"] = "fp32"

    def of(self, matrices: Tensor) -> Tensor:
        """Matrices [n, rows, columns] with singular values near 1."""
        dtype = torch.float32 if self.dtype == "fp32" else torch.bfloat16
        return newton_schulz(matrices, list(islice(cycle(self.coefficients), self.steps)), dtype)


@dataclass(frozen=True)
class Muon(MatrixRule):
    """Muon (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks").

    ``m = momentum m + (1 - momentum) g``; ``p = p (1 - lr wd) - lr s O(m)``, with O of `newton_schulz` for
    each whole matrix, and with Nesterov's momentum O of ``momentum m + (1 - momentum) g``. `rest` updates all
    parameters that are not made of matrices between hidden vectors, see `ParamSpec.matrices`.

    Attributes:
        momentum: decay of m.
        nesterov: whether the gradient counts once more.
        orthogonalized: how a matrix is brought near an orthogonal one.
        scale: s by a matrix's shape: ``shape_scaling`` is sqrt(max(1, rows / columns)), as Jordan et al.
            have it; ``spectral`` is sqrt(max(rows, columns)); ``unit_rms_norm`` is sqrt(rows / columns).
        extra_scale: a further factor of s; 0.2 with ``spectral`` gives updates the size of AdamW's (Liu et
            al. 2025, "Muon is Scalable for LLM Training").
        split_joined: whether queries, keys and values that are stored as one are orthogonalized apart.
        rest: the rule for other parameters.
    """

    needs: ClassVar[Needs] = Needs(matrices=True)
    state_names: ClassVar[tuple[str, ...]] = ("momentum",)

    momentum: float = 0.95
    nesterov: bool = True
    orthogonalized: NewtonSchulz = NewtonSchulz()
    scale: Literal["shape_scaling", "spectral", "unit_rms_norm"] = "shape_scaling"
    extra_scale: float = 1.0
    split_joined: bool = True
    rest: UpdateRule = field(default_factory=Adam)

    @torch.no_grad()
    def prepare(self, pieces: Pieces) -> Iterator[Tensor]:
        """Update the momentum and yield the tensors to orthogonalize, piece by piece; they may be views."""
        pieces.check(self.state_names)
        for grad, momentum in zip(pieces.grads, pieces.of("momentum"), strict=True):
            momentum.lerp_(grad, 1.0 - self.momentum)
            yield torch.lerp(grad, momentum, self.momentum) if self.nesterov else momentum

    @torch.no_grad()
    def change(self, matrices: Tensor) -> Tensor:
        """The update of whole matrices [n, rows, columns], put together from what `prepare` yielded."""
        rows, columns = matrices.shape[-2:]
        return self.orthogonalized.of(matrices).mul_(self._scale(rows, columns))

    @torch.no_grad()
    def step(self, pieces: Pieces, lr: float, updates: Sequence[Tensor]) -> None:
        pieces.check(self.state_names)
        for param, update, decay in zip(pieces.params, updates, pieces.weight_decays, strict=True):
            param.mul_(1.0 - lr * decay).sub_(update, alpha=lr)

    def _scale(self, rows: int, columns: int) -> float:
        square = {
            "shape_scaling": max(1.0, rows / columns),
            "spectral": float(max(rows, columns)),
            "unit_rms_norm": rows / columns,
        }[self.scale]
        return self.extra_scale * math.sqrt(square)
