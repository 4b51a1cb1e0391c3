"""Sums over calibration samples of what a block's linear layers see, the same on any number of ranks.

A sample goes through a block by itself, and samples are added up along one tree, in float64, whichever ranks
hold them: sums are equal bit for bit on machines of one kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megazero.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from megazero.models.batch import Batch
from megazero.models.chunk import StagedChunk
from megazero.moe.experts import Experts
from megazero.mpu.group import Group, Transfer
from megazero.mpu.param_spec import spec_of
from megazero.ops.grouped_linear import Groups

See = Callable[[str, Tensor, list[int] | None], Tensor]
"""(name of a weight, its inputs [..., n], rows of each expert or None) -> the inputs to compute with."""


@dataclass(frozen=True)
class Moments:
    """Sums over tokens of the inputs of some matrices with n inputs each.

    Attributes:
        flat: float64 [matrices, n n + 2 n + 1]: products, magnitudes, largest magnitudes, and the count.
        width: n.
    """

    flat: Tensor
    width: int

    @classmethod
    def of(cls, rows: Sequence[Tensor]) -> Moments:
        """The sums over the rows [tokens, n] of each matrix; rows of zeros count for nothing."""
        sums = []
        for x in rows:
            x = x.double()
            most = x.abs().amax(0) if len(x) else x.new_zeros(x.shape[1])
            sums.append(torch.cat([(x.t() @ x).flatten(), x.abs().sum(0), most, (x != 0).any(1).sum()[None]]))
        return cls(torch.stack(sums), rows[0].shape[1])

    def plus(self, other: Moments) -> Moments:
        """The sums over both tokens."""
        flat, most = self.flat + other.flat, slice(-self.width - 1, -1)
        flat[:, most] = torch.maximum(self.flat[:, most], other.flat[:, most])
        return Moments(flat, self.width)

    def mean(self) -> Tensor:
        """The mean magnitude of each input of the first matrix, float64 [n]."""
        return self.flat[0, self.width**2 : -self.width - 1] / self.flat[0, -1]

    def most(self) -> Tensor:
        """The largest magnitude of each input of the first matrix, float64 [n]."""
        return self.flat[0, -self.width - 1 : -1]

    def of_matrix(self, matrix: int) -> tuple[Tensor, int]:
        """The sum of the products of a matrix's inputs, float64 [n, n], and their number."""
        row = self.flat[matrix]
        return row[: self.width**2].view(self.width, self.width), int(row[-1])


def own_samples(samples: int, group: Group) -> range:
    """The samples of this rank, as many as a power of 2; fewer or none for the last ranks."""
    size = 1 << _level(samples, group.size)
    return range(min(samples, group.rank * size), min(samples, (group.rank + 1) * size))


def _level(samples: int, ranks: int) -> int:
    return max(0, (-(-samples // ranks) - 1).bit_length())


def summed(own: Iterable[Moments], samples: int, group: Group) -> Moments | None:
    """The sum over all ranks' samples, on the first rank; None elsewhere. Every rank calls this.

    Samples are added in pairs, and these in pairs: a rank has a whole subtree, so that ranks change no sum.
    """
    level, tree = _level(samples, group.size), _Tree()
    for value in own:
        tree.add(value, 0)
    if group.rank > 0:
        for value in tree.total():
            _wait(group, Transfer("send", value.flat, 0))
        return None
    (total,) = tree.total()
    tree = _Tree([(level, total)])
    for peer in range(1, -(-samples // (1 << level))):
        received = torch.empty_like(total.flat)
        _wait(group, Transfer("recv", received, peer))
        tree.add(Moments(received, total.width), level)
    return tree.total()[0]


@dataclass(frozen=True)
class _Tree:
    """Sums of 2^level samples each, of falling levels."""

    parts: list[tuple[int, Moments]] = field(default_factory=list)

    def add(self, value: Moments, level: int) -> None:
        while self.parts and self.parts[-1][0] == level:
            value, level = self.parts.pop()[1].plus(value), level + 1
        self.parts.append((level, value))

    def total(self) -> list[Moments]:
        """The sum of all, from the last on; empty without any."""
        values = [value for _, value in self.parts]
        while len(values) > 1:
            values.append(values.pop(-2).plus(values.pop()))
        return values


def _wait(group: Group, transfer: Transfer) -> None:
    for work in group.exchange([transfer]):
        work.wait()


class Watch:
    """Shows the inputs of a block's linear layers to a function, which may return others.

    Attributes:
        weights: name -> weight, of each linear layer and each stack of experts.
        see: the function; None for none.
    """

    def __init__(self, block: nn.Module):
        self.weights: dict[str, nn.Parameter] = {}
        self._stacks: list[nn.Parameter] = []
        self.see: See | None = None
        for module in list(block.modules()):
            if isinstance(module, (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)):
                module.register_forward_pre_hook(self._linear(module.weight))
            elif isinstance(module, Experts):
                self._experts(module)

    def matrices(self, name: str) -> Tensor:
        """The matrices of a weight as [k, rows, n]: one, or those of its experts."""
        weight = self.weights[name].detach()
        stacked = any(self.weights[name] is stack for stack in self._stacks)
        return weight.reshape(len(weight) if stacked else 1, -1, weight.shape[-1])

    def _named(self, weight: nn.Parameter) -> str:
        name = spec_of(weight).name
        self.weights[name] = weight
        return name

    def _linear(self, weight: nn.Parameter) -> Callable[[nn.Module, Any], Any]:
        name = self._named(weight)

        def before(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
            return given if self.see is None else (self.see(name, given[0], None), *given[1:])

        return before

    def _experts(self, experts: Experts) -> None:
        up, down = self._named(experts.up), self._named(experts.down)
        self._stacks += [experts.up, experts.down]
        sizes: list[int] = []

        def before(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
            groups: Groups = given[1]
            sizes[:] = groups.read()
            return given if self.see is None else (self.see(up, given[0], list(sizes)), *given[1:])

        activation = experts.activation

        def activate(inner: Tensor, included: Tensor | None) -> Tensor:
            active = activation(inner, included)
            return active if self.see is None else self.see(down, active, list(sizes))

        experts.register_forward_pre_hook(before)
        experts._modules.pop("activation", None)  # the name may be a module's, but need not be
        vars(experts)["activation"] = activate


class _SeenEnough(Exception):
    """Ends a pass through a block whose rest nobody reads."""


class Stream:
    """Samples on their way through a model's blocks, one at a time.

    Attributes:
        batches: the samples of this rank.
        hidden: the hidden states [s, 1, h] of each between two blocks; None before the first.
    """

    def __init__(self, batches: Sequence[Batch]):
        self.batches = batches
        self.hidden: list[Tensor | None] = [None] * len(batches)

    def advance(self, block: StagedChunk[Batch]) -> None:
        """Go through a block."""
        for number, batch in enumerate(self.batches):
            self.hidden[number] = block.hidden(batch, self.hidden[number])

    def order(self, block: StagedChunk[Batch], watch: Watch) -> list[list[str]]:
        """The names of weights in the order of their use; those with one input are together."""
        stages: list[tuple[Tensor, list[str]]] = []

        def see(name: str, x: Tensor, sizes: list[int] | None) -> Tensor:
            if not stages or stages[-1][0] is not x:
                stages.append((x, []))
            stages[-1][1].append(name)
            return x

        watch.see = see
        block.hidden(self.batches[0], self.hidden[0])
        watch.see = None
        return [names for _, names in stages]

    def moments(
        self, block: StagedChunk[Batch], watch: Watch, name: str, matrices: range, before: See
    ) -> Iterable[Moments]:
        """Yield the sums of each sample over the inputs of some matrices of a weight.

        `before` sees the inputs of the weights that are used earlier.
        """
        for batch, hidden in zip(self.batches, self.hidden, strict=True):
            seen: list[Moments] = []

            def see(at: str, x: Tensor, sizes: list[int] | None, seen: list[Moments] = seen) -> Tensor:
                if at != name:
                    return before(at, x, sizes)
                rows = [x.flatten(0, -2)] if sizes is None else x.split(sizes)
                seen.append(Moments.of([rows[matrix] for matrix in matrices]))
                raise _SeenEnough

            watch.see = see
            with suppress(_SeenEnough):
                block.hidden(batch, hidden)
            watch.see = None
            yield seen[0]
