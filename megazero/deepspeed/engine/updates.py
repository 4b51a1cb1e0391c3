"""`Updates`: an engine's `step`, which updates the weights after the last micro-batch of an accumulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megazero.config.deepspeed.batch import BatchTriangle
from megazero.deepspeed.asserted import asserts
from megazero.deepspeed.engine.gradients import Accumulation
from megazero.deepspeed.engine.report import EngineStep
from megazero.deepspeed.engine.state import EngineState
from megazero.deepspeed.optimizers.grouped_rule import rate_of
from megazero.errors import ConfigError, MegazeroError


class Updates:
    """An engine's `step`, and its batch sizes.

    Args:
        accumulation: the gradients so far.
    """

    def __init__(self, state: EngineState, accumulation: Accumulation):
        self.state, self._accumulation = state, accumulation
        self._applied = self._compiled = False

    @asserts
    def step(self, lr_kwargs: Mapping[str, object] | None = None) -> None:
        """End a micro-batch; at the last one of an accumulation, update. Every rank calls this.

        Args:
            lr_kwargs: keyword arguments of the schedule's `step`.

        Raises:
            MegazeroError: there was no backward since the last call, or the call is within `no_sync`.
        """
        self._accumulation.must_train("step")
        if not self._accumulation.sync:
            raise MegazeroError("`step` must be called outside of `no_sync`, but is within; leave it first")
        if self.state.backwards == 0 and not self._adopt():
            raise MegazeroError("`step` must follow a backward, but there was none; call `engine.backward`")
        self.state.backwards, self._applied = 0, False
        if self._accumulation.is_last():
            self.update(lr_kwargs or {})
        self.state.micro_steps += 1

    def update(self, lr_kwargs: Mapping[str, object]) -> None:
        """Update the weights, and report the step."""
        state, states, reporter = self.state, self.state.states, self.state.reporter
        scale, rates = states.cur_scale, tuple(map(rate_of, states.param_groups))
        if self._accumulation.shown is not None:
            self._accumulation.shown.hide()
        states.begin()  # in case the script has called `zero_grad` since the backward
        with reporter.phase("step"):
            states.step()
        states.parallel.arrived.clear()
        self._applied = not states.overflow
        state.skipped_steps += not self._applied
        if self._applied and state.lr_scheduler is not None:
            state.lr_scheduler.step(**lr_kwargs)
        state.global_steps += 1
        if (compression := state.module.__dict__.get("compression_scheduler")) is not None:
            compression.step(state.global_steps)
        state.global_samples += state.settings.batch.train
        reporter.tput_timer.stop(global_step=True, report_speed=False)
        reporter.tput_timer.start()
        if reporter.wants(state.global_steps):
            report, loss = states.report, state.mean_loss(state.losses) if state.losses else None
            assert report is not None, "there has been a step"
            progress = state.progress()
            reporter.step(EngineStep(progress, loss, report.grad_norm, rates, scale, self._applied))
        state.losses = []

    def was_step_applied(self) -> bool:
        """Whether the last `step` updated the weights."""
        return self._applied

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples per update, samples per micro-batch, and micro-batches per update of a rank."""
        batch = self.state.settings.batch
        return batch.train, batch.micro, batch.accumulation

    def compile(
        self,
        backend: object = "inductor",
        compile_kwargs: Mapping[str, object] | None = None,
        schedule: object = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the module's forward with torch; compilation takes place at its first call.

        Args:
            backend: as in `torch.compile`.
            compile_kwargs: further arguments of `torch.compile`.
            schedule, compiled_autograd_enabled: refused, because they belong to DeepCompile.

        Raises:
            ConfigError: one of the refused arguments is given.
        """
        if schedule is not None or compiled_autograd_enabled:
            raise ConfigError(
                "`schedule` and `compiled_autograd_enabled` must be left out, as they rewrite gathers of "
                "DeepSpeed's, but one is given; pass `backend` alone"
            )
        self.state.module.compile(backend=backend, **(compile_kwargs or {}))
        self._compiled = True

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` has been called."""
        return self._compiled

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples per update, by another number of accumulation steps.

        Raises:
            ConfigError: it is not a multiple of the micro-batches of all ranks.
        """
        batch, ranks = self.state.settings.batch, self.state.context.data.size
        steps, rest = divmod(train_batch_size, batch.micro * ranks)
        if rest or steps < 1:
            raise ConfigError(
                f"`train_batch_size` must be a multiple of {batch.micro} samples x {ranks} ranks, but is "
                f"{train_batch_size}; choose a multiple of {batch.micro * ranks}"
            )
        self._set_batch(BatchTriangle(train_batch_size, batch.micro, steps))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples per micro-batch; the samples per update change in proportion.

        Raises:
            ConfigError: it is not positive.
        """
        if micro_batch_size < 1:
            raise ConfigError(f"`micro_batch_size` must be at least 1, but is {micro_batch_size}; raise it")
        steps = self.state.settings.batch.accumulation
        train = micro_batch_size * steps * self.state.context.data.size
        self._set_batch(BatchTriangle(train, micro_batch_size, steps))

    def _set_batch(self, batch: BatchTriangle) -> None:
        self.state.settings = replace(self.state.settings, batch=batch)
        self.state.reporter.settings = self.state.settings

    def _adopt(self) -> bool:
        """Collect gradients that the script has set itself, at stage 0; returns whether there are any.

        They are means over the accumulation, times the loss scale, as a backward leaves them.
        """
        states, accumulation = self.state.states, self._accumulation
        trained = (param for group in states.param_groups for param in group["params"])
        params = [param for param in trained if param.grad is not None]
        if accumulation.shown is None or not params:
            return False
        accumulation.begin(states.loss_factor / states.cur_scale)
        for param in params:
            states.parallel.collect(param)
        accumulation.end()
        return True
