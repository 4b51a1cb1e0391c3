"""Weights & Biases; it needs the wandb package and a project's name."""

from __future__ import annotations

from functools import partial
from uuid import uuid4

from megazero.account.writers import over
from megazero.config.steps import Progress
from megazero.config.tree.config import Config
from megazero.errors import ConfigError
from megazero.train.observe.metrics import EvalMetrics, StepMetrics
from megazero.train.observe.monitors.base import Monitor

AXIS = "iteration"
"""The metric over which all others are drawn."""


class WandbMonitor(Monitor):
    """Logs every iteration and evaluation with the tags of TensorBoard, and the whole configuration.

    Values are drawn over the metric `iteration`, because wandb's step cannot go back. A training that goes
    back to a checkpoint continues in a new run, because a run cannot drop values.

    Raises:
        ConfigError: the wandb package is missing or refuses to start a run.
    """

    def __init__(self, config: Config) -> None:
        logging = config.logging
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"`wandb_project` must be unset where the wandb package is missing, but is "
                f"{logging.wandb_project}; run `pip install wandb`, or leave the option out."
            ) from error
        self._with_timers = logging.log_timers_to_tensorboard
        self._error: type[Exception] = wandb.Error
        self._begin = partial(
            wandb.init,
            project=logging.wandb_project,
            name=logging.wandb_exp_name,
            entity=logging.wandb_entity,
            group=logging.wandb_group,
            dir=logging.wandb_save_dir,
            config=config.model_dump(mode="json"),
        )
        try:
            self._run = over(AXIS, self._begin())
        except wandb.Error as error:
            raise ConfigError(
                f"`wandb_project` must name a project in which a run can start, but for "
                f"{logging.wandb_project} wandb says: {error}; log in with `wandb login`, or "
                f"leave the option out."
            ) from error

    def step(self, metrics: StepMetrics) -> None:
        values = metrics.charts(with_timers=self._with_timers)
        consumed = {f"consumed-{kind}": metrics[f"consumed_{kind}"] for kind in ("samples", "tokens")}
        values |= {tag: value for tag, value in consumed.items() if value is not None}
        self._log(values, metrics["iteration"])

    def evaluation(self, metrics: EvalMetrics) -> None:
        self._log(metrics.charts(with_perplexity=True), metrics.iteration)

    def rewound(self, progress: Progress) -> None:
        self._run.finish()
        try:  # under an id of its own, even if WANDB_RUN_ID and WANDB_RESUME name one
            self._run = over(AXIS, self._begin(id=uuid4().hex[:8], resume="never"))
        except self._error as error:
            raise OSError(f"wandb cannot begin another run: {error}") from error

    def close(self) -> None:
        self._run.finish()

    def _log(self, values: dict[str, float], iteration: int) -> None:
        try:
            self._run.log({**values, AXIS: iteration})
        except self._error as error:
            raise OSError(f"wandb cannot log: {error}") from error
