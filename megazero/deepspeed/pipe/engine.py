"""`PipelineEngine`: train a `PipelineModule` batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor

from megazero.deepspeed.engine.data import RepeatingLoader, to_half
from megazero.deepspeed.engine.engine import DeepSpeedEngine
from megazero.deepspeed.engine.state import EngineState
from megazero.deepspeed.pipe import schedule
from megazero.deepspeed.pipe.chunk import StageBatch
from megazero.deepspeed.pipe.feed import PipelineFeed, StagePosition
from megazero.deepspeed.pipe.module import PipelineStage
from megazero.deepspeed.pipe.runner import StageRunner
from megazero.deepspeed.pipe.specs import PipelineError
from megazero.deepspeed.pipe.ties import PipelineParallel
from megazero.deepspeed.utils.parts import made_of
from megazero.errors import ConfigError
from megazero.mpu.messages import gather_values
from megazero.pipeline.actions import Op


@made_of(
    {
        "_feed": (
            PipelineFeed,
            "reads with_labels data_iterator batch_fn training_dataloader take set_dataloader "
            "set_dataiterator set_batch_fn",
        ),
        "_position": (
            StagePosition,
            "grid num_stages stage_id is_first_stage is_last_stage get_pipeline_parallel_rank "
            "is_pipe_parallel is_data_parallel is_model_parallel",
        ),
    }
)
class PipelineEngine(DeepSpeedEngine):
    """Trains a `PipelineModule`: ``loss = engine.train_batch(data_iter)``.

    Every ZeRO stage works. Checkpoints load on any number of pipeline stages.

    Attributes:
        agg_train_loss: the loss of the last batch, the same on all ranks; None before the first.
        agg_additional_losses: the means of the module's `get_additional_losses` in the last batch, or None.
    """

    pipeline_parallelism = True
    module: PipelineStage

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

    def __init__(self, state: EngineState):
        super().__init__(state)
        self._position = StagePosition(self.module)
        reads = self._position.is_first_stage(), self._position.is_last_stage()
        self._feed = PipelineFeed(reads, with_labels=self.module.loss_fn is not None)
        self.has_attention_mask = False
        self.agg_train_loss: Tensor | None = None
        self.agg_additional_losses: dict[str, Tensor] | None = None
        state.losses_are_means = True
        if state.arguments.training_data is not None:
            in_order = self._batches.deepspeed_io(state.arguments.training_data, route="eval")
            self._feed.set_dataloader(RepeatingLoader(in_order))
        parallel = state.states.parallel
        assert isinstance(parallel, PipelineParallel), "`make_engine` builds it"
        self._runner = StageRunner(self.module, parallel, state.settings.zero, self._compute)

    @property
    def micro_batches(self) -> int:
        """Micro-batches per batch and pipeline."""
        return self._state.settings.batch.accumulation

    @property
    def micro_batch_size(self) -> int:
        """Samples per micro-batch."""
        return self._state.settings.batch.micro

    def train_batch(self, data_iter: Iterator[object] | None = None) -> Tensor:
        """Train on the next `micro_batches` micro-batches; every rank calls this.

        Args:
            data_iter: yields the same pairs (inputs, labels) on the first and on the last stage. By default
                that of `set_dataiterator`, `set_dataloader` or `training_data`.

        Returns:
            The mean loss over micro-batches and pipelines, a scalar, the same on all ranks.

        Raises:
            DataError: the iterator ended, or a micro-batch is no such pair.
            PipelineError: gradients are disabled; or see `StageRunner.train`.
        """
        if not torch.is_grad_enabled():
            raise PipelineError(
                "`train_batch` must be called with gradients enabled, but they are off; call `eval_batch` to "
                "compute losses only"
            )
        state, states, reporter = self._state, self._state.states, self._state.reporter
        self._accumulation.must_train("train_batch")
        if data_iter is not None:
            self._feed.set_dataiterator(data_iter)
        self.module.train()
        count = self.micro_batches
        states.begin()
        factor, step = states.loss_factor / count, states.shards.updates

        def take() -> list[StageBatch]:
            return self._feed.take(self._feed.data_iterator, count)

        try:
            profiling = reporter.profiling(self.module, state.global_steps + 1)
            with reporter.timers("forward-backward"), reporter.counting(), profiling:
                sums = self._runner.train(take, count, factor, step)
        except BaseException:
            self._accumulation.drop()
            raise
        total = sums.terms / count
        state.context.pp.all_reduce(total).wait()  # zero on all stages but the last
        state.context.batch.all_reduce(total).wait()
        self.agg_train_loss = loss = (total[0] / state.context.batch.size).float()
        self.agg_additional_losses = self._additional(sums.tallies, count)
        state.micro_steps += count
        state.losses = [loss]
        self._updates.update({})
        return loss

    @torch.no_grad()
    def eval_batch(
        self,
        data_iter: Iterator[object],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Evaluate the next micro-batches; every rank calls this. The module stays in evaluation mode.

        Args:
            data_iter: as in `train_batch`; micro-batches may have other shapes.
            return_logits: also return the output of the last micro-batch.
            compute_loss: return losses; otherwise outputs of the last layer.
            reduce_output: ``avg`` for the mean over micro-batches and pipelines (of each item of a tuple);
                None for the list of all micro-batches' results.
            bcast_loss: broadcast losses to all stages.
            num_micro_batches: the number of micro-batches; by default `micro_batches`.

        Returns:
            The loss or the output, None on stages without it; with `return_logits` a pair of that and the
            logits, which are None on all stages but the last.

        Raises:
            ConfigError: `reduce_output` is neither ``avg`` nor None.
            DataError: as for `train_batch`.
            PipelineError: losses to broadcast are no scalars.
        """
        if reduce_output not in ("avg", None):
            raise ConfigError(f"`reduce_output` must be avg or None, but is {reduce_output!r}; choose one")
        self.module.eval()
        count = num_micro_batches or self.micro_batches
        outputs = self._runner.evaluate(lambda: self._feed.take(data_iter, count), count, compute_loss)
        result: object = None
        if self._position.is_last_stage():
            result = self._mean(outputs.values) if reduce_output == "avg" else outputs.values
        if compute_loss and bcast_loss:
            result = self._broadcast(result)
        return (result, outputs.logits) if return_logits else result

    def forward(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise PipelineError: the script must not call this."""
        raise PipelineError(_WHOLE_BATCHES.format("forward"))

    def backward(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise PipelineError: the script must not call this."""
        raise PipelineError(_WHOLE_BATCHES.format("backward"))

    def step(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise PipelineError: the script must not call this."""
        raise PipelineError(_WHOLE_BATCHES.format("step"))

    def reset_activation_shape(self) -> None:
        """Forget the shapes of messages between stages; every rank calls this.

        It must be called after layers are unfrozen. New shapes of inputs are noticed without it.
        """
        self._runner.forget()

    def set_has_attention_mask(self, value: bool) -> None:
        """Set `has_attention_mask`, which has no effect: tensors of any dtype can be sent."""
        self.has_attention_mask = value

    def get_additional_losses(self) -> dict[str, Tensor] | None:
        """The means of the module's `get_additional_losses` in the last batch."""
        return self.agg_additional_losses

    def _compute(self, inputs: object) -> object:
        if self._state.settings.extras.auto_cast:
            inputs = to_half(inputs)
        return self.module(inputs)

    def _additional(self, tallies: Mapping[str, Tensor], count: int) -> dict[str, Tensor] | None:
        if type(self.module).get_additional_losses is PipelineStage.get_additional_losses:
            return None
        context, own = self._state.context, {name: float(total) / count for name, total in tallies.items()}
        everyone = gather_values(context.batch, own, context.device) if self._position.is_last_stage() else []
        mean = {name: sum(means[name] for means in everyone) / len(everyone) for name in own}
        (*_, last) = gather_values(context.pp, mean, context.device)
        return {name: torch.tensor(value, device=context.device) for name, value in last.items()} or None

    def _mean(self, values: list[Any]) -> object:
        """The mean over micro-batches and pipelines, of each item of a tuple."""
        if not isinstance(values[0], Tensor):
            kind = type(values[0])
            return kind(self._mean(list(items)) for items in zip(*values, strict=True))
        total = torch.stack([value.float() for value in values]).mean(0)
        self._state.context.batch.all_reduce(total).wait()
        return total / self._state.context.batch.size

    def _broadcast(self, result: Any) -> Tensor | list[Tensor]:
        """Broadcast the last stage's losses to all stages."""
        values = result if isinstance(result, (tuple, list)) else [result]
        message: dict[str, Any] = {}
        if self._position.is_last_stage():
            if not all(isinstance(value, Tensor) and value.numel() == 1 for value in values):
                message["problem"] = "losses must be scalars to be brought to all stages, but are not; "
            else:
                message = {"values": [float(v) for v in values], "alone": result is not values}
        (*_, last) = gather_values(self._state.context.pp, message, self._state.context.device)
        if "problem" in last:
            raise PipelineError(last["problem"] + "pass `bcast_loss=False`")
        losses = [torch.tensor(value, device=self._state.context.device) for value in last["values"]]
        return losses[0] if last["alone"] else losses


_WHOLE_BATCHES = (
    "`{}` must be left to the pipeline, which computes whole batches, but was called by the script; call "
    "`train_batch` or `eval_batch`"
)
