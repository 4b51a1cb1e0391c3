"""`DeepSpeedConfig`: a JSON as an object with DeepSpeed's attributes."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any

from megazero.config.deepspeed.batch import BatchTriangle, resolve_batch
from megazero.config.deepspeed.load import load_ds_config
from megazero.config.deepspeed.section import AUTO
from megazero.config.deepspeed.sections.zero import Zero
from megazero.deepspeed.asserted import asserts
from megazero.deepspeed.config import Json
from megazero.deepspeed.config.models import (
    DeepSpeedConfigModel,
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    get_bfloat16_config,
    get_float16_config,
)
from megazero.deepspeed.config.settings import JsonSource, UserSettings, read_settings
from megazero.deepspeed.config.shown import ConfigSection, optimizer_name, sections_of, value_at
from megazero.errors import ConfigError
from megazero.mpu.torch_group import joined_world

DeepSpeedConfigError = ConfigError
"""DeepSpeed's name of the error."""

_OFFLOAD: Mapping[str, type[DeepSpeedConfigModel]] = MappingProxyType(
    {
        "offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "offload_param": DeepSpeedZeroOffloadParamConfig,
    }
)
_FORMER: Mapping[str, tuple[str, object]] = MappingProxyType(
    {
        "cpu_offload": ("offload_optimizer", {"device": "cpu"}),
        "cpu_offload_param": ("offload_param", {"device": "cpu"}),
        "gather_fp16_weights_on_model_save": ("gather_16bit_weights_on_model_save", True),
    }
)
"""Key of older releases -> its replacement, and the value there that means the same as true."""


class DeepSpeedConfig:
    """A checked DeepSpeed JSON.

    Attributes:
        train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps: the batch sizes; those
            that the JSON lacks are computed.
        zero_config: the section `zero_optimization` with DeepSpeed's defaults.
        zero_enabled, zero_optimization_stage: whether the stage is above 0, and the stage.
        float16_config, bfloat16_config: the sections `fp16` and `bf16` with DeepSpeed's defaults.
        gradient_clipping: the largest gradient norm; 0 is off.
        aio_config, checkpoint_config, flops_profiler_config, monitor_config, ...: see `sections_of`.
        optimizer_name, optimizer_params, scheduler_name, scheduler_params: the optimizer and the schedule of
            the JSON, or None.
        world_size: the number of ranks that samples are split over.
        settings: the settings for `megazero.initialize`.

    Args:
        config: the path of the JSON, its content, or its text in base64.
        mpu: has the number of ranks that samples are split over; without one, all ranks count.
        mesh_device: a device mesh whose dim ``data_parallel`` has this number of ranks.

    Raises:
        ConfigError: lists all faults of the JSON.
    """

    @asserts
    def __init__(self, config: JsonSource, mpu: object = None, mesh_device: object = None):
        content = load_ds_config(config)
        ranks = _data_parallel(content, mpu, mesh_device)
        self._fill(content, read_settings(content, ranks), ranks)

    @classmethod
    def of(cls, content: Json, settings: UserSettings, world_size: int) -> DeepSpeedConfig:
        """Make the configuration of an engine from settings that have been read already.

        Args:
            content: the JSON's content.
            settings: the settings that were read from it.
            world_size: the number of ranks that samples are split over.
        """
        config = cls.__new__(cls)
        config._fill(dict(content), settings, world_size)
        return config

    def _fill(self, given: dict[str, object], settings: UserSettings, world_size: int) -> None:
        self._param_dict, self.world_size, self.settings = given, world_size, settings
        self._set_batch(settings.batch)
        self.gradient_clipping = settings.clip_grad
        self.zero_config = _zero(_zero_section(given))
        self.zero_optimization_stage: int = self.zero_config.stage
        self.zero_enabled = self.zero_optimization_stage > 0
        self.float16_config = get_float16_config(given)
        self.bfloat16_config = get_bfloat16_config(given)
        vars(self).update(sections_of(given))
        self.wall_clock_breakdown: bool
        self.flops_profiler_config: ConfigSection
        self.global_rank = (joined_world() or (0, 1))[0]
        self.wall_clock_breakdown |= self.flops_profiler_config.enabled
        self.optimizer_name, self.scheduler_name = optimizer_name(given), value_at(given, "scheduler.type")
        self.optimizer_params, self.scheduler_params = (
            value_at(given, f"{kind}.params") for kind in ("optimizer", "scheduler")
        )

    @asserts
    def _configure_train_batch_size(self) -> None:
        """Compute the batch sizes that are None from the others, after a script has changed them."""
        sizes = self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps
        self._set_batch(resolve_batch(*sizes, self.world_size))

    def _set_batch(self, batch: BatchTriangle) -> None:
        self.train_batch_size: int | None = batch.train
        self.train_micro_batch_size_per_gpu: int | None = batch.micro
        self.gradient_accumulation_steps: int | None = batch.accumulation

    def print_user_config(self) -> None:
        """Print the JSON's content."""
        print(self._param_dict)

    def print(self, name: str) -> None:
        """Print a title and each attribute."""
        print(f"{name}:", *(f"  {key} {value}" for key, value in sorted(vars(self).items())), sep="\n")


class ZeroStageEnum(int, Enum):
    """The stages of ZeRO by name."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = max_stage = 3


def zero_config(**section: object) -> ConfigSection:
    """Return a section `zero_optimization` with DeepSpeed's defaults.

    Raises:
        ConfigError: lists all wrong keys and values.
    """
    checked = {"stage": 3, **section}
    DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": checked})
    return _zero({key: value for key, value in section.items() if value != AUTO})


def _zero_section(given: Json) -> dict[str, object]:
    """Return the keys of `zero_optimization` that are not "auto"; older releases allow a bool."""
    section = given.get("zero_optimization")
    if isinstance(section, bool):
        return {"stage": int(section)}
    return {k: v for k, v in section.items() if v != AUTO} if isinstance(section, Mapping) else {}


def _zero(section: Json) -> ConfigSection:
    """Replace the keys of older releases, and complete the section by DeepSpeed's defaults."""
    values = {key.removeprefix("stage3_"): value for key, value in section.items()}
    for old, (new, value) in _FORMER.items():
        if values.get(old):
            values.setdefault(new, value)
    for part, section_class in _OFFLOAD.items():
        keys = values.get(part)
        values[part] = section_class(**keys) if isinstance(keys, Mapping) else None
    values = {**{key.removeprefix("stage3_"): v for key, v in Zero.defaults().items()}, **values}
    values["stage"] = int(values["stage"])
    if values["overlap_comm"] is None:
        values["overlap_comm"] = values["stage"] == 3
    return ConfigSection(**values)


def _data_parallel(given: Json, mpu: Any, mesh: Any) -> int:
    """Return the number of ranks that samples are split over; 1 before torch's world is joined."""
    world = joined_world()
    if world is None:
        return 1
    if mpu is not None and hasattr(mpu, "get_data_parallel_world_size"):
        return int(mpu.get_data_parallel_world_size())
    ranks = world[1]
    if mpu is not None:
        return ranks // int(mpu.get_sequence_parallel_world_size())
    if mesh is not None:
        return int(mesh.get_group(mesh_dim="data_parallel").size())
    return ranks // int(given.get("sequence_parallel_size", 1))
