"""`deepspeed.monitor`: a script's own values in TensorBoard, Weights & Biases and CSV files.

Only the first rank writes. `get_monitor_config` reads the JSON's sections.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from megazero.account.writers import CsvSeries, Scalars, over
from megazero.config.deepspeed.load import plain_paths
from megazero.errors import ConfigError
from megazero.mpu.torch_group import joined_world

Event = tuple[str, Any, int]
"""A tag, a value, and where it stands on the x axis."""


class _Section(BaseModel):
    """A section of the JSON."""

    model_config = ConfigDict(extra="forbid")
    _plain = model_validator(mode="before")(plain_paths)
    enabled: bool = False


class TensorBoardConfig(_Section):
    """Section ``tensorboard``."""

    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


class CSVConfig(TensorBoardConfig):
    """Section ``csv_monitor``."""


class WandbConfig(_Section):
    """Section ``wandb``."""

    group: str | None = None
    team: str | None = None
    project: str = "deepspeed"


class CometConfig(_Section):
    """Section ``comet``, which must not be enabled."""

    model_config = ConfigDict(extra="allow")
    samples_log_interval: int = 100


class DeepSpeedMonitorConfig(BaseModel):
    """The sections of all monitors."""

    tensorboard: TensorBoardConfig = TensorBoardConfig()
    comet: CometConfig = CometConfig()
    wandb: WandbConfig = WandbConfig()
    csv_monitor: CSVConfig = CSVConfig()

    @property
    def enabled(self) -> bool:
        """Whether one of them is."""
        return any(part.enabled for part in (self.tensorboard, self.comet, self.wandb, self.csv_monitor))


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    """The monitors' sections of a JSON."""
    names = DeepSpeedMonitorConfig.model_fields.keys() & param_dict.keys()
    return DeepSpeedMonitorConfig.model_validate({name: param_dict[name] for name in names})


class Monitor(ABC):
    """Takes a script's values. Each key of its section is an attribute.

    Args:
        monitor_config: its section.

    Attributes:
        enabled: whether the section is.
        writes: whether this rank writes, as the first one does.
    """

    def __init__(self, monitor_config: Any):
        self.monitor_config = monitor_config
        self.enabled = bool(monitor_config.enabled)
        self.writes = self.enabled and (joined_world() or (0, 1))[0] == 0

    def __getattr__(self, name: str) -> Any:
        section = vars(self).get("monitor_config")
        if name.startswith("_") or not hasattr(section, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(section, name)

    @abstractmethod
    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write values, on the first rank."""


class csvMonitor(Monitor):
    """One CSV file for each tag, in a folder of the job's name; no step is twice in a file."""

    def __init__(self, csv_config: CSVConfig):
        super().__init__(csv_config)
        self.log_dir = Path(csv_config.output_path) / csv_config.job_name
        self._series = CsvSeries()
        if self.writes:
            self.log_dir.mkdir(parents=True, exist_ok=True)

    def write_events(self, event_list: Sequence[Event]) -> None:
        for tag, value, x in event_list if self.writes else ():
            path = self.log_dir / f"{tag.replace('/', '_').replace(' ', '_')}.csv"
            self._series.add(path, ("step", tag.rpartition("/")[2]), x, value)


class TensorBoardMonitor(Monitor):
    """Scalars for TensorBoard, in a folder of the job's name; one for each tag and step.

    Raises:
        ConfigError: the tensorboard package is missing.
    """

    def __init__(self, tensorboard_config: TensorBoardConfig):
        super().__init__(tensorboard_config)
        folder = Path(tensorboard_config.output_path) / tensorboard_config.job_name
        with _package("tensorboard"):
            self._scalars = Scalars(str(folder)) if self.writes else None

    @property
    def summary_writer(self) -> Any:
        """Torch's writer; None where nothing is written."""
        return None if self._scalars is None else self._scalars.writer

    def write_events(self, event_list: Sequence[Event], flush: bool = True) -> None:
        if self._scalars is not None:
            self._scalars.add(event_list)
        if flush:
            self.flush()

    def flush(self) -> None:
        """Write out what is pending."""
        if self._scalars is not None:
            self._scalars.writer.flush()


class WandbMonitor(Monitor):
    """Values for Weights & Biases, drawn over the metric `step`: wandb's own steps cannot go back.

    Raises:
        ConfigError: the wandb package is missing.
    """

    def __init__(self, wandb_config: WandbConfig):
        super().__init__(wandb_config)
        self._run: Any = None
        if self.writes:
            with _package("wandb"):
                import wandb
            names = {"project": wandb_config.project, "group": wandb_config.group}
            self._run = over("step", wandb.init(**names, entity=wandb_config.team))

    def write_events(self, event_list: Sequence[Event]) -> None:
        for tag, value, x in event_list if self._run is not None else ():
            self._run.log({tag: value, "step": x})


class CometMonitor(Monitor):
    """A place for Comet, which does nothing.

    Raises:
        ConfigError: it is enabled.
    """

    def __init__(self, comet_config: CometConfig):
        super().__init__(comet_config)
        if self.enabled:
            raise ConfigError("`comet` must not be enabled, but is; use tensorboard, wandb or csv_monitor")

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write nothing."""


class MonitorMaster(Monitor):
    """All monitors that a JSON enables.

    Args:
        monitor_config: what `get_monitor_config` gives.

    Raises:
        ConfigError: Comet is enabled, or a package is missing.
    """

    def __init__(self, monitor_config: DeepSpeedMonitorConfig):
        super().__init__(monitor_config)
        self.comet_monitor = CometMonitor(monitor_config.comet)
        self.tb_monitor = TensorBoardMonitor(monitor_config.tensorboard)
        self.wandb_monitor = WandbMonitor(monitor_config.wandb)
        self.csv_monitor = csvMonitor(monitor_config.csv_monitor)

    def write_events(self, event_list: Sequence[Event]) -> None:
        for monitor in (self.tb_monitor, self.wandb_monitor, self.csv_monitor):
            monitor.write_events(event_list)


@contextmanager
def _package(name: str) -> Iterator[None]:
    """Use a package, which the section of this name needs."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"`{name}` must not be enabled where the {name} package is missing, but is; run `pip install "
            f"{name}` or leave the section out"
        ) from error
