"""`ops.op_builder`: which of DeepSpeed's operators megazero has, and in which modules.

Builders compile nothing: kernels are built when megazero is installed, and every operator also runs without
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType, ModuleType

import torch

from megazero.errors import ConfigError

_NONE = "megazero has no such kernel and needs none: "
_ATTENTION = _NONE + "torch's scaled_dot_product_attention runs instead"
_INFERENCE = _NONE + "`init_inference` runs the model's own layers"
# Builder -> the module that has the operator, or the reason why there is none.
BUILDERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "AsyncIOBuilder": ("megazero.zero.store.disk", ""),
        "CCLCommBuilder": ("", _NONE + "Gloo carries messages between CPU ranks"),
        "CPUAdagradBuilder": ("megazero.optim", ""),
        "CPUAdamBuilder": ("megazero.optim", ""),
        "CPULionBuilder": ("megazero.optim", ""),
        "DeepCompileBuilder": ("", _NONE + "use `torch.compile`"),
        "EvoformerAttnBuilder": ("", _ATTENTION),
        "FPQuantizerBuilder": ("", _NONE + "train in bf16"),
        "FlashAttentionBuilder": ("", _ATTENTION),
        "FusedAdamBuilder": ("megazero.optim", ""),
        "FusedLambBuilder": ("megazero.optim", ""),
        "FusedLionBuilder": ("megazero.optim", ""),
        "GDSBuilder": ("", _NONE + "offload to NVMe goes through the host's memory"),
        "InferenceBuilder": ("", _INFERENCE),
        "InferenceCoreBuilder": ("", _INFERENCE),
        "InferenceCutlassBuilder": ("", _INFERENCE),
        "PinMemoryBuilder": ("", _NONE + "torch pins memory"),
        "QuantizerBuilder": ("megazero.ops.quantize", ""),
        "RaggedOpsBuilder": ("", _INFERENCE),
        "RaggedUtilsBuilder": ("", _INFERENCE),
        "RandomLTDBuilder": ("megazero.ops.chosen_rows", ""),
        "ShareMemCommBuilder": ("", _NONE + "Gloo carries messages between CPU ranks"),
        "SparseAttnBuilder": ("", _ATTENTION),
        "SpatialInferenceBuilder": ("", _INFERENCE),
        "StochasticTransformerBuilder": ("", _NONE + "the transformer layer is exact"),
        "TransformerBuilder": ("megazero.deepspeed.legacy.transformer", ""),
        "UtilsBuilder": ("", _NONE + "torch flattens tensors"),
        "NotImplementedBuilder": ("", _NONE + "this device has none in DeepSpeed either"),
    }
)


class OpBuilder:
    """A builder of one operator; `builder_class` returns the class of each name."""

    NAME = ""

    def __init__(self, name: str | None = None):
        self.name = name or self.NAME

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether megazero has the operator; with `verbose`, print why not."""
        home, reason = BUILDERS[type(self).__name__]
        if reason and verbose:
            print(f"{self.name}: {reason}", flush=True)
        return bool(home)

    def load(self, verbose: bool = True) -> ModuleType:
        """Import the module of the operator.

        Raises:
            ConfigError: megazero does not have the operator.
        """
        home, reason = BUILDERS[type(self).__name__]
        if not home:
            raise ConfigError(f"`{type(self).__name__}` must not be loaded here; {reason}")
        return import_module(home)

    def absolute_name(self) -> str:
        """Return the name of the operator's module; empty if megazero does not have the operator."""
        return BUILDERS[type(self).__name__][0]

    @staticmethod
    def installed_rocm_version() -> tuple[int, int]:
        """Return the version of ROCm that torch is built with; (0, 0) without ROCm."""
        major, minor, *_ = map(int, (torch.version.hip or "0.0").split("-")[0].split("."))
        return major, minor

    def builder(self) -> None:
        """Refuse to build: `setup.py` builds all kernels.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "`builder` must not be called here; `pip install` builds megazero's kernels, so leave it out"
        )


_CLASSES: Mapping[str, type[OpBuilder]] = MappingProxyType(
    {
        name: type(
            name, (OpBuilder,), {"NAME": name.removesuffix("Builder").lower(), "__doc__": why or "Is here."}
        )
        for name, (_, why) in BUILDERS.items()
    }
)


def builder_class(name: str) -> type[OpBuilder]:
    """Return the class of a builder; `NotImplementedBuilder` for an unknown name."""
    return _CLASSES.get(name, _CLASSES["NotImplementedBuilder"])


ALL_OPS: Mapping[str, OpBuilder] = MappingProxyType(
    {builder_class(name).NAME: builder_class(name)() for name in BUILDERS}
)
"""Operator -> builder."""
COMPATIBLE: Mapping[str, bool] = MappingProxyType(
    {name: builder.is_compatible() for name, builder in ALL_OPS.items()}
)
"""Operator -> whether megazero has it."""


def get_default_compute_capabilities() -> str:
    """Return no capabilities, because builders compile nothing."""
    return ""


def __getattr__(name: str) -> type[OpBuilder]:
    if name not in BUILDERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return builder_class(name)
