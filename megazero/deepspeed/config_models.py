"""Sections of a JSON as pydantic models: DeepSpeed's base class for them, and those that scripts build."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import reduce
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ConfigDict, create_model, field_validator

from megazero.config.deepspeed.row import AUTO
from megazero.deepspeed.asserted import AssertedConfigError
from megazero.deepspeed.utils.logging import logger


class DeepSpeedConfigModel(BaseModel):
    """A section that refuses keys it does not know and leaves out those that are "auto".

    A field whose `json_schema_extra` says ``deprecated`` warns when it is given; its ``new_param``, which may
    be dotted, gets the value, through ``new_param_fn`` unless ``set_new_param`` is False.

    Args:
        strict: keep "auto".
        data: the section.

    Raises:
        pydantic.ValidationError: a key is unknown, or a value is of another type.
        AssertedConfigError: a deprecated field and the one that replaces it are both given.
    """

    model_config = ConfigDict(
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, strict: bool = False, **data: Any):
        kept = {key: value for key, value in data.items() if strict or value != AUTO}
        super().__init__(**kept)
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            if isinstance(extra, dict) and extra.get("deprecated") and name in self.model_fields_set:
                self._replace(name, extra)

    def _replace(self, old: str, extra: Mapping[str, Any]) -> None:
        new = str(extra.get("new_param", ""))
        logger.warning(f"`{old}` is deprecated{f'; use `{new}` instead' if new else ''}")
        if not new or not extra.get("set_new_param", True):
            return
        value = extra.get("new_param_fn", lambda given: given)(getattr(self, old))
        delattr(self, old)
        *parents, last = new.split(".")
        owner = reduce(getattr, parents, self)
        if last in owner.model_fields_set:
            raise AssertedConfigError(f"`{old}` must not be given beside `{new}`, which replaces it, but is")
        setattr(owner, last, value)


def get_config_default(config: type[BaseModel], field_name: str) -> Any:
    """The default of a section's field.

    Raises:
        AssertedConfigError: there is no such field, or it has no default.
    """
    field = config.model_fields.get(field_name)
    if field is None or field.is_required():
        raise AssertedConfigError(
            f"`{field_name}` must be a field of {config.__name__} with a default, but is not"
        )
    return field.get_default()


_FP16: Mapping[str, Any] = MappingProxyType(
    {
        **{"enabled": False, "auto_cast": False, "loss_scale": 0.0, "initial_scale_power": 16},
        **{"loss_scale_window": 1000, "hysteresis": 2, "consecutive_hysteresis": False, "min_loss_scale": 1},
        "fp16_master_weights_and_grads": False,
    }
)
_BF16: Mapping[str, Any] = MappingProxyType(
    {
        **{"enabled": False, "immediate_grad_update": False, "check_grad_overflow": True},
        **{"bf16_master_weights_and_grads": False, "bf16_optimizer_states": False},
    }
)
_OFFLOAD_OPTIMIZER: Mapping[str, Any] = MappingProxyType(
    {
        **{"device": "none", "nvme_path": None, "buffer_count": 4, "pin_memory": True, "ratio": 1.0},
        **{"pipeline_read": False, "pipeline_write": False, "fast_init": False, "super_offload": False},
    }
)
_OFFLOAD_PARAM: Mapping[str, Any] = MappingProxyType(
    {
        **{"device": "none", "nvme_path": None, "buffer_count": 5, "buffer_size": 100_000_000},
        **{"max_in_cpu": 1_000_000_000, "pin_memory": True},
    }
)


class _Scaled(DeepSpeedConfigModel):
    @field_validator("loss_scale", mode="after", check_fields=False)
    @classmethod
    def _finite(cls, scale: float) -> float:
        if not (math.isfinite(scale) and scale >= 0):
            raise ValueError(f"`fp16.loss_scale` must be finite and at least 0, but is {scale}")
        return scale


class _Piped(DeepSpeedConfigModel):
    pipeline_read: bool = False
    pipeline_write: bool = False

    @property
    def pipeline(self) -> bool:
        """Whether reading or writing overlaps with the update."""
        return self.pipeline_read or self.pipeline_write


def _model(name: str, base: type[DeepSpeedConfigModel], defaults: Mapping[str, Any], what: str) -> Any:
    """A section's class; a default of None or a word takes any value, which the engine's reader checks."""
    fields: dict[str, Any] = {
        key: (Any if default is None or isinstance(default, str) else type(default), default)
        for key, default in defaults.items()
    }
    return create_model(name, __base__=base, __doc__=what, **fields)


DeepSpeedFP16Config = _model("DeepSpeedFP16Config", _Scaled, _FP16, "The section `fp16`.")
DeepSpeedBF16Config = _model("DeepSpeedBF16Config", DeepSpeedConfigModel, _BF16, "The section `bf16`.")
DeepSpeedZeroOffloadOptimizerConfig = _model(
    "DeepSpeedZeroOffloadOptimizerConfig", _Piped, _OFFLOAD_OPTIMIZER, "The section `offload_optimizer`."
)
DeepSpeedZeroOffloadParamConfig = _model(
    "DeepSpeedZeroOffloadParamConfig", DeepSpeedConfigModel, _OFFLOAD_PARAM, "The section `offload_param`."
)


def get_float16_config(param_dict: Mapping[str, Any]) -> Any:
    """The section `fp16` of a JSON's content."""
    return DeepSpeedFP16Config(**param_dict.get("fp16", {}))


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> Any:
    """The section `bf16` of a JSON's content, or `bfloat16`, as it was called."""
    return DeepSpeedBF16Config(**param_dict.get("bf16", param_dict.get("bfloat16", {})))
