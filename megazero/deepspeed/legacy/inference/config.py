"""The configuration of `init_inference`, with DeepSpeed's names and defaults."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

import torch
from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from megazero.config.deepspeed.load import load_ds_config, plain_paths
from megazero.errors import ConfigError

_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        **dict.fromkeys(("fp32", "float32", "float"), torch.float32),
        **dict.fromkeys(("fp16", "float16", "half"), torch.float16),
        **dict.fromkeys(("bf16", "bfloat16", "bfloat"), torch.bfloat16),
        "int8": torch.int8,
    }
)

_NO_EFFECT: Mapping[str, str] = MappingProxyType(
    {
        "use_triton": "there are no Triton kernels for a given model",
        "triton_autotune": "there are no Triton kernels for a given model",
        "triangular_masking": "the model masks as it was written to",
        "return_tuple": "layers return what they did",
        "transposed_mode": "layers keep their orientation",
        "min_out_tokens": "there is no workspace to reserve",
        "training_mp_size": "a checkpoint is read whole",
        "replace_method": "only auto exists",
        "zero": "weights are sliced, not sharded",
        "enable_cuda_graph": "forward is not captured",
        "moe_type": "experts are kept as the model has them",
    }
)


def _dtype(value: object) -> torch.dtype:
    dtype = _DTYPES.get(str(value).removeprefix("torch."))
    if dtype is None:
        raise ValueError(f"must be one of {', '.join(_DTYPES)} or such a torch.dtype")
    return dtype


Dtype = Annotated[torch.dtype, BeforeValidator(_dtype), PlainSerializer(str)]


class _InferenceSection(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True, arbitrary_types_allowed=True)
    _plain = model_validator(mode="before")(plain_paths)

    def dict(self, **kwargs: Any) -> dict[str, object]:
        """Return the values by key."""
        return self.model_dump(**kwargs)


class DeepSpeedTPConfig(_InferenceSection):
    """`tensor_parallel`: the ranks that layers are sliced over."""

    enabled: bool = True
    tp_size: int = Field(default=1, ge=1)
    tp_grain_size: int = 64
    mpu: object = None
    tp_group: Any = None


class DeepSpeedMoEConfig(_InferenceSection):
    """`moe`: the experts of DeepSpeed's own layers."""

    enabled: bool = True
    ep_size: int = 1
    moe_experts: list[int] = Field(default=[1], validation_alias=AliasChoices("moe_experts", "num_experts"))
    type: Literal["standard", "residual"] = "standard"
    ep_mp_group: object = None
    ep_group: object = None


class BaseQuantConfig(_InferenceSection):
    """How tensors are quantized."""

    enabled: bool = True
    num_bits: int = 8
    q_type: Literal["symmetric", "asymmetric"] = "symmetric"
    q_groups: int = Field(default=1, ge=1)


class WeightQuantConfig(BaseQuantConfig):
    """How weights are quantized: `q_groups` groups in each row."""

    quantized_initialization: dict[str, object] = {}
    post_init_quant: dict[str, object] = {}


class QKVQuantConfig(_InferenceSection):
    """Whether the weights of queries, keys and values are quantized too."""

    enabled: bool = True


class QuantizationConfig(_InferenceSection):
    """`quant`: the quantization that dtype int8 stands for."""

    enabled: bool = True
    activation: BaseQuantConfig = BaseQuantConfig()
    weight: WeightQuantConfig = WeightQuantConfig()
    qkv: QKVQuantConfig = QKVQuantConfig()


class InferenceCheckpointConfig(_InferenceSection):
    """`checkpoint_config`: another place for the top-level keys of these names."""

    checkpoint_dir: str | None = None
    save_mp_checkpoint_path: str | None = None
    base_dir: str | None = None


class DeepSpeedInferenceConfig(_InferenceSection):
    """All keys of `init_inference`. Those in `without_effect` are accepted and have no effect."""

    replace_with_kernel_inject: bool = Field(
        False, validation_alias=AliasChoices("replace_with_kernel_inject", "kernel_inject")
    )
    dtype: Dtype = torch.float16
    tensor_parallel: DeepSpeedTPConfig = Field(
        DeepSpeedTPConfig(), validation_alias=AliasChoices("tensor_parallel", "tp")
    )
    enable_cuda_graph: bool = False
    use_triton: bool = False
    triton_autotune: bool = False
    zero: dict[str, object] = {}
    triangular_masking: bool = Field(True, validation_alias=AliasChoices("triangular_masking", "tm"))
    moe: DeepSpeedMoEConfig | bool = DeepSpeedMoEConfig()
    keep_module_on_host: bool = False
    quant: QuantizationConfig = QuantizationConfig()
    checkpoint: str | dict[str, object] | None = None
    base_dir: str = ""
    set_empty_params: bool = False
    save_mp_checkpoint_path: str | None = None
    checkpoint_config: InferenceCheckpointConfig = InferenceCheckpointConfig()
    return_tuple: bool = True
    training_mp_size: int = 1
    injection_policy: dict[object, object] | None = Field(
        None, validation_alias=AliasChoices("injection_policy", "injection_dict")
    )
    injection_policy_tuple: tuple[object, ...] | None = None
    config: dict[str, object] | None = Field(None, validation_alias=AliasChoices("config", "args"))
    max_out_tokens: int = Field(1024, validation_alias=AliasChoices("max_out_tokens", "max_tokens"))
    min_out_tokens: int = 1
    transposed_mode: bool = False
    mp_size: int = 1
    mpu: object = None
    ep_size: int = 1
    ep_group: object = None
    ep_mp_group: object = None
    moe_experts: list[int] = [1]
    moe_type: Literal["standard", "residual"] = "standard"
    replace_method: str = "auto"

    def __init__(self, **values: object):
        super().__init__(**_renamed(values))

    @property
    def without_effect(self) -> dict[str, str]:
        """The keys without effect that differ from their defaults, each with the reason."""
        default = type(self).model_fields
        return {key: why for key, why in _NO_EFFECT.items() if getattr(self, key) != default[key].default}


def _renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Move the values of deprecated keys to their present places."""
    moves = {
        "mp_size": ("tensor_parallel", "tp", "tp_size"),
        "mpu": ("tensor_parallel", "tp", "mpu"),
        "ep_size": ("moe", "moe", "ep_size"),
        "ep_group": ("moe", "moe", "ep_group"),
        "ep_mp_group": ("moe", "moe", "ep_mp_group"),
        "moe_experts": ("moe", "moe", "moe_experts"),
        "moe_type": ("moe", "moe", "type"),
    }
    result = dict(values)
    for old, (section, short, new) in moves.items():
        if old not in values:
            continue
        value = result.pop(old)
        place = short if short in result else section
        inner = result.get(place)
        inner = {} if inner is None or isinstance(inner, bool) else dict(inner)
        if new in inner:
            raise ValueError(
                f"`{section}.{new}` must be given once, but `{old}`, its old name, is given too; leave that "
                "out"
            )
        result[place] = {**inner, new: value}
    return result


def read_config(config: object, arguments: Mapping[str, object]) -> DeepSpeedInferenceConfig:
    """Read a configuration and add keyword arguments to it.

    Args:
        config: a dict, which is updated; the path of a JSON; a `DeepSpeedInferenceConfig`; or None.
        arguments: further keys and values.

    Raises:
        ConfigError: a key has two different values, is unknown, or has a wrong value.
    """
    if isinstance(config, (str, os.PathLike)):
        config = load_ds_config(config)
    if config is None:
        config = {}
    if isinstance(config, DeepSpeedInferenceConfig):
        config = config.model_dump(exclude_unset=True)
    if not isinstance(config, dict):
        raise ConfigError(
            f"`config` must be a dictionary or the path of a JSON, but is {type(config).__name__}"
        )
    for key in config.keys() & arguments.keys():
        if config[key] != arguments[key]:
            raise ConfigError(
                f"`{key}` must have one value, but is {config[key]} in `config` and {arguments[key]} as an "
                "argument; leave one of them out"
            )
    config.update(arguments)
    try:
        read = DeepSpeedInferenceConfig(**config)
    except ValidationError as error:
        raise ConfigError([_sentence(details) for details in error.errors()]) from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
    _refuse(read)
    for key, why in read.without_effect.items():
        warnings.warn(f"`{key}` of init_inference has no effect here: {why}", stacklevel=4)
    return read


def _sentence(details: ErrorDetails) -> str:
    place = ".".join(map(str, details["loc"]))
    if details["type"] == "extra_forbidden":
        return f"`{place}` must be a key of init_inference, but is not one; correct or leave it out"
    return f"`{place}` {details['msg'].removeprefix('Value error, ')}, but is {details['input']!r:.60}"


def _refuse(config: DeepSpeedInferenceConfig) -> None:
    """Raise ConfigError if the configuration asks for something unsupported."""
    moe = config.moe
    if isinstance(moe, DeepSpeedMoEConfig) and moe.ep_size > 1:
        raise ConfigError(
            f"`moe.ep_size` must be 1 here, but is {moe.ep_size}; slice the experts with "
            "`tensor_parallel.tp_size`"
        )
    if config.save_mp_checkpoint_path or config.checkpoint_config.save_mp_checkpoint_path:
        raise ConfigError(
            "`save_mp_checkpoint_path` must be left out, but is given; a whole checkpoint is sliced while it "
            "is read, so slices need no checkpoint of their own"
        )
    if config.injection_policy and config.replace_with_kernel_inject:
        raise ConfigError(
            "`injection_policy` must be left out with `replace_with_kernel_inject`, but is given; choose one "
            "of them"
        )
    if config.enable_cuda_graph and config.tensor_parallel.tp_size > 1:
        raise ConfigError(
            "`enable_cuda_graph` must be false with tensor parallelism, but is true; leave it out"
        )
    weight = config.quant.weight
    if config.dtype == torch.int8 and (weight.num_bits != 8 or weight.q_type != "symmetric"):
        raise ConfigError(
            f"`quant.weight` must have 8 bits and be symmetric, but has {weight.num_bits} and is "
            f"{weight.q_type}; leave it out"
        )


def default_inference_config() -> dict[str, object]:
    """Return the default of every key."""
    return DeepSpeedInferenceConfig().model_dump()
