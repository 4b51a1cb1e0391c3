"""A stage of a `PipelineModule` as our executor sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megazero.deepspeed.engine.data import map_tensors
from megazero.deepspeed.pipe.messages import DescribingGroup, Form, Forms, Pack, Unpack
from megazero.deepspeed.pipe.module import PipelineStage
from megazero.deepspeed.pipe.specs import PipelineError
from megazero.loss import LossTerm
from megazero.ops.autograd import apply
from megazero.pipeline.chunk import Boundary, Chunk, ChunkResult, Deferred

LOSS = "loss"


@dataclass(frozen=True)
class StageBatch:
    """One micro-batch, as far as this stage needs it.

    Attributes:
        number: its number within the batch.
        inputs: the first stage's input: a tensor or a tuple of tensors.
        labels: what the last stage's loss function is given beside the output.
    """

    number: int
    inputs: Any = None
    labels: Any = None


@dataclass
class Outputs:
    """The results of the last stage in an evaluation.

    Attributes:
        with_loss: whether the loss function is called.
        values: the loss of each micro-batch, or its output.
        logits: the output of the last micro-batch.
    """

    with_loss: bool = True
    values: list[Any] = field(default_factory=list)
    logits: Any = None


class StageChunk(Chunk[StageBatch]):
    """The layers of one stage; see `megazero.pipeline.chunk.Chunk`.

    Args:
        module: the stage.
        group: the stages of the pipeline.
        compute: calls the module on its input.

    Attributes:
        forms: the forms of the messages of this batch.
        fixed: whether they are known from an earlier batch.
        outputs: what an evaluation keeps.
    """

    terms = (LossTerm(LOSS),)

    def __init__(self, module: PipelineStage, group: DescribingGroup, compute: Callable[[Any], Any]):
        self.module = module
        self.group = group
        self.compute = compute
        self.forms, self.fixed = Forms(), False
        self.outputs = Outputs()

    def input_boundary(self, batch: StageBatch) -> Boundary:
        """The tensor that comes from the stage before; waits for its form where that is not known."""
        if not self.fixed:
            self.forms.incoming[batch.number] = self.group.receive_form()
        return self.forms.incoming[batch.number].boundary

    def output_boundary(self, batch: StageBatch) -> Boundary:
        """The tensor that went to the next stage."""
        return self.forms.outgoing[batch.number].boundary

    def run(self, batch: StageBatch, hidden: Tensor | None, *, deferred: Deferred | None) -> ChunkResult:
        """Compute the stage for a micro-batch."""
        assert deferred is None, "layers of others do not defer weight gradients"
        if hidden is None:
            inputs = self._first(batch.inputs)
            token = torch.zeros((), device=self.module.context.device, requires_grad=torch.is_grad_enabled())
        else:
            form = self.forms.incoming[batch.number]
            token, *tensors = apply(Unpack, hidden, form)
            inputs = tensors[0] if form.single else tuple(tensors)
        output = self.compute(inputs)
        if self.module.is_last_stage:
            return self._end(output, self._own(batch.labels), token)
        form = self._form(output, batch.number)
        tensors = [output] if form.single else list(output)
        return ChunkResult(apply(Pack, token, form, *tensors))

    def _first(self, value: Any) -> Any:
        inputs = self._own(value)
        if self.module.activation_checkpoint_interval and torch.is_grad_enabled():
            # A reentrant function computes no gradients unless some input needs one.
            return map_tensors(inputs, lambda t: t.requires_grad_(t.is_floating_point()))
        return inputs

    def _own(self, value: Any) -> Any:
        """A copy on the device: layers and losses may change what they are given in place."""
        device = self.module.context.device
        if isinstance(value, list):
            value = tuple(value)
        return map_tensors(value, lambda t: t.detach().to(device, copy=True))

    def _form(self, output: Any, number: int) -> Form:
        layer = self.module.last_layer
        form = Form.of(output, layer)
        known = self.forms.outgoing.setdefault(number, form)
        if known != form:
            raise PipelineError(
                f"`dynamic_shape` must be True where shapes depend on more than those of the inputs, but is "
                f"False, and {layer} gave {_shown(known)} before and gives {_shown(form)} now; pass "
                "`dynamic_shape=True` to PipelineModule"
            )
        return form

    def _end(self, output: Any, labels: Any, token: Tensor) -> ChunkResult:
        """The last stage's loss."""
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


def _shown(form: Form) -> str:
    return ", ".join(f"{list(item.shape)} {item.dtype}" for item in form.items) or "nothing"
