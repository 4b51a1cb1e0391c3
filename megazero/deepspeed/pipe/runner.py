"""`StageRunner`: run batches through this rank's stage, after the stages have agreed on shapes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from megazero.config.tree.zero import ZeroConfig
from megazero.deepspeed.pipe.chunk import Outputs, StageBatch, StageChunk
from megazero.deepspeed.pipe.feed import DataEnded
from megazero.deepspeed.pipe.messages import DescribingGroup, MessageSpecs
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
    """Runs one stage of the pipeline.

    The specs of messages between stages are sent with the first batch of certain input shapes, and are known
    from then on. With `dynamic_shape` they are sent with every batch.

    Args:
        module: the stage.
        parallel: the stage's data parallelism.
        zero: the ZeRO stage, and whether reductions of gradients overlap with backward.
        compute: calls the module on its input.
    """

    def __init__(
        self,
        module: PipelineStage,
        parallel: PipelineParallel,
        zero: ZeroConfig,
        compute: Callable[[object], object],
    ):
        context = module.context
        self.module, self._pp, self._device = module, context.pp, context.device
        self._group = DescribingGroup(context.pp, context.device)
        self._chunk = StageChunk(module, self._group, compute)
        self._known: dict[int, MessageSpecs] = {}
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
        """Run forward and backward of a batch.

        Args:
            take: reads the micro-batches.
            count: the number of micro-batches.
            factor: multiplies each micro-batch's loss before backward.
            step: the number of the step.

        Raises:
            DataError: on every stage, if the first one has no data; see `PipelineFeed`.
            PipelineError: a stage's output cannot be sent, or the loss is no scalar.
        """
        batches = self._agree(take, count, training=True)
        factors = torch.full((1,), factor, device=self._device)
        try:
            return self._executor.train(self._program("1f1b", count), batches, factors, step)
        finally:
            self._group.stop_specs()

    def evaluate(self, take: Callable[[], list[StageBatch]], count: int, with_loss: bool) -> Outputs:
        """Run forward of a batch; the last stage's results. It raises the same errors as `train`."""
        self._chunk.outputs = outputs = Outputs(with_loss)
        batches = self._agree(take, count, training=False)
        try:
            self._executor.evaluate(self._program("forward", count), batches)
        finally:
            self._group.stop_specs()
            self._chunk.outputs = Outputs()
        return outputs

    def forget(self) -> None:
        """Forget all specs of messages, so that they are sent again; every rank calls this."""
        self._known.clear()

    def _agree(self, take: Callable[[], list[StageBatch]], count: int, *, training: bool) -> list[StageBatch]:
        """Read the micro-batches, and broadcast a hash of the first stage's input shapes to all stages."""
        if self._pp.size == 1:
            return take()
        batches: list[StageBatch] = []
        key, error = _ENDED, None
        if self._pp.rank == 0:
            try:
                batches = take()
                key = _key(batches, training)
            except DataError as raised:  # the other stages must not wait for activations
                error = raised
        message = torch.tensor([key, key in self._known], dtype=torch.int64, device=self._device)
        self._pp.broadcast(message, 0).wait()
        key, known = message.tolist()
        if key == _ENDED:
            raise error or DataEnded("the first stage must have data, but has none; its rank says why")
        if known and key not in self._known:
            raise PipelineError(
                "`reset_activation_shape` must be called on every rank, but was not called on the first "
                "stage; call it everywhere"
            )
        specs = self._known[key] if known else MessageSpecs()
        self._chunk.specs, self._chunk.specs_known = specs, bool(known)
        if not known:
            self._group.send_specs(specs.outgoing, count)
            if not self.module.dynamic_shape:
                self._known[key] = specs
        return batches if self._pp.rank == 0 else take()


def _key(batches: Sequence[StageBatch], training: bool) -> int:
    """A hash of the shapes of a batch's inputs, at least 0."""

    def shape(value: Tensor) -> str:
        return f"{tuple(value.shape)} {value.dtype}"

    parts = [
        [shape(batch.inputs)]
        if isinstance(batch.inputs, Tensor)
        else [*map(shape, batch.inputs or ()), "tuple"]
        for batch in batches
    ]
    digest = hashlib.blake2b(repr((training, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
