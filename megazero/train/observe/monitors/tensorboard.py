"""TensorBoard events under Megatron's tags."""

from __future__ import annotations

from megazero.config.tree.logging import LoggingConfig
from megazero.errors import ConfigError
from megazero.train.observe.metrics import EvalMetrics, StepMetrics
from megazero.train.observe.monitors.base import Monitor


class TensorBoardMonitor(Monitor):
    """Writes scalars every `tensorboard_log_interval` iterations.

    Losses and the metrics that ask for it are also written over consumed samples, as ``... vs samples``.
    A resumed training adds another event file to the folder, which TensorBoard joins to the earlier ones.

    Args:
        config: the folder, the interval, the queue size and what else to record.

    Raises:
        ConfigError: the tensorboard package is missing, or the folder cannot be written.
    """

    def __init__(self, config: LoggingConfig) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "`tensorboard_dir` must be unset where the tensorboard package is missing, but is "
                f"{config.tensorboard_dir}; run `pip install tensorboard`, or leave the option out."
            ) from error
        try:
            self._writer = SummaryWriter(config.tensorboard_dir, max_queue=config.tensorboard_queue_size)
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
        over_samples = metrics.tags_over_samples()
        for tag, value in values.items():
            self._add(tag, value, metrics["iteration"])
            if tag in over_samples:
                self._add(f"{tag} vs samples", value, metrics["consumed_samples"])

    def evaluation(self, metrics: EvalMetrics) -> None:
        values = metrics.charts(with_perplexity=self._config.log_validation_ppl_to_tensorboard)
        for tag, value in values.items():
            self._add(tag, value, metrics.iteration)
            self._add(f"{tag} vs samples", value, metrics.progress.samples)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, tag: str, value: float, at: int) -> None:
        # The writer's own thread runs into a full disk; its error is raised by a later call here.
        try:
            self._writer.add_scalar(tag, value, at)
        except OSError as error:
            raise OSError(
                error.errno, f"cannot write events ({error.strerror})", self._config.tensorboard_dir
            ) from error
