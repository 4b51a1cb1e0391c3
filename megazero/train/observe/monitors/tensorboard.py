"""TensorBoard events, with Megatron-LM's tags."""

from __future__ import annotations

from collections.abc import Iterable

from megazero.account.writers import Scalars
from megazero.config.steps import Progress
from megazero.config.tree.logging import LoggingConfig
from megazero.errors import ConfigError
from megazero.train.observe.metrics import EvalMetrics, StepMetrics
from megazero.train.observe.monitors.base import Monitor

_OVER_SAMPLES = " vs samples"


class TensorBoardMonitor(Monitor):
    """Writes scalars every `tensorboard_log_interval` iterations.

    Metrics with `Chart.over_samples` are also written over consumed samples, as ``... vs samples``. A resumed
    training adds a file to the folder and drops repeated events from the earlier files. A training from
    iteration 0 moves earlier files to `earlier-1`, `earlier-2`, ..., which TensorBoard shows as other runs.

    Args:
        config: the folder, the interval, the queue size and optional metrics.
        resumed: the training's progress so far; None if not yet known.

    Raises:
        ConfigError: the tensorboard package is missing, or the folder cannot be written.
    """

    def __init__(self, config: LoggingConfig, resumed: Progress | None = None) -> None:
        assert config.tensorboard_dir is not None, "there is no folder for events"
        try:
            self._scalars = Scalars(config.tensorboard_dir, config.tensorboard_queue_size)
            if resumed is not None:
                self.rewound(resumed)
            self._scalars.writer.flush()
        except ImportError as error:
            raise ConfigError(
                "`tensorboard_dir` must be unset where the tensorboard package is missing, but is "
                f"{config.tensorboard_dir}; run `pip install tensorboard`, or leave the option out."
            ) from error
        except OSError as error:
            raise ConfigError(
                f"`tensorboard_dir` must be a folder that can be written, but is {config.tensorboard_dir}: "
                f"{error.strerror or error}; choose another."
            ) from error
        self._config = config

    def step(self, metrics: StepMetrics) -> None:
        if metrics["iteration"] % self._config.tensorboard_log_interval:
            return
        values = metrics.charts(with_timers=self._config.log_timers_to_tensorboard)
        both = metrics.tags_over_samples()
        self._add(values, both, metrics["iteration"], metrics["consumed_samples"])

    def evaluation(self, metrics: EvalMetrics) -> None:
        values = metrics.charts(with_perplexity=self._config.log_validation_ppl_to_tensorboard)
        self._add(values, values, metrics.iteration, metrics.progress.samples)
        self._scalars.writer.flush()

    def rewound(self, progress: Progress) -> None:
        if progress.iteration == 0:
            self._scalars.set_aside()
            return
        reached = {True: progress.samples, False: progress.iteration}
        self._scalars.keep(lambda tag, step: step <= reached[tag.endswith(_OVER_SAMPLES)])

    def close(self) -> None:
        self._scalars.close()

    def _add(self, values: dict[str, float], both: Iterable[str], iteration: int, samples: int) -> None:
        over_samples = [(f"{tag}{_OVER_SAMPLES}", values[tag], samples) for tag in both]
        self._scalars.add([*((tag, value, iteration) for tag, value in values.items()), *over_samples])
