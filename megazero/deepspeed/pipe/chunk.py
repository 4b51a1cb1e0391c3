"""`StageChunk`: adapt a stage of a `PipelineModule` to our executor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megazero.deepspeed.engine.data import map_tensors, tensors_of
from megazero.deepspeed.pipe.messages import DescribingGroup, MessageSpec, MessageSpecs, Pack, Unpack
from megazero.deepspeed.pipe.module import PipelineStage
from megazero.deepspeed.pipe.specs import PipelineError
from megazero.loss import LossTerm
from megazero.ops.autograd import apply
from megazero.pipeline.chunk import Boundary, Chunk, ChunkResult, Deferred

LOSS = "loss"


@dataclass(frozen=True)
class StageBatch:
    """The part of a micro-batch that a stage needs.

    Attributes:
        number: its number within the batch.
        inputs: on the first stage, a tensor or a tuple of tensors; else None.
        labels: on the last stage, the labels for the loss function; else None.
    """

    number: int
    inputs: Tensor | tuple[Tensor, ...] | None = None
    labels: object = None


@dataclass
class Outputs:
    """The last stage's results in an evaluation.

    Attributes:
        with_loss: whether the loss function is called.
        values: the loss of each micro-batch, or its output.
        logits: the output of the last micro-batch.
    """

    with_loss: bool = True
    values: list[object] = field(default_factory=list)
    logits: object = None


class StageChunk(Chunk[StageBatch]):
    """The layers of one stage; see `megazero.pipeline.chunk.Chunk`.

    Args:
        module: the stage.
        group: the group of the pipeline's stages.
        compute: calls the module on its input.

    Attributes:
        specs: the specs of this batch's messages.
        specs_known: whether they are known from an earlier batch.
        outputs: the results of an evaluation.
    """

    terms = (LossTerm(LOSS),)

    def __init__(self, module: PipelineStage, group: DescribingGroup, compute: Callable[[object], object]):
        self.module = module
        self.group = group
        self.compute = compute
        self.specs, self.specs_known = MessageSpecs(), False
        self.outputs = Outputs()

    def input_boundary(self, batch: StageBatch) -> Boundary:
        """The tensor that the previous stage sends; waits for its spec if that is not known."""
        if not self.specs_known:
            self.specs.incoming[batch.number] = self.group.receive_spec()
        return self.specs.incoming[batch.number].boundary

    def output_boundary(self, batch: StageBatch) -> Boundary:
        """The tensor that was sent to the next stage."""
        return self.specs.outgoing[batch.number].boundary

    def run(self, batch: StageBatch, hidden: Tensor | None, *, deferred: Deferred | None) -> ChunkResult:
        """Compute the stage for a micro-batch."""
        assert deferred is None, "a user's layers defer no weight gradients"
        if hidden is None:
            inputs = self._first_inputs(batch.inputs)
            token = torch.zeros((), device=self.module.context.device, requires_grad=torch.is_grad_enabled())
        else:
            spec = self.specs.incoming[batch.number]
            token, *tensors = apply(Unpack, hidden, spec)
            inputs = tensors[0] if spec.single else tuple(tensors)
        output = self.compute(inputs)
        if self.module.is_last_stage:
            return self._loss(output, self._copy(batch.labels), token)
        spec = self._spec(output, batch.number)
        return ChunkResult(apply(Pack, token, spec, *tensors_of(output)))

    def _first_inputs(self, value: Tensor | tuple[Tensor, ...] | None) -> object:
        inputs = self._copy(value)
        if self.module.activation_checkpoint_interval and torch.is_grad_enabled():
            # A reentrant recomputation computes no gradients unless an input requires one.
            return map_tensors(inputs, lambda t: t.requires_grad_(t.is_floating_point()))
        return inputs

    def _copy(self, value: object) -> object:
        """Copy to the device, because layers and losses may change their inputs in place."""
        device = self.module.context.device
        if isinstance(value, list):
            value = tuple(value)
        return map_tensors(value, lambda t: t.detach().to(device, copy=True))

    def _spec(self, output: object, number: int) -> MessageSpec:
        """The spec of an output, which must be the one that the next stage expects."""
        layer = self.module.last_layer
        spec = MessageSpec.of(output, layer)
        known = self.specs.outgoing.setdefault(number, spec)
        if known != spec:
            raise PipelineError(
                f"`dynamic_shape` must be True where shapes depend on more than those of the inputs, but is "
                f"False, and {layer} gave {_shown(known)} before and gives {_shown(spec)} now; pass "
                "`dynamic_shape=True` to PipelineModule"
            )
        return spec

    def _loss(self, output: object, labels: object, token: Tensor) -> ChunkResult:
        """Compute the last stage's loss."""
        loss = output
        if self.module.loss_fn is not None and (self.outputs.with_loss or torch.is_grad_enabled()):
            loss = self.module.loss_fn(output, labels)
        if not torch.is_grad_enabled():
            self.outputs.values.append(loss)
            self.outputs.logits = output
            return ChunkResult(None)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shown = f"tensor of {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            what = "`loss_fn`" if self.module.loss_fn is not None else "the last layer, without a `loss_fn`,"
            raise PipelineError(
                f"{what} must give a scalar to train on, but gives a {shown}; return the mean alone"
            )
        return ChunkResult(None, {LOSS: loss.float().reshape(()) + 0 * token.float()}, self._additional())

    def _additional(self) -> Mapping[str, Tensor]:
        losses = self.module.get_additional_losses() or {}
        return {name: torch.as_tensor(loss).detach().float() for name, loss in losses.items()}


def _shown(spec: MessageSpec) -> str:
    return ", ".join(f"{list(item.shape)} {item.dtype}" for item in spec.items) or "nothing"
