"""`Pattern`: which keys a query may attend to by position.

Every implementation of attention, context parallelism and generation's cache read it. A place is a row's
position in its sequence, wherever the row is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import and_

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """Which blocks of keys a block of queries may attend to (block-sparse attention, Child et al. 2019).

    Attributes:
        blocks: bool [n or 1, N, N] on the host, True where head, block of queries and block of keys meet.
        size: the number of rows of a block.
    """

    blocks: Tensor
    size: int


@dataclass(frozen=True)
class Pattern:
    """Restrictions by place; all of them hold at once.

    Attributes:
        window: the most keys before and after its own that a query attends to, -1 for no limit; None: all.
        sinks: the number of keys at the beginning of a sequence or document that stay visible outside the
            window (StreamingLLM, Xiao et al. 2023).
        prefix: how many places at the beginning of a sequence see each other whatever their order.
        layout: the blocks that may meet; None: all.
    """

    window: tuple[int, int] | None = None
    sinks: int = 0
    prefix: int = 0
    layout: BlockLayout | None = None

    @property
    def idle(self) -> bool:
        """Whether a query may attend to all keys."""
        return self.sides() == (-1, -1) and self.layout is None

    @property
    def special(self) -> bool:
        """Whether there is more than a window."""
        return self.sinks > 0 or self.prefix > 0 or self.layout is not None

    def sides(self, causal: bool = False) -> tuple[int, int]:
        """The most keys before and after its own that a query attends to; -1 for no limit."""
        left, right = (-1, -1) if self.window is None else self.window
        return left, 0 if causal else right

    def causally(self, causal: bool) -> Pattern:
        """The pattern without later keys, a prefix aside, if `causal`: a window with nothing to its right."""
        return Pattern(self.sides(True), self.sinks, self.prefix, self.layout) if causal else self

    def within(self, queries: range, keys: range) -> Pattern:
        """The pattern without restrictions that have no effect on these places.

        So a kernel that supports fewer patterns serves more calls. Sinks are those of the whole sequence.
        """
        left, right = self.sides()
        if right >= 0 and queries.start + right >= keys.stop - 1:
            right = -1
        if left >= 0 and queries.stop - 1 - left <= keys.start:
            left = -1
        window = None if (left, right) == (-1, -1) else (left, right)
        sinks = self.sinks if left >= 0 and keys.start < self.sinks else 0
        prefix = self.prefix if right >= 0 and max(queries.start, keys.start) < self.prefix else 0
        return Pattern(window, sinks, prefix, self.layout)

    def allowed(
        self,
        causal: bool,
        queries: range,
        keys: range,
        device: torch.device,
        begins: Tensor | None = None,
    ) -> Tensor | None:
        """bool [s, t], [n, s, t] or [b, 1, s, t], True where a query may attend to a key; None: everywhere.

        Args:
            causal: whether later keys are hidden.
            queries, keys: their places.
            device: where the mask is wanted.
            begins: int [b, t], the place at which the document of each key begins; None: at 0.
        """
        q = torch.arange(queries.start, queries.stop, device=device).unsqueeze(1)
        k = torch.arange(keys.start, keys.stop, device=device).unsqueeze(0)
        return self.between(causal, q, k, 0 if begins is None else begins[:, None, None, :])

    def between(self, causal: bool, q: Tensor, k: Tensor, first: Tensor | int = 0) -> Tensor | None:
        """`allowed` for places in any order: int q [s, 1] and k [1, t], or [b or 1, 1, s, 1] and [.., 1, t].

        first: the place at which the document of each key begins, broadcastable to k.
        """
        (left, right), masks = self.sides(causal), []
        if right >= 0:
            near = k - q <= right
            if self.prefix:
                near = near | ((q < self.prefix) & (k < self.prefix))
            masks.append(near)
        if left >= 0:
            near = q - k <= left
            if self.sinks:
                near = near | (k - first < self.sinks)
            masks.append(near)
        if self.layout is not None:
            size, blocks = self.layout.size, self.layout.blocks.to(q.device)
            met = blocks[:, q // size, k // size].movedim(0, -3)
            masks.append(met if q.dim() == 2 else met.squeeze(1))
        return reduce(and_, masks) if masks else None


ALL = Pattern()
"""No restriction."""

CAUSAL = ALL.causally(True)
"""No later keys."""
