"""The reports of the engine for a user's module: lines on standard output, and monitors."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from torch.utils.flop_counter import FlopCounterMode

from megazero.config.tree.config import Config
from megazero.deepspeed.settings import UserSettings
from megazero.loss import LossTerm
from megazero.mpu.context import ParallelContext
from megazero.mpu.traffic import TrafficLog
from megazero.train.observe.metrics import StepMetrics
from megazero.train.observe.monitors.base import CompositeMonitor, Monitor
from megazero.train.observe.monitors.csv_file import CsvMonitor
from megazero.train.observe.monitors.tensorboard import TensorBoardMonitor
from megazero.train.observe.monitors.weights_and_biases import WandbMonitor
from megazero.train.step.losses import Losses
from megazero.train.step.timers import Timers


@dataclass(frozen=True)
class StepFacts:
    """One optimizer step, as an engine knows it.

    Attributes:
        step: its number, from 1.
        samples: the samples consumed so far.
        loss: the mean over the step's samples.
        grad_norm: the gradient norm before clipping.
        rates: the learning rate of each parameter group.
        loss_scale: the loss scale that the step used.
        skipped: the number of steps without an update so far.
        applied: whether this step updated the weights.
    """

    step: int
    samples: int
    loss: float
    grad_norm: float
    rates: tuple[float, ...]
    loss_scale: float
    skipped: int
    applied: bool


class Reporter:
    """Prints a line every `steps_per_print` steps on the first rank and feeds the JSON's monitors.

    Times are means over the steps since the last report.

    Attributes:
        timers: time the phases forward, backward and step.

    Args:
        settings: the settings, which say what to report.
        context: the ranks; the first one prints.
        traffic: counts the collectives, or None.
    """

    def __init__(self, settings: UserSettings, context: ParallelContext, traffic: TrafficLog | None):
        self.timers = Timers(context.device, synchronize=settings.logging.wall_clock_breakdown)
        self._settings = settings
        self._speaks = context.rank == 0
        self._traffic = traffic
        self._monitor = CompositeMonitor(_monitors(settings) if self._speaks else ())
        logging = settings.logging
        self._records = any((logging.tensorboard_dir, logging.csv_dir, logging.wandb_project))
        self._flops = 0
        self._counted = not settings.extras.flops_profiler
        self.restart(0)
        if self._speaks and settings.extras.dump_state:
            self._say(f"configuration: {settings}")

    def wants(self, step: int) -> bool:
        """Whether `step` will be reported; the same on every rank."""
        return self._records or step % self._settings.extras.steps_per_print == 0

    def step(self, facts: StepFacts) -> None:
        """Report a step for which `wants` was true; only the first rank prints."""
        steps = facts.step - self._since
        phases = {name: spent / steps for name, spent in self.timers.collect().items()}
        seconds = (time.perf_counter() - self._clock) / steps
        self.restart(facts.step)
        self._counted = True
        if not self._speaks:
            return
        self._monitor.step(_metrics(facts, self._settings, phases, seconds, self._flops))
        if facts.step % self._settings.extras.steps_per_print == 0:
            self._say(self._line(facts, phases, seconds))

    def restart(self, step: int) -> None:
        """Set the number of steps done so far; time is counted from here."""
        self.timers.collect()
        self._since, self._clock = step, time.perf_counter()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the body's FLOPs towards a step's, until the first report."""
        counter = nullcontext() if self._counted else FlopCounterMode(display=False)
        with counter:
            yield
        if isinstance(counter, FlopCounterMode):
            self._flops += counter.get_total_flops()

    def close(self) -> None:
        """Write out all buffered records."""
        self._monitor.close()

    def _line(self, facts: StepFacts, phases: Mapping[str, float], seconds: float) -> str:
        batch = self._settings.batch.train
        parts = [
            f"step {facts.step}",
            f"samples {facts.samples}",
            f"loss {facts.loss:.6g}",
            f"grad norm {facts.grad_norm:.4g}",
            f"learning rate {', '.join(f'{rate:.4g}' for rate in facts.rates)}",
            f"loss scale {facts.loss_scale:g}",
            f"skipped {facts.skipped}",
            f"{batch / seconds:.1f} samples/s" if seconds > 0 else "",
        ]
        if self._settings.logging.wall_clock_breakdown:
            parts += [f"{name} {1000 * spent:.1f} ms" for name, spent in phases.items()]
        if self._flops:
            parts.append(f"{self._flops:.3e} FLOPs per step and rank")
            parts.append(f"{self._flops / seconds / 1e12:.3f} TFLOP/s per rank")
        if self._traffic is not None:
            parts += [
                f"{group} {operation}: {calls} calls, {self._traffic.payload[group, operation]} bytes"
                for (group, operation), calls in sorted(self._traffic.calls.items())
            ]
        return " | ".join(part for part in parts if part)

    def _say(self, text: str) -> None:
        print(text, flush=True)


def _monitors(settings: UserSettings) -> Iterator[Monitor]:
    logging = settings.logging
    if logging.tensorboard_dir is not None:
        yield TensorBoardMonitor(logging)
    if logging.csv_dir is not None:
        yield CsvMonitor(logging.csv_dir, with_timers=logging.wall_clock_breakdown)
    if logging.wandb_project is not None:
        sections = {"zero": settings.zero, "precision": settings.precision, "logging": logging}
        yield WandbMonitor(Config.model_construct(set(sections), **sections))


def _metrics(
    facts: StepFacts, settings: UserSettings, phases: Mapping[str, float], seconds: float, flops: int
) -> StepMetrics:
    """The metrics for monitors. An engine cannot tell tokens from other inputs, so token counts are 0."""
    return StepMetrics(
        iteration=facts.step,
        consumed_samples=facts.samples,
        consumed_tokens=0,
        losses=Losses((LossTerm("lm"),), (facts.loss,)),
        grad_norm=facts.grad_norm,
        learning_rate=facts.rates[0],
        loss_scale=facts.loss_scale,
        skipped=not facts.applied,
        seconds=seconds,
        tokens_per_second=0.0,
        tflops=flops / seconds / 1e12 if seconds > 0 else 0.0,
        matmul_share=0.0,
        global_batch_size=settings.batch.train,
        num_micro_batches=settings.batch.accumulation,
        phase_seconds=dict(phases),
    )
