"""`deepspeed.monitor`: a script's own values in TensorBoard, Comet, Weights & Biases and CSV files.

Only the first rank writes. `get_monitor_config` reads the JSON's sections.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, model_validator

from megazero.account.writers import CsvSeries, ScalarPoint, Scalars, over
from megazero.config.deepspeed.load import plain_paths
from megazero.errors import ConfigError
from megazero.mpu.torch_group import joined_world

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class MonitorSection(BaseModel):
    """The section of a monitor."""

    model_config = ConfigDict(extra="forbid")
    _plain = model_validator(mode="before")(plain_paths)
    enabled: bool = False


class TensorBoardConfig(MonitorSection):
    """The section ``tensorboard``."""

    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


class CSVConfig(TensorBoardConfig):
    """The section ``csv_monitor``."""


class WandbConfig(MonitorSection):
    """The section ``wandb``."""

    group: str | None = None
    team: str | None = None
    project: str = "deepspeed"


class CometConfig(MonitorSection):
    """The section ``comet``."""

    samples_log_interval: int = 100
    project: str | None = None
    workspace: str | None = None
    api_key: str | None = None
    experiment_name: str | None = None
    experiment_key: str | None = None
    online: bool | None = None
    mode: str | None = None


class DeepSpeedMonitorConfig(BaseModel):
    """The sections of all monitors."""

    tensorboard: TensorBoardConfig = TensorBoardConfig()
    comet: CometConfig = CometConfig()
    wandb: WandbConfig = WandbConfig()
    csv_monitor: CSVConfig = CSVConfig()

    @property
    def enabled(self) -> bool:
        """Whether a monitor is enabled."""
        return any(part.enabled for part in (self.tensorboard, self.comet, self.wandb, self.csv_monitor))


def get_monitor_config(param_dict: Mapping[str, object]) -> DeepSpeedMonitorConfig:
    """Read the sections of the monitors from a JSON."""
    names = DeepSpeedMonitorConfig.model_fields.keys() & param_dict.keys()
    return DeepSpeedMonitorConfig.model_validate({name: param_dict[name] for name in names})


class Monitor(ABC):
    """Writes a script's values. The keys of the section are attributes.

    Args:
        monitor_config: the section.

    Attributes:
        enabled: whether the section is enabled.
        writes: whether this rank writes: it is the first one and the section is enabled.
    """

    def __init__(self, monitor_config: MonitorSection | DeepSpeedMonitorConfig):
        self.monitor_config = monitor_config
        self.enabled = monitor_config.enabled
        self.writes = self.enabled and (joined_world() or (0, 1))[0] == 0

    def __getattr__(self, name: str) -> Any:
        section = vars(self).get("monitor_config")
        if name.startswith("_") or not hasattr(section, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(section, name)

    @abstractmethod
    def write_events(self, event_list: Sequence[ScalarPoint]) -> None:
        """Write (tag, value, step) events on the first rank."""


class csvMonitor(Monitor):
    """Writes a CSV file for each tag into a folder with the job's name; a repeated step replaces its rows."""

    def __init__(self, csv_config: CSVConfig):
        super().__init__(csv_config)
        self.log_dir = Path(csv_config.output_path) / csv_config.job_name
        self._series = CsvSeries()
        if self.writes:
            self.log_dir.mkdir(parents=True, exist_ok=True)

    def write_events(self, event_list: Sequence[ScalarPoint]) -> None:
        for tag, value, x in event_list if self.writes else ():
            path = self.log_dir / f"{tag.replace('/', '_').replace(' ', '_')}.csv"
            self._series.add(path, ("step", tag.rpartition("/")[2]), x, value)


class TensorBoardMonitor(Monitor):
    """Writes scalars for TensorBoard into a folder with the job's name.

    Raises:
        ConfigError: the tensorboard package is missing.
    """

    def __init__(self, tensorboard_config: TensorBoardConfig):
        super().__init__(tensorboard_config)
        folder = Path(tensorboard_config.output_path) / tensorboard_config.job_name
        with _package("tensorboard"):
            self._scalars = Scalars(str(folder)) if self.writes else None

    @property
    def summary_writer(self) -> SummaryWriter | None:
        """Torch's writer; None if this rank does not write."""
        return None if self._scalars is None else self._scalars.writer

    def write_events(self, event_list: Sequence[ScalarPoint], flush: bool = True) -> None:
        if self._scalars is not None:
            self._scalars.add(event_list)
        if flush:
            self.flush()

    def flush(self) -> None:
        """Write pending events to disk."""
        if self._scalars is not None:
            self._scalars.writer.flush()


class WandbMonitor(Monitor):
    """Writes values to Weights & Biases, with the metric `step` as x axis: wandb's own steps cannot decrease.

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

    def write_events(self, event_list: Sequence[ScalarPoint]) -> None:
        for tag, value, x in event_list if self._run is not None else ():
            self._run.log({tag: value, "step": x})


class CometMonitor(Monitor):
    """Writes to Comet what is at least `samples_log_interval` samples after a tag's last value.

    Attributes:
        experiment: Comet's experiment; None if this rank does not write.

    Raises:
        ConfigError: the comet_ml package is missing.
    """

    def __init__(self, comet_config: CometConfig):
        super().__init__(comet_config)
        self.experiment: Any = None
        self._last: dict[str, float] = {}
        if self.writes:
            with _package("comet", "comet_ml"):
                import comet_ml
            names = comet_config.model_dump(exclude={"enabled", "samples_log_interval", "experiment_name"})
            self.experiment = comet_ml.start(**names)
            if comet_config.experiment_name is not None:
                self.experiment.set_name(comet_config.experiment_name)

    def write_events(self, event_list: Sequence[ScalarPoint]) -> None:
        for tag, value, x in event_list if self.experiment is not None else ():
            if x - self._last.get(tag, -math.inf) >= self.samples_log_interval:
                self._last[tag] = x
                self.experiment.log_metric(tag, value, step=x)


class MonitorMaster(Monitor):
    """Writes to all monitors that a JSON enables.

    Args:
        monitor_config: the result of `get_monitor_config`.

    Raises:
        ConfigError: a package is missing.
    """

    def __init__(self, monitor_config: DeepSpeedMonitorConfig):
        super().__init__(monitor_config)
        self.comet_monitor = CometMonitor(monitor_config.comet)
        self.tb_monitor = TensorBoardMonitor(monitor_config.tensorboard)
        self.wandb_monitor = WandbMonitor(monitor_config.wandb)
        self.csv_monitor = csvMonitor(monitor_config.csv_monitor)

    def write_events(self, event_list: Sequence[ScalarPoint]) -> None:
        for monitor in (self.tb_monitor, self.comet_monitor, self.wandb_monitor, self.csv_monitor):
            monitor.write_events(event_list)


@contextmanager
def _package(section: str, name: str = "") -> Iterator[None]:
    """Turn an ImportError of a monitor's package into a ConfigError."""
    try:
        yield
    except ImportError as error:
        name = name or section
        raise ConfigError(
            f"`{section}` must not be enabled where the {name} package is missing, but is; run `pip install "
            f"{name}` or leave the section out"
        ) from error
