"""Activation recompute: backward computes activations again instead of keeping them (Chen et al. 2016)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megazero.config.tree.recompute import RecomputeConfig
from megazero.host_memory import sent_to
from megazero.layers.collectives import gather_rows
from megazero.layers.input_offload import AwayInput, Pass, Shelf
from megazero.layers.inputs import LayerInputs
from megazero.layers.placement import Placement
from megazero.layers.skipping import run_layer
from megazero.layers.sums import Sums
from megazero.mpu.group import Group

Unit = tuple[range, bool]
"""A group of consecutive layers, and whether it is recomputed."""


def recompute_units(num_layers: int, config: RecomputeConfig) -> list[Unit]:
    """The units that some layers make.

    ``uniform`` cuts all layers into units of `num_layers`; ``block`` recomputes the first `num_layers` one by
    one and keeps the rest; ``every`` recomputes the first of each `num_layers` and keeps the others.
    """
    if config.granularity != "full":
        return [(range(num_layers), False)]
    if config.method == "uniform":
        size = config.num_layers
        return [(range(i, min(i + size, num_layers)), True) for i in range(0, num_layers, size)]
    if config.method == "every":
        units = []
        for i in range(0, num_layers, config.num_layers):
            rest = range(i + 1, min(i + config.num_layers, num_layers))
            units += [(range(i, i + 1), True)] + ([(rest, False)] if rest else [])
        return units
    first = min(config.num_layers, num_layers)
    units = [(range(i, i + 1), True) for i in range(first)]
    return units + ([(range(first, num_layers), False)] if first < num_layers else [])


@dataclass(frozen=True)
class InputKeeping:
    """The way in which the input of a recomputed unit is kept until backward.

    Attributes:
        partition: the ranks that have equal inputs: each keeps 1/size of the input, and backward gathers it
            again (P_a of ZeRO-R, Rajbhandari et al. 2020). None: each rank keeps the whole input.
        offload: whether it is kept in host memory.
        shelf: the pool of host memory, if copies run while the device computes; None if they are queued with
            the computation.
    """

    partition: Group | None = None
    offload: bool = False
    shelf: Shelf | None = None

    @classmethod
    def of(cls, config: RecomputeConfig, placement: Placement) -> InputKeeping:
        """The way that `config` asks for, applied to layers at `placement`."""
        wanted = config.partition_activations and placement.tp.size > 1
        assert not (wanted and placement.sequence_parallel), "sequence parallelism already partitions them"
        shelf = Shelf(placement.streams) if config.offload and placement.streams.apart else None
        return cls(placement.tp if wanted else None, config.offload, shelf)

    @contextmanager
    def over_a_pass(self) -> Iterator[Callable[[], AbstractContextManager[object]]]:
        """A context for one pass; it yields a function that gives each unit a context in which autograd keeps
        its input.
        """
        if self.shelf is None:
            yield self.hooks
            return
        sent = Pass(self.shelf)
        yield lambda: saved_tensors_hooks(
            lambda x: (sent.send(self._part(x)), x.shape, x.device), self._unpack
        )
        sent.end()

    def hooks(self) -> AbstractContextManager[object]:
        """A context manager in which autograd keeps the tensors it saves in this way."""
        if self.partition is None and not self.offload:
            return nullcontext()
        return saved_tensors_hooks(self._pack, self._unpack)

    def _part(self, x: Tensor) -> Tensor:
        kept = x.detach()
        return kept if self.partition is None else kept.reshape(self.partition.size, -1)[self.partition.rank]

    def _pack(self, x: Tensor) -> tuple[Tensor | AwayInput, torch.Size, torch.device]:
        kept = self._part(x)
        # A separate buffer, so that no part of `x` stays in memory.
        pin = self.offload and x.is_cuda
        away = self.offload and not x.is_meta  # a plan counts the host's memory here
        own = torch.empty_like(kept, device="cpu" if away else None, pin_memory=pin)
        return own.copy_(kept, non_blocking=True), x.shape, x.device

    def _unpack(self, packed: tuple[Tensor | AwayInput, torch.Size, torch.device]) -> Tensor:
        kept, shape, device = packed
        here = kept.take() if isinstance(kept, AwayInput) else sent_to(device, kept)
        return here if self.partition is None else gather_rows(here, self.partition).view(shape)


def run_layers(
    layers: Sequence[nn.Module],
    x: Tensor,
    inputs: LayerInputs,
    units: list[Unit],
    keeping: InputKeeping | None = None,
    wanted: Tensor | None = None,
    per_token: frozenset[str] = frozenset(),
) -> tuple[Tensor, Sums]:
    """Apply `layers` in order, as far as the step wants them, and add up their sums.

    Random streams are functions of place, so recompute needs no saved state.

    Args:
        layers: the layers of a pipeline chunk; units are numbered from its first layer.
        keeping: the way in which the inputs of recomputed units are kept; None keeps them whole, on their
            device.
        wanted: int64 [r, b], the rows of the last layer's result to compute; None for all.
        per_token: names of the sums that run over tokens.
    """
    keeping = keeping or InputKeeping()
    last_inputs = inputs if wanted is None else replace(inputs, wanted=wanted)

    def run(x: Tensor, span: range) -> tuple[Tensor, Sums]:
        sums = Sums()
        for i in span:
            x, more = run_layer(layers[i], x, last_inputs if i == len(layers) - 1 else inputs, per_token)
            sums = sums.plus(more)
        return x, sums

    total = Sums()
    with keeping.over_a_pass() as hooks:
        for span, again in units:
            if again and torch.is_grad_enabled():
                # Everything that the unit itself saves is dropped, so the hooks see only its input.
                with hooks():
                    x, sums = checkpoint(run, x, span, use_reentrant=False, preserve_rng_state=False)
            else:
                x, sums = run(x, span)
            total = total.plus(sums)
    return x, total
