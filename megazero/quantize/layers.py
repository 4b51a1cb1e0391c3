"""Quantizes a model layer by layer: one layer and the products of one input are in memory at a time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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
from megazero.quantize.report import WeightReport
from megazero.quantize.rtn import nearest, squared_error
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
    values: dict[str, Tensor]
    quantized: dict[str, QuantizedWeight]
    rows: tuple[WeightReport, ...]


@dataclass(frozen=True)
class Losses:
    """The mean loss in nats over held-out tokens, before and after."""

    before: float
    after: float


class LayerQuantizer:
    """Quantizes the layers of a model in order; every rank makes one, and calls the same methods.

    Samples go through each quantized layer, and what they are after it calibrates the next. The first rank
    chooses codes and sends the weights to the others, which share the samples.

    Args:
        model: the model.
        recipe: scheme and method.
        group: all ranks.
        calibrating, held_out: the samples; None for none.
        wanted: whether to quantize a weight, by our name.
    """

    def __init__(
        self,
        model: BlockModel,
        recipe: Recipe,
        group: Group,
        samples: tuple[Samples | None, Samples | None],
        wanted: Callable[[str], bool],
    ):
        self.model, self.recipe, self.group, self.wanted = model, recipe, group, wanted
        calibrating, held_out = samples
        self.count = 0 if calibrating is None else calibrating.count
        self.held_out = 0 if held_out is None else held_out.count
        self.calibrating = Stream(
            [] if calibrating is None else calibrating.batches(own_samples(self.count, group))
        )
        measured = [] if held_out is None else held_out.batches(range(group.rank, self.held_out, group.size))
        self.exact, self.coded = Stream(measured), Stream(measured)
        self.losses: Losses | None = None

    @torch.no_grad()
    def blocks(self) -> Iterator[QuantizedBlock]:
        """Yield the blocks in order, quantized; at the end, `losses` are known if there are held-out samples."""
        for part in self.model.parts:
            block = self.model.block(part)
            values: dict[str, Tensor] = {spec_of(w).name: w.data for w in block.parameters()}
            watch = Watch(block)
            before = self._passed(self.exact, block)
            names = [name for name in watch.weights if isinstance(part, int) and self.wanted(name)]
            work = _Layer(self, block, watch, [w for name, w in values.items() if name not in names])
            work.round_others()
            rows = tuple(work.rows(part, names)) if isinstance(part, int) and names else ()
            watch.see = _rounding(set(names)) if self.recipe.rounds_inputs else None
            if block.head is None:
                self.calibrating.advance(block)
            after = self._passed(self.coded, block)
            if block.head is not None and self.held_out:
                self.losses = self._compared(before, after)
            yield QuantizedBlock(part, values, work.quantized, rows)

    def _passed(self, stream: Stream, block: LanguageModel) -> Tensor:
        """Take samples through a block; if it has the head, the sums of losses and of weights of all samples."""
        sums = torch.zeros(self.held_out, 2, dtype=torch.float64, device=self.model.device)
        if block.head is None:
            stream.advance(block)
            return sums
        for number, (batch, hidden) in enumerate(zip(stream.batches, stream.hidden, strict=True)):
            loss = block.position_losses(batch, hidden).sum(dtype=torch.float64)
            sums[self.group.rank + number * self.group.size] = loss.new_tensor(
                [float(loss), batch.learnt.count]
            )
        return sums

    def _compared(self, before: Tensor, after: Tensor) -> Losses:
        both = torch.cat((before, after), 1)
        self.group.all_reduce(both).wait()
        losses, counts, later, _ = both.sum(0).tolist()
        return Losses(losses / counts, later / counts)


def _rounding(names: set[str]) -> See:
    """What W8A8 does to the inputs of quantized weights."""
    return lambda name, x, sizes: rounded_inputs(x) if name in names else x


class _Layer:
    """Quantizes one layer: the weights that read one input together, in the order in which they are used."""

    def __init__(self, owner: LayerQuantizer, block: LanguageModel, watch: Watch, others: list[Tensor]):
        self.owner, self.recipe, self.group = owner, owner.recipe, owner.group
        self.block, self.watch, self.others = block, watch, others
        self.quantized: dict[str, QuantizedWeight] = {}
        self.done: set[str] = set()

    def round_others(self) -> None:
        """Round what is not quantized to the dtype in which it is written."""
        for weight in self.others:
            weight.copy_(weight.to(self.recipe.grid.dtype))

    def rows(self, number: int, names: list[str]) -> Iterator[WeightReport]:
        """Quantize the weights of these names; yields a report of each."""
        stages = [[name] for name in names]
        if self.owner.count:
            first = self.group.rank == 0
            order = self.owner.calibrating.order(self.block, self.watch) if first else None
            stages = broadcast_value(self.group, order, self.owner.model.device)
            stages = [[name for name in stage if name in names] for stage in stages]
            unused = [[name] for name in names if not any(name in stage for stage in stages)]
            stages = [stage for stage in stages if stage] + unused
        folds = {}
        if self.recipe.folds:
            folds = folds_of(self.block.layers[0], self.owner.model.spec.layers[number])
        for stage in stages:
            fold = folds.get(stage[0]) if len(stage) == 1 else None
            yield from self._stage(stage, fold)
            changed = [self.watch.weights[name] for name in stage] if fold is None else self._all()
            for weight in changed if self.group.size > 1 else ():
                self.group.broadcast(weight.data, 0).wait()
            self.done |= set(stage)

    def _all(self) -> list[Tensor]:
        return [*self.others, *self.watch.weights.values()]

    def _stage(self, names: list[str], fold: Fold | None) -> Iterator[WeightReport]:
        """Quantize weights that read one input; the first rank alone chooses codes and reports."""
        weight = self.watch.weights[names[0]]
        count, columns = self._matrices(weight), weight.shape[-1]
        at_a_time = max(1, _GRAM_BYTES // (8 * columns * columns))
        tallies = [_Tally() for _ in names]
        scale = None
        for start in range(0, count, at_a_time):
            matrices = range(start, min(count, start + at_a_time))
            moments = self._moments(names[0], matrices)
            if self.group.rank > 0:
                continue
            if fold is not None and moments is not None:
                scale = self.recipe.scale(self._matrix(weight, 0), moments)
            for name, tally in zip(names, tallies, strict=True):
                for matrix in matrices:
                    given = (
                        None
                        if moments is None
                        else (moments.gram(matrix - start), moments.count(matrix - start))
                    )
                    tally.add(self.recipe, name, self._matrix(self.watch.weights[name], matrix), given, scale)
        if self.group.rank > 0:
            return
        if fold is not None and scale is not None:
            fold.divide(scale, self.recipe.grid, self.quantized)
            self.round_others()
        for name, tally in zip(names, tallies, strict=True):
            self.quantized[name] = tally.joined()
            weight = self.watch.weights[name]
            weight.copy_(self.quantized[name].dequantized().view_as(weight))
            yield tally.report(name, self.recipe.grid.dtype)

    def _moments(self, name: str, matrices: range) -> Moments | None:
        stream = self.owner.calibrating
        if not self.owner.count:
            return None
        see = _rounding(self.done) if self.recipe.rounds_inputs else _as_it_is
        own = stream.moments(self.block, self.watch, name, matrices, see)
        return summed(own, self.owner.count, self.group)

    def _matrices(self, weight: nn.Parameter) -> int:
        """The matrices in a weight: a stack of experts has several."""
        return len(weight) if any(weight is own for own in self.watch.stacks) else 1

    def _matrix(self, weight: nn.Parameter, number: int) -> Tensor:
        rows = weight.detach().reshape(self._matrices(weight), -1, weight.shape[-1])
        return rows[number].double()


def _as_it_is(name: str, x: Tensor, sizes: list[int] | None) -> Tensor:
    return x


class _Tally:
    """The codes of a weight's matrices, and the sums for its report."""

    def __init__(self) -> None:
        self.parts: list[QuantizedWeight] = []
        self.methods: Counter[str] = Counter()
        self.errors = [0.0, 0.0, 0.0]  # of the codes, of plain rounding, and the outputs themselves

    def add(
        self,
        recipe: Recipe,
        name: str,
        weight: Tensor,
        given: tuple[Tensor, int] | None,
        scale: Tensor | None,
    ) -> None:
        """Quantize a matrix [rows, n], given the products and the number of its inputs, and their scale."""
        gram, tokens = (None, 0) if given is None else given
        recipe.grid.check(name, weight)
        scaled, its = weight, gram
        if scale is not None and gram is not None:
            scaled, its = weight * scale, gram / torch.outer(scale, scale)
        part, method = recipe.quantized(name, scaled, its, tokens)
        self.parts.append(part)
        self.methods[method if scale is not None or not recipe.folds else f"{method}, unscaled"] += 1
        if gram is not None and its is not None:
            wrong = nearest(weight, recipe.grid).dequantized().double() - weight
            self.errors[0] += squared_error(part.dequantized().double() - scaled, its)
            self.errors[1] += squared_error(wrong, gram)
            self.errors[2] += squared_error(weight, gram)

    def joined(self) -> QuantizedWeight:
        """The codes of all matrices as one matrix."""
        codes, scales = (
            torch.cat([getattr(part, name) for part in self.parts]) for name in ("codes", "scales")
        )
        return QuantizedWeight(codes, scales, self.parts[0].bits)

    def report(self, name: str, dtype: torch.dtype) -> WeightReport:
        """The report of the weight, of which `dtype` would be the dtype."""
        weight, (wrong, rounded, whole) = self.joined(), self.errors
        error, beside = (math.sqrt(part / whole) if whole else None for part in (wrong, rounded))
        methods = [
            method if len(self.methods) == 1 else f"{n} {method}" for method, n in self.methods.items()
        ]
        size = weight.codes.numel()
        after = size * weight.bits // 8 + weight.scales.numel() * dtype.itemsize
        return WeightReport(name, "; ".join(methods), error, beside, size * dtype.itemsize, after)
