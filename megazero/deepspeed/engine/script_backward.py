"""Backward passes that a script starts itself, with ``loss.backward()``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megazero.deepspeed.engine.data import tensors_of
from megazero.deepspeed.zero.parallel import UserParallel
from megazero.errors import MegazeroError


class ShownGradients:
    """The gradients that a script sees as ``param.grad`` between a backward and the step.

    They are views of the fp32 sums, or copies in the 16-bit type of the parameters.

    Args:
        parallel: holds the gradient sums, whole on each rank.
        to_mean: the factor from sums to the gradients that are shown.
    """

    def __init__(self, parallel: UserParallel, to_mean: float):
        self._parallel, self._to_mean = parallel, to_mean
        self._sums: dict[int, Tensor] = {}
        self._shown: dict[int, tuple[Tensor, int]] = {}

    @property
    def any(self) -> bool:
        """Whether some gradient is shown."""
        return any(param.grad is not None for param in self._parallel.arrived.values())

    def show(self) -> None:
        """Set ``param.grad`` of every parameter that got a gradient, in the parameter's type."""
        if not self._sums:
            store = self._parallel.store
            for bucket in (bucket for bucket in store.buckets if bucket.key.trainable):
                views = bucket.layout.views(store.sums(bucket))
                self._sums.update({id(p): view for p, view in zip(bucket.params, views, strict=True)})
        for key, param in self._parallel.arrived.items():
            sums, to_mean = self._sums[key], self._to_mean
            as_is = sums.dtype == param.dtype and to_mean == 1.0
            param.grad = sums if as_is else (sums * to_mean).to(param.dtype)
            self._shown[key] = (param.grad, param.grad._version)

    @torch.no_grad()
    def hide(self) -> None:
        """Set ``param.grad`` to None, because autograd would add to it in place.

        The script's changes are written to the sums first; a gradient that it has set to None becomes zero.
        """
        for key, param in self._parallel.arrived.items():
            if key in self._shown:
                sums, (grad, version) = self._sums[key], self._shown[key]
                if param.grad is None:
                    sums.zero_()
                elif param.grad is not grad or (grad is not sums and grad._version != version):
                    sums.copy_(param.grad.to(sums.dtype) / self._to_mean)
            param.grad = None
        self._shown.clear()


class ScriptBackward:
    """Detects a backward that the script runs, by hooks on the model's outputs and parameters.

    It begins with the first gradient of a parameter, so ``torch.autograd.grad``, which computes none, is not
    taken for a backward.

    Args:
        parallel: the model's data parallelism.
        begin: called before the first gradient of a parameter is collected.
        end: called after the backward.
        shown: the gradients that the script sees, hidden during a backward; None if it sees none.

    Attributes:
        gone: whether a later engine has taken the model over.
    """

    def __init__(
        self,
        parallel: UserParallel,
        begin: Callable[[], None],
        end: Callable[[], None],
        shown: ShownGradients | None,
    ):
        self.gone = False
        self._parallel = parallel
        self._begin, self._end = begin, end
        self._shown = shown
        self._near = self._begun = False
        parallel.unannounced = self._arrived

    def watch(self, output: object) -> None:
        """Put hooks on the tensors in an output of the model."""
        for tensor in tensors_of(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(self._approach)

    def recover(self) -> bool:
        """Forget a backward that an error has ended; returns whether there was one."""
        if not self._near or torch._C._current_graph_task_id() != -1:
            return False
        self._near = self._begun = False
        return True

    def _approach(self, grad: Tensor | None = None) -> None:
        if self.gone:
            raise MegazeroError(
                "`loss` must come from the engine that the model has now, but was computed by one that a "
                "later `initialize` has replaced; run the forward again"
            )
        if self._near or self._parallel.in_backward:
            return
        self._near = True
        # Autograd calls this after the outermost backward; recomputation runs backwards within it.
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self._parallel.approach()
        if self._shown is not None:
            self._shown.hide()

    def _arrived(self) -> None:
        if not self._near:
            if self._shown is not None and self._shown.any:
                raise MegazeroError(
                    "`loss.backward()` must follow a forward of the engine where gradients accumulate at "
                    "stage 0, but followed a part of the model alone; call `engine.backward(loss)`"
                )
            self._approach()
        self._begin()
        self._begun = True

    def _finish(self) -> None:
        begun, self._near, self._begun = self._begun, False, False
        if begun:
            self._end()
