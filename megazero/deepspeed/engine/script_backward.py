"""Backwards that a script starts itself, with ``loss.backward()``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megazero.deepspeed.engine.data import tensors_of
from megazero.deepspeed.zero.parallel import UserParallel
from megazero.errors import MegazeroError


class ShownGradients:
    """Gradients as ``param.grad`` between a backward and the step: views of the sums, or copies in 16 bits.

    Args:
        parallel: holds the sums, which are whole on each rank.
        share: times this, sums are means; 1 if they are shown as they are.
    """

    def __init__(self, parallel: UserParallel, share: float):
        self._parallel, self._share = parallel, share
        self._sums: dict[int, Tensor] = {}
        self._shown: dict[int, tuple[Tensor, int]] = {}

    @property
    def any(self) -> bool:
        """Whether some gradient is shown."""
        return any(param.grad is not None for param in self._parallel.arrived.values())

    def show(self) -> None:
        """Show the gradients of all parameters that have one, in the parameters' type."""
        if not self._sums:
            store = self._parallel.store
            for bucket in (bucket for bucket in store.buckets if bucket.key.trainable):
                views = bucket.layout.views(store.sums(bucket))
                self._sums.update({id(p): view for p, view in zip(bucket.params, views, strict=True)})
        for key, param in self._parallel.arrived.items():
            sums, share = self._sums[key], self._share
            param.grad = (
                sums if sums.dtype == param.dtype and share == 1.0 else (sums * share).to(param.dtype)
            )
            self._shown[key] = (param.grad, param.grad._version)

    @torch.no_grad()
    def hide(self) -> None:
        """Show none: autograd would add to them in place. What a script has changed counts as changed.

        A gradient that it has dropped counts no more.
        """
        for key, param in self._parallel.arrived.items():
            if key in self._shown:
                sums, (grad, version) = self._sums[key], self._shown[key]
                if param.grad is None:
                    sums.zero_()
                elif param.grad is not grad or (grad is not sums and grad._version != version):
                    sums.copy_(param.grad.to(sums.dtype) / self._share)
            param.grad = None
        self._shown.clear()


class ScriptBackward:
    """Notices a backward that the script runs, by the gradients of the model's outputs and parameters.

    The backward counts from the first gradient of a parameter on, so ``torch.autograd.grad``, which has none,
    does not count.

    Args:
        parallel: the model's data parallelism.
        begin: called before the first gradient of a parameter is taken.
        end: called after the backward.
        shown: hidden before the backward; None if nothing is shown.

    Attributes:
        gone: whether the model has another engine now.
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
        parallel.uninvited = self._arrived

    def watch(self, output: Any) -> None:
        """Wait for a gradient of one of these outputs of the model."""
        for tensor in tensors_of(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(self._approach)

    def recover(self) -> bool:
        """Forget a backward that ended in an error, and say whether there was one."""
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
        # A call by autograd when all of this backward is done, those within it (of checkpoints) included.
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
