"""`Tracker`: what the monitors of services that track runs share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
        logs: the method of what `begin` returns that logs values at a step.
        ends: the one that ends a run, once all is sent.

    Raises:
        ConfigError: the package is missing, or no run can start.
    """

    setting: ClassVar[str]
    package: ClassVar[str]
    remedy: ClassVar[str]
    logs: ClassVar[str]
    ends: ClassVar[str]

    def __init__(self, config: Config) -> None:
        self.logging, self.facts = config.logging, config.model_dump(mode="json")
        name = getattr(config.logging, self.setting)
        self.prepare()
        try:
            self.service: Any = import_module(self.package)
            self.run: Any = self.begin(again=False)
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
    def begin(self, *, again: bool) -> object:
        """Start and return a run; `again` for one after the first, whatever the environment says."""

    def log(self, values: Mapping[str, float], iteration: int) -> None:
        """Log values, by tag."""
        getattr(self.run, self.logs)(dict(values), step=iteration)

    def step(self, metrics: StepMetrics) -> None:
        values = metrics.charts(with_timers=self.logging.log_timers_to_tensorboard)
        consumed = {f"consumed-{kind}": metrics[f"consumed_{kind}"] for kind in ("samples", "tokens")}
        values |= {tag: value for tag, value in consumed.items() if value is not None}
        with self._trying("log"):
            self.log(values, metrics["iteration"])

    def evaluation(self, metrics: EvalMetrics) -> None:
        values = metrics.charts(with_perplexity=True)
        with self._trying("log"):
            self.log(values, metrics.iteration)

    def rewound(self, progress: Progress) -> None:
        self.close()
        with self._trying("begin another run"):
            self.run = self.begin(again=True)

    def close(self) -> None:
        with self._trying("end a run"):
            getattr(self.run, self.ends)()

    @contextmanager
    def _trying(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise OSError(f"{self.package} cannot {what}: {error}") from error
