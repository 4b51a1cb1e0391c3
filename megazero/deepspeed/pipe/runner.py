"""Runs batches through this rank's stage: the programs, the executor, and what stages agree on first."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megazero.config.tree.zero import ZeroConfig
from megazero.deepspeed.pipe.chunk import Outputs, StageBatch, StageChunk
from megazero.deepspeed.pipe.feed import DataEnded
from megazero.deepspeed.pipe.messages import DescribingGroup, Forms
from megazero.deepspeed.pipe.module import PipelineStage
from megazero.deepspeed.pipe.specs import PipelineError
from megazero.deepspeed.pipe.ties import PipelineParallel
from megazero.errors import DataError
from megazero.pipeline.actions import Program
from megazero.pipeline.executor import Executor, StepSums
from megazero.pipeline.lower import lower
from megazero.pipeline.schedules import build_schedule
from megazero.zero.table import STAGES

_ENDED = -1


class StageRunner:
    """One stage of the pipeline.

    The forms of the messages between stages are sent with the first batch whose inputs have certain shapes,
    and are known from then on. `dynamic_shape` sends them with every batch.

    Args:
        module: the stage.
        parallel: its parameters.
        zero: the stage of ZeRO, and whether gradients are reduced while backward runs.
        compute: calls the module on its input.
    """

    def __init__(
        self,
        module: PipelineStage,
        parallel: PipelineParallel,
        zero: ZeroConfig,
        compute: Callable[[Any], Any],
    ):
        context = module.context
        self.module, self._pp, self._device = module, context.pp, context.device
        self._group = DescribingGroup(context.pp, context.device)
        self._chunk = StageChunk(module, self._group, compute)
        self._known: dict[int, Forms] = {}
        self._executor: Executor[StageBatch] = Executor(
            {context.pp.rank: self._chunk}, self._group, parallel, context.device
        )
        row, overlap, stages = STAGES[zero.stage], zero.overlap_grad_reduce, context.pp.size

        @cache
        def program(kind: str, micro_batches: int) -> Program:
            return lower(
                build_schedule(kind, stages, micro_batches),
                gather=row.shard_params,
                reduce_every_microbatch=row.shard_grads,
                overlap_reduce=overlap,
            )

        self._program = program

    def train(self, take: Callable[[], list[StageBatch]], count: int, factor: float, step: int) -> StepSums:
        """Forward and backward of a batch.

        Args:
            take: gives its micro-batches.
            count: their number.
            factor: the factor of each one's loss in backward.
            step: the number of the step.

        Raises:
            DataError: on every stage if the first one has no data; see `PipelineFeed`.
            PipelineError: the layers at the ends of stages give what cannot be sent, or the loss is no
                scalar.
        """
        batches = self._agree(take, count, training=True)
        factors = torch.full((1,), factor, device=self._device)
        try:
            return self._executor.train(self._program("1f1b", count), batches, factors, step)
        finally:
            self._group.be_silent()

    def evaluate(self, take: Callable[[], list[StageBatch]], count: int, with_loss: bool) -> Outputs:
        """Forward of a batch; on the last stage, what it gave. Raises as `train` does."""
        self._chunk.outputs = outputs = Outputs(with_loss)
        batches = self._agree(take, count, training=False)
        try:
            self._executor.evaluate(self._program("forward", count), batches)
        finally:
            self._group.be_silent()
            self._chunk.outputs = Outputs()
        return outputs

    def forget(self) -> None:
        """Send the forms of all messages anew; every rank calls this."""
        self._known.clear()

    def _agree(self, take: Callable[[], list[StageBatch]], count: int, *, training: bool) -> list[StageBatch]:
        """Take the micro-batches, and learn from the first stage which shapes there are."""
        if self._pp.size == 1:
            return take()
        batches: list[StageBatch] = []
        key, error = _ENDED, None
        if self._pp.rank == 0:
            try:
                batches = take()
                key = _key(batches, training)
            except DataError as raised:  # the other stages must not wait for what never comes
                error = raised
        message = torch.tensor([key, key in self._known], dtype=torch.int64, device=self._device)
        self._pp.broadcast(message, 0).wait()
        key, fixed = message.tolist()
        if key == _ENDED:
            raise error or DataEnded("the first stage must have data, but has none; its rank says why")
        if fixed and key not in self._known:
            raise PipelineError(
                "`reset_activation_shape` must be called on every rank, but was not called on the first "
                "stage; call it everywhere"
            )
        forms = self._known[key] if fixed else Forms()
        self._chunk.forms, self._chunk.fixed = forms, bool(fixed)
        if not fixed:
            self._group.describe(forms.outgoing, count)
            if not self.module.dynamic_shape:
                self._known[key] = forms
        return batches if self._pp.rank == 0 else take()


def _key(batches: Sequence[StageBatch], training: bool) -> int:
    """A number for the shapes of a batch's inputs, at least 0."""

    def shape(value: Tensor) -> str:
        return f"{tuple(value.shape)} {value.dtype}"

    parts = [
        [shape(batch.inputs)] if isinstance(batch.inputs, Tensor) else [*map(shape, batch.inputs), "tuple"]
        for batch in batches
    ]
    digest = hashlib.blake2b(repr((training, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
