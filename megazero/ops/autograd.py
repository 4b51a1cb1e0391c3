"""The types of torch's autograd Functions, which torch leaves out."""

from __future__ import annotations

from typing import Any, ParamSpec, Protocol, TypeVar

from torch import Tensor

_P = ParamSpec("_P")
_Result = TypeVar("_Result")
_Result_co = TypeVar("_Result_co", covariant=True)

# The results of a backward: a gradient for each argument of forward, None for one that has none.
Gradients = tuple[Tensor | None, ...]


class Differentiable(Protocol[_P, _Result_co]):
    """A `torch.autograd.Function`, as its `forward` types it."""

    @staticmethod
    def forward(ctx: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _Result_co:
        """Compute the result, and leave on `ctx` what backward needs."""

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """Run forward and record it for backward."""


def apply(function: Differentiable[_P, _Result], *args: _P.args, **kwargs: _P.kwargs) -> _Result:
    """Run `function.apply` with the arguments and the result that its `forward` declares."""
    result: _Result = function.apply(*args, **kwargs)
    return result
