"""Sections of a JSON as pydantic models: DeepSpeed's base class for them, and those that scripts build."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import reduce
from typing import Any

from pydantic import BaseModel, ConfigDict, create_model, field_validator

from megazero.config.deepspeed.section import AUTO, JsonSection
from megazero.config.deepspeed.sections.training import Bf16, Fp16
from megazero.config.deepspeed.sections.zero import OffloadOptimizer, OffloadParam
from megazero.deepspeed.asserted import AssertedConfigError
from megazero.deepspeed.reports.logging import logger


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


def _model(name: str, base: type[DeepSpeedConfigModel], section: type[JsonSection]) -> Any:
    """A section's class; a default of None or a word takes any value, which the engine's reader checks."""
    fields: dict[str, Any] = {
        key: (Any if default is None or isinstance(default, str) else type(default), default)
        for key, default in section.defaults().items()
        if key not in base.model_fields
    }
    return create_model(name, __base__=base, __doc__=section.__doc__, **fields)


DeepSpeedFP16Config = _model("DeepSpeedFP16Config", _Scaled, Fp16)
DeepSpeedBF16Config = _model("DeepSpeedBF16Config", DeepSpeedConfigModel, Bf16)
DeepSpeedZeroOffloadOptimizerConfig = _model("DeepSpeedZeroOffloadOptimizerConfig", _Piped, OffloadOptimizer)
DeepSpeedZeroOffloadParamConfig = _model(
    "DeepSpeedZeroOffloadParamConfig", DeepSpeedConfigModel, OffloadParam
)


def get_float16_config(param_dict: Mapping[str, Any]) -> Any:
    """The section `fp16` of a JSON's content."""
    return DeepSpeedFP16Config(**param_dict.get("fp16", {}))


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> Any:
    """The section `bf16` of a JSON's content, or `bfloat16`, as it was called."""
    given = param_dict.get("bf16", param_dict.get("bfloat16", {}))
    # Examples copy the keys of `fp16`, which the reader passes over.
    copied = set(Bf16.names()) - Bf16.defaults().keys()
    return DeepSpeedBF16Config(**{key: value for key, value in given.items() if key not in copied})
