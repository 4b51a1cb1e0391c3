"""`Tracker`: what the monitors of services that track runs share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, ClassVar

from megazero.config.steps import Progress
from megazero.config.tree.config import Config
from megazero.errors import ConfigError
from megazero.train.observe.metrics import EvalMetrics, StepMetrics
from megazero.train.observe.monitors.base import Monitor


class Tracker(Monitor):
    """Logs every iteration and evaluation with the tags of TensorBoard, and the whole configuration.

    A training that goes back to a checkpoint continues in a new run, because a run cannot drop values.
    Whatever a service raises is an OSError here, and the training goes on without it.

    Attributes:
        setting: the field of the section `logging` that asks for it.
        package: the service's Python package.
        remedy: what may help where no run can start.

    Raises:
        ConfigError: the package is missing, or no run can start.
    """

    setting: ClassVar[str]
    package: ClassVar[str]
    remedy: ClassVar[str]

    def __init__(self, config: Config) -> None:
        self.logging, self.facts = config.logging, config.model_dump(mode="json")
        name = getattr(config.logging, self.setting)
        self.prepare()
        try:
            self.service: Any = import_module(self.package)
            self.begin(again=False)
        except ImportError as error:
            raise ConfigError(
                f"`{self.setting}` must be unset where the {self.package} package is missing, but is {name}; "
                f"run `pip install {self.package}`, or leave the option out."
            ) from error
        except Exception as error:
            raise ConfigError(
                f"`{self.setting}` must name one in which a run can start, but for {name} {self.package} "
                f"says: {error}; {self.remedy}, or leave the option out."
            ) from error

    def prepare(self) -> None:
        """Do what must come before the package is imported."""

    @abstractmethod
    def begin(self, *, again: bool) -> None:
        """Start a run; `again` for one after the first, whatever the environment says of resuming."""

    @abstractmethod
    def log(self, values: Mapping[str, float], iteration: int) -> None:
        """Log values, by tag."""

    @abstractmethod
    def end(self) -> None:
        """End the run, once all is sent."""

    def step(self, metrics: StepMetrics) -> None:
        values = metrics.charts(with_timers=self.logging.log_timers_to_tensorboard)
        consumed = {f"consumed-{kind}": metrics[f"consumed_{kind}"] for kind in ("samples", "tokens")}
        values |= {tag: value for tag, value in consumed.items() if value is not None}
        self._try("log", lambda: self.log(values, metrics["iteration"]))

    def evaluation(self, metrics: EvalMetrics) -> None:
        values = metrics.charts(with_perplexity=True)
        self._try("log", lambda: self.log(values, metrics.iteration))

    def rewound(self, progress: Progress) -> None:
        self._try("end a run", self.end)
        self._try("begin another run", lambda: self.begin(again=True))

    def close(self) -> None:
        self._try("end a run", self.end)

    def _try(self, what: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            raise OSError(f"{self.package} cannot {what}: {error}") from error
