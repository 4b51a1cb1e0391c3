"""`Fill`: the buffer in which the gradients of a bucket arrive."""

from __future__ import annotations

from torch import Tensor

from megazero.ops.gradient_sum import Summand, adds_together, gradient_sum
from megazero.ops.product_sum import Product
from megazero.zero.bucket import Bucket

# Bytes of gradients that wait to be added to their sums together; a launch takes the host as long as a GPU
# needs for about as many.
_MOST_WAITING = 32 << 20


class Fill:
    """The buffer that a bucket's gradients arrive in: the first `padded` elements of `source`.

    `source` holds the bucket's sums, or is a transient buffer. On a GPU gradients are added in groups, after
    `settle` at the latest.
    """

    def __init__(self, bucket: Bucket, source: Tensor, *, transient: bool):
        layout = bucket.layout
        self.source = source
        self.transient = transient
        self.buffer = source[: layout.padded]
        self._tail = source[layout.numel : layout.padded]
        self._views = layout.views(source)
        self._written = [False] * len(bucket.params)
        self._together = adds_together(source.device.type)
        self._waiting: list[Summand] = []
        self._waiting_bytes = 0

    def add(self, slot: int, gradient: Tensor | Product) -> None:
        """Add the gradient of parameter number `slot`."""
        if isinstance(gradient, Product):
            if any(one.total is self._views[slot] for one in self._waiting):
                self.settle()
            if gradient.add_to(self._views[slot], begins=not self._written[slot]):
                self._written[slot] = True
                return
        grad, begins = value_of(gradient), not self._written[slot]
        self._written[slot] = True
        if self._together:
            self._waiting.append(Summand(self._views[slot], grad, begins))
            self._waiting_bytes += grad.nbytes
            if self._waiting_bytes > _MOST_WAITING:
                self.settle()
        elif begins:
            self._views[slot].copy_(grad)
        else:
            self._views[slot].add_(grad)

    def settle(self) -> None:
        """Add the gradients that are still waiting to be added in one launch."""
        if self._waiting:
            gradient_sum(self._waiting)
            self._waiting, self._waiting_bytes = [], 0

    def complete(self) -> None:
        """Add what waits, and write zeros where no gradient has arrived: another rank may have one there."""
        self.settle()
        self._tail.zero_()
        for view, written in zip(self._views, self._written, strict=True):
            if not written:
                view.zero_()
        self._written = [True] * len(self._views)


def value_of(gradient: Tensor | Product) -> Tensor:
    """The gradient, computed if it is still a product."""
    return gradient.value() if isinstance(gradient, Product) else gradient
