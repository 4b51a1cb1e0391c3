"""`PipelineEngine`: trains a `PipelineModule` batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megazero.deepspeed.data import RepeatingLoader, to_half
from megazero.deepspeed.engine import DeepSpeedEngine
from megazero.deepspeed.pipe import schedule
from megazero.deepspeed.pipe.feed import PipelineFeed
from megazero.deepspeed.pipe.module import PipelineStage
from megazero.deepspeed.pipe.runner import StageRunner
from megazero.deepspeed.pipe.specs import PipelineError
from megazero.deepspeed.pipe.ties import PipelineParallel
from megazero.errors import ConfigError
from megazero.mpu.messages import gather_values
from megazero.pipeline.actions import Op


class PipelinePlace:
    """The place of an engine's rank in the pipeline."""

    module: Any

    @property
    def grid(self) -> Any:
        """This rank's place and its groups."""
        return self.module.mpu()

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return int(self.module.num_stages)

    @property
    def stage_id(self) -> int:
        """This rank's stage."""
        return int(self.module.stage_id)

    def is_first_stage(self) -> bool:
        """Whether this rank holds the first layers."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Whether this rank holds the last layers, and computes the loss."""
        return bool(self.module.is_last_stage)

    def get_pipeline_parallel_rank(self) -> int:
        """This rank's stage."""
        return self.stage_id

    @property
    def is_pipe_parallel(self) -> bool:
        """Whether there is more than one stage."""
        return self.num_stages > 1

    @property
    def is_data_parallel(self) -> bool:
        """Whether there is more than one pipeline."""
        return bool(self.grid.data_parallel_size > 1)

    @property
    def is_model_parallel(self) -> bool:
        """Whether layers are sliced over ranks."""
        return bool(self.grid.model_parallel_size > 1)


class PipelineEngine(PipelinePlace, PipelineFeed, DeepSpeedEngine):
    """Trains a `PipelineModule`: ``loss = engine.train_batch(data_iter)``.

    All stages of ZeRO work. Checkpoints load on any number of stages.

    Attributes:
        agg_train_loss: the loss of the last batch, the same on all ranks; None before the first.
        agg_additional_losses: further losses of that batch, by name, or None.
    """

    pipeline_parallelism = True

    _INSTRUCTION_MAP: Mapping[type[schedule.PipeInstruction], Op | str] = MappingProxyType(
        {
            schedule.ForwardPass: Op.FORWARD,
            schedule.BackwardPass: Op.BACKWARD,
            schedule.ReduceGrads: Op.REDUCE,
            schedule.LoadMicroBatch: "StageBatch",
            **dict.fromkeys((schedule.SendActivation, schedule.RecvActivation), "Exchange"),
            **dict.fromkeys((schedule.SendGrad, schedule.RecvGrad), "Exchange"),
            schedule.ReduceTiedGrads: "PipelineParallel.finish",
            schedule.OptimizerStep: "DeepSpeedOptimizer.step",
        }
    )

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.reads = (self.is_first_stage(), self.is_last_stage())
        self.with_labels = self.module.loss_fn is not None
        self.has_attention_mask = False
        self.agg_train_loss: Tensor | None = None
        self.agg_additional_losses: dict[str, Tensor] | None = None
        self.training_dataloader = None
        if self.given.training_data is not None:
            in_order = self.deepspeed_io(self.given.training_data, route="eval")
            self.set_dataloader(RepeatingLoader(in_order))
        parallel = self.states.parallel
        assert isinstance(parallel, PipelineParallel), "`make_engine` lays a stage out"
        self._runner = StageRunner(self.module, parallel, self.settings.zero, self._compute)

    @property
    def micro_batches(self) -> int:
        """Micro-batches per batch of one pipeline."""
        return self.gradient_accumulation_steps()

    @property
    def micro_batch_size(self) -> int:
        """Samples per micro-batch."""
        return self.train_micro_batch_size_per_gpu()

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:  # type: ignore[override]
        """Forward, backward and update for the next `micro_batches` micro-batches; every rank calls this.

        Args:
            data_iter: gives pairs (inputs, labels) on the first and the last stage, the same on both. By
                default, that of `set_dataiterator`, of `set_dataloader` or of `training_data`.

        Returns:
            The mean loss over micro-batches and pipelines, a tensor of no dims, the same on all ranks.

        Raises:
            DataError: the iterator ended, or a micro-batch is not such a pair.
            PipelineError: gradients are off, or see `StageRunner.train`.
        """
        if not torch.is_grad_enabled():
            raise PipelineError(
                "`train_batch` must be called with gradients enabled, but they are off; call `eval_batch` to "
                "compute losses only"
            )
        self._must_train("train_batch")
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.module.train()
        count, states = self.micro_batches, self.states
        states.begin()
        factor, step = states.loss_factor / count, states.shards.updates
        try:
            profiling = self._reporter.profiling(self.module, self.global_steps + 1)
            with self._reporter.timers("forward-backward"), self._reporter.counting(), profiling:
                sums = self._runner.train(lambda: self.take(self.data_iterator, count), count, factor, step)
        except BaseException:
            self._drop()
            raise
        total = sums.terms / count
        self.context.pp.all_reduce(total).wait()  # zero on all stages but the last
        self.context.batch.all_reduce(total).wait()
        self.agg_train_loss = loss = (total[0] / self.context.batch.size).float()
        self.agg_additional_losses = self._additional(sums.tallies, count)
        self.micro_steps += count
        self._applied = False
        self._losses = [loss]
        self._update({})
        return loss

    @torch.no_grad()
    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Forward of the next micro-batches; every rank calls this. It leaves the module in eval mode.

        Args:
            data_iter: as in `train_batch`; micro-batches may have other sizes than there.
            return_logits: return the last layer's output of the last micro-batch, too.
            compute_loss: call the loss function; otherwise the last layer's output is what counts.
            reduce_output: ``avg`` for the mean over micro-batches and pipelines, item by item where there are
                several; None for a list of each micro-batch's.
            bcast_loss: bring losses to all stages.
            num_micro_batches: how many there are; by default `micro_batches`.

        Returns:
            The loss or the output, and None on the stages that do not have it; with `return_logits` a pair of
            that and the logits, which are None on all stages but the last.

        Raises:
            ConfigError: `reduce_output` is neither.
            DataError: as for `train_batch`.
            PipelineError: losses to bring to all stages are no scalars.
        """
        if reduce_output not in ("avg", None):
            raise ConfigError(f"`reduce_output` must be avg or None, but is {reduce_output!r}; choose one")
        self.module.eval()
        count = num_micro_batches or self.micro_batches
        outputs = self._runner.evaluate(lambda: self.take(data_iter, count), count, compute_loss)
        result: Any = outputs.values if self.is_last_stage() else None
        if self.is_last_stage() and reduce_output == "avg":
            result = self._mean(result)
        if compute_loss and bcast_loss:
            result = self._spread(result)
        return (result, outputs.logits) if return_logits else result

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refused. Raises PipelineError."""
        raise PipelineError(_WHOLE_BATCHES.format("forward"))

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Refused. Raises PipelineError."""
        raise PipelineError(_WHOLE_BATCHES.format("backward"))

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Refused. Raises PipelineError."""
        raise PipelineError(_WHOLE_BATCHES.format("step"))

    def reset_activation_shape(self) -> None:
        """Forget the forms of messages between stages; every rank calls this.

        New shapes of inputs need no call. Unfreezing layers does.
        """
        self._runner.forget()

    def set_has_attention_mask(self, value: bool) -> None:
        """Note that inputs have a mask. Changes nothing: tensors of any dtype are sent."""
        self.has_attention_mask = value

    def get_additional_losses(self) -> dict[str, Tensor] | None:
        """The means of what the module's `get_additional_losses` gave in the last batch."""
        return self.agg_additional_losses

    def _compute(self, inputs: Any) -> Any:
        if self.settings.extras.auto_cast:
            inputs = to_half(inputs)
        return self.module(inputs)

    def _mean_loss(self, losses: list[Tensor]) -> float:
        return float(losses[0])  # which is the mean over all ranks already

    def _additional(self, tallies: Mapping[str, Tensor], count: int) -> dict[str, Tensor] | None:
        if type(self.module).get_additional_losses is PipelineStage.get_additional_losses:
            return None
        mine = {name: float(total) / count for name, total in tallies.items()}
        everyone = gather_values(self.context.batch, mine, self.device) if self.is_last_stage() else []
        mean = {name: sum(means[name] for means in everyone) / len(everyone) for name in mine}
        (*_, last) = gather_values(self.context.pp, mean, self.device)
        return {name: torch.tensor(value, device=self.device) for name, value in last.items()} or None

    def _mean(self, values: list[Any]) -> Any:
        """The mean over micro-batches and pipelines, of each item if there are several."""
        if not isinstance(values[0], Tensor):
            kind = type(values[0])
            return kind(self._mean(list(items)) for items in zip(*values, strict=True))
        total = torch.stack([value.float() for value in values]).mean(0)
        self.context.batch.all_reduce(total).wait()
        return total / self.context.batch.size

    def _spread(self, result: Any) -> Any:
        """Bring the last stage's losses to the others."""
        values = result if isinstance(result, (tuple, list)) else [result]
        message: dict[str, Any] = {}
        if self.is_last_stage():
            if not all(isinstance(value, Tensor) and value.numel() == 1 for value in values):
                message["problem"] = "losses must be scalars to be brought to all stages, but are not; "
            else:
                message = {"values": [float(v) for v in values], "alone": result is not values}
        (*_, last) = gather_values(self.context.pp, message, self.device)
        if "problem" in last:
            raise PipelineError(last["problem"] + "pass `bcast_loss=False`")
        losses = [torch.tensor(value, device=self.device) for value in last["values"]]
        return losses[0] if last["alone"] else losses


_WHOLE_BATCHES = (
    "`{}` must be left to the pipeline, which computes whole batches, but was called by the script; call "
    "`train_batch` or `eval_batch`"
)
