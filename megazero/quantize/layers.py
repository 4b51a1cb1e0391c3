"""Quantizes a model layer by layer: one layer, and the products of one input, are in memory at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.formats.hf.packed import QuantizedWeight
from megazero.models.chunk import Part
from megazero.models.language_model import LanguageModel
from megazero.mpu.group import Group
from megazero.mpu.messages import broadcast_value
from megazero.mpu.param_spec import spec_of
from megazero.quantize.blocks import BlockModel, Samples
from megazero.quantize.calibrate import Moments, See, Stream, Watch, own_samples, summed
from megazero.quantize.grid import rounded_inputs
from megazero.quantize.recipe import Recipe
from megazero.quantize.report import Tally, WeightReport
from megazero.quantize.scaling import Fold, folds_of

_GRAM_BYTES = 4 << 30  # the most memory that the products of a layer's experts take at a time


@dataclass(frozen=True)
class QuantizedBlock:
    """A block of the model, after its weights were quantized.

    Attributes:
        part: the block.
        values: name -> value, of all its parameters; quantized ones as they are computed with.
        quantized: name -> codes [all rows, n] of the weights that have some; on the first rank.
        rows: a report of each of these.
    """

    part: Part
    values: Mapping[str, Tensor]
    quantized: Mapping[str, QuantizedWeight]
    rows: tuple[WeightReport, ...]


class LayerQuantizer:
    """Quantizes the layers of a model in order; every rank makes one, and goes through `blocks`.

    Samples go through each quantized layer, and what they are behind it calibrates the next. The first rank
    chooses codes and sends the weights to the others, which share the samples.

    Args:
        model: the model.
        recipe: scheme and method.
        group: all ranks.
        samples: those that calibrate, and those on which losses are measured; None for none.
        wanted: our names of the weights to quantize.

    Attributes:
        count, held_out: their numbers.
        losses: the mean loss of a token in nats, before and after; known after the last block.
    """

    def __init__(
        self,
        model: BlockModel,
        recipe: Recipe,
        group: Group,
        samples: tuple[Samples | None, Samples | None],
        wanted: Collection[str],
    ):
        self.model, self.recipe, self.group, self.wanted = model, recipe, group, wanted
        calibrating, held_out = samples
        self.count = 0 if calibrating is None else calibrating.count
        self.held_out = 0 if held_out is None else held_out.count
        own = own_samples(self.count, group), range(group.rank, self.held_out, group.size)
        batches = [s.batches(numbers) if s else [] for s, numbers in zip(samples, own, strict=True)]
        self.calibrating, self.exact, self.coded = map(Stream, (batches[0], batches[1], batches[1]))
        self.losses: tuple[float, float] | None = None

    @torch.no_grad()
    def blocks(self) -> Iterator[QuantizedBlock]:
        """Yield the blocks in order, quantized."""
        for part in self.model.parts:
            block = self.model.block(part)
            values = {spec_of(weight).name: weight.data for weight in block.parameters()}
            watch = Watch(block.layers)
            before = self._passed(self.exact, block)
            names = [name for name in watch.weights if name in self.wanted]
            layer = _Layer(self, block, watch, [values[name] for name in values.keys() - set(names)])
            layer.round_others()
            rows = tuple(layer.rows(int(part), names)) if names else ()
            watch.see = self._see(names)
            if block.head is None:
                self.calibrating.advance(block)
            after = self._passed(self.coded, block)
            if block.head is not None and self.held_out:
                both = torch.cat((before, after), 1)
                self.group.all_reduce(both).wait()
                losses, tokens, later, _ = both.sum(0).tolist()
                self.losses = losses / tokens, later / tokens
            yield QuantizedBlock(part, values, layer.quantized, rows)

    def _passed(self, stream: Stream, block: LanguageModel) -> Tensor:
        """Take samples through a block; behind the head, return the loss and the tokens of each, float64."""
        sums = torch.zeros(self.held_out, 2, dtype=torch.float64, device=self.model.device)
        if block.head is None:
            stream.advance(block)
            return sums
        for number, (batch, hidden) in enumerate(zip(stream.batches, stream.hidden, strict=True)):
            loss = block.position_losses(batch, hidden).double().sum()
            sums[self.group.rank + number * self.group.size] = torch.stack(
                (loss, loss.new_tensor(batch.learnt.count))
            )
        return sums

    def _see(self, names: Collection[str]) -> See:
        """The function that rounds the inputs of these weights, if the scheme does so."""
        rounded = set(names) if self.recipe.rounds_inputs else ()
        return lambda name, x, sizes: rounded_inputs(x) if name in rounded else x


class _Layer:
    """Quantizes one layer: the weights that read one input together, in the order in which they are used."""

    def __init__(self, owner: LayerQuantizer, block: LanguageModel, watch: Watch, others: list[Tensor]):
        self.owner, self.recipe, self.group = owner, owner.recipe, owner.group
        self.block, self.watch, self.others = block, watch, others
        self.quantized: dict[str, QuantizedWeight] = {}

    def round_others(self) -> None:
        """Round what is not quantized to the dtype in which it is written."""
        for weight in self.others:
            weight.copy_(weight.to(self.recipe.grid.dtype))

    def rows(self, number: int, names: list[str]) -> Iterator[WeightReport]:
        """Quantize the weights of these names; yields a report of each, on the first rank."""
        order = [[name] for name in names]
        if self.owner.count:
            first = self.group.rank == 0
            seen = self.owner.calibrating.order(self.block, self.watch) if first else None
            order = broadcast_value(self.group, seen, self.owner.model.device)
        folds = {}
        if self.recipe.folds:
            folds = folds_of(self.block.layers[0], self.owner.model.spec.layers[number])
        done: list[str] = []
        for stage in ([name for name in stage if name in names] for stage in order):
            fold = folds.get(stage[0]) if len(stage) == 1 else None
            yield from self._stage(stage, fold, self.owner._see(done)) if stage else ()
            changed = [*self.others, *self.watch.weights.values()] if self.recipe.folds else []
            for weight in changed or [self.watch.weights[name] for name in stage]:
                self.group.broadcast(weight.data, 0).wait()
            done += stage

    def _stage(self, names: list[str], fold: Fold | None, see: See) -> Iterator[WeightReport]:
        """Quantize weights that read one input, of which the earlier ones have their inputs from `see`."""
        stacks = {name: self.watch.matrices(name) for name in names}
        count, columns = len(stacks[names[0]]), stacks[names[0]].shape[2]
        step = max(1, _GRAM_BYTES // (8 * columns * columns))
        tallies = {name: Tally(self.recipe, name) for name in names}
        for start in range(0, count, step):
            matrices = range(start, min(count, start + step))
            moments = self._moments(names[0], matrices, see)
            if self.group.rank > 0:
                continue
            scale = None
            if fold is not None and moments is not None:
                scale = self.recipe.scale(stacks[names[0]][0].double(), moments)
            for name, tally in tallies.items():
                for matrix in matrices:
                    given = None if moments is None else moments.of_matrix(matrix - start)
                    tally.add(stacks[name][matrix].double(), given, scale)
            if fold is not None and scale is not None:
                fold(scale, self.recipe.grid, self.quantized)
                self.round_others()
        for name, tally in tallies.items() if self.group.rank == 0 else ():
            self.quantized[name] = tally.joined()
            weight = self.watch.weights[name]
            weight.copy_(self.quantized[name].dequantized().view_as(weight))
            yield tally.report()

    def _moments(self, name: str, matrices: range, see: See) -> Moments | None:
        if not self.owner.count:
            return None
        own = self.owner.calibrating.moments(self.block, self.watch, name, matrices, see)
        return summed(own, self.owner.count, self.group)
