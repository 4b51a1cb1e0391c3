"""Sections of a JSON as pydantic models: DeepSpeed's base class, and the sections that scripts construct."""

from __future__ import annotations

import math
from functools import reduce
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, create_model, field_validator

from megazero.config.deepspeed.section import AUTO, JsonSection
from megazero.config.deepspeed.sections.training import Bf16, Fp16
from megazero.config.deepspeed.sections.zero import OffloadOptimizer, OffloadParam
from megazero.deepspeed.asserted import AssertedConfigError
from megazero.deepspeed.config import Json
from megazero.deepspeed.reports.logging import logger


class DeepSpeedConfigModel(BaseModel):
    """A section that refuses unknown keys and ignores values that are "auto".

    A field with ``deprecated`` in its `json_schema_extra` warns if it is given. The value, converted by
    ``new_param_fn``, is moved to the field ``new_param``, a dotted path, unless ``set_new_param`` is False.

    Args:
        strict: whether to keep "auto".
        data: the section.

    Raises:
        pydantic.ValidationError: a key is unknown, or a value is of another type.
        AssertedConfigError: a deprecated field and its replacement are both given.
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

    def __init__(self, strict: bool = False, **data: object):
        kept = {key: value for key, value in data.items() if strict or value != AUTO}
        super().__init__(**kept)
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            if isinstance(extra, dict) and extra.get("deprecated") and name in self.model_fields_set:
                self._replace(name, extra)

    def _replace(self, old: str, extra: Json) -> None:
        new = str(extra.get("new_param", ""))
        logger.warning(f"`{old}` is deprecated{f'; use `{new}` instead' if new else ''}")
        if not new or not extra.get("set_new_param", True):
            return
        value = extra.get("new_param_fn", lambda unchanged: unchanged)(getattr(self, old))
        delattr(self, old)
        *parents, last = new.split(".")
        owner = reduce(getattr, parents, self)
        if last in owner.model_fields_set:
            raise AssertedConfigError(f"`{old}` must not be given beside `{new}`, which replaces it, but is")
        setattr(owner, last, value)


def get_config_default(config: type[BaseModel], field_name: str) -> object:
    """Return the default of a section's field.

    Raises:
        AssertedConfigError: the field does not exist or has no default.
    """
    field = config.model_fields.get(field_name)
    if field is None or field.is_required():
        raise AssertedConfigError(
            f"`{field_name}` must be a field of {config.__name__} with a default, but is not"
        )
    return field.get_default()


_Base = TypeVar("_Base", bound=DeepSpeedConfigModel)


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
        """Whether reading or writing overlaps with the optimizer step."""
        return self.pipeline_read or self.pipeline_write


def _model(name: str, base: type[_Base], section: type[JsonSection]) -> type[_Base]:
    """Create the model of a section.

    A field whose default is None or text accepts any value here, because the engine's reader checks them.
    """
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


def get_float16_config(param_dict: Json) -> DeepSpeedConfigModel:
    """Read the section `fp16` of a JSON."""
    return DeepSpeedFP16Config(**param_dict.get("fp16", {}))


def get_bfloat16_config(param_dict: Json) -> DeepSpeedConfigModel:
    """Read the section `bf16` of a JSON, or `bfloat16`, its former name."""
    section = param_dict.get("bf16", param_dict.get("bfloat16", {}))
    # DeepSpeed's examples have keys of `fp16` here, which its reader ignores.
    ignored = set(Bf16.names()) - Bf16.defaults().keys()
    return DeepSpeedBF16Config(**{key: value for key, value in section.items() if key not in ignored})
