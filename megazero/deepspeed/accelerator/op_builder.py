"""`ops.op_builder`: whether an operator is here, and the module that has it.

Nothing is compiled when a script asks: kernels are built when megazero is installed, and every operator also
runs without them. `BUILDERS` says where each operator of DeepSpeed's lives here.
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
    """Says whether an operator is here; `builder_class` makes one of each name."""

    NAME = ""

    def __init__(self, name: str | None = None):
        self.name = name or self.NAME

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether megazero has the operator; with `verbose` it prints why not."""
        home, reason = BUILDERS[type(self).__name__]
        if reason and verbose:
            print(f"{self.name}: {reason}", flush=True)
        return bool(home)

    def load(self, verbose: bool = True) -> ModuleType:
        """The module that has the operator; nothing is compiled.

        Raises:
            ConfigError: megazero has no such operator.
        """
        home, reason = BUILDERS[type(self).__name__]
        if not home:
            raise ConfigError(f"`{type(self).__name__}` must not be loaded here; {reason}")
        return import_module(home)

    def absolute_name(self) -> str:
        """The module that has the operator; empty if none has."""
        return BUILDERS[type(self).__name__][0]

    @staticmethod
    def installed_rocm_version() -> tuple[int, int]:
        """The version of ROCm that torch is built with; 0.0 without one."""
        major, minor, *_ = map(int, (torch.version.hip or "0.0").split("-")[0].split("."))
        return major, minor

    def builder(self) -> None:
        """Nothing: `setup.py` builds all kernels.

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
    """The builder of this name; `NotImplementedBuilder` for one that DeepSpeed does not have."""
    return _CLASSES.get(name, _CLASSES["NotImplementedBuilder"])


ALL_OPS: Mapping[str, OpBuilder] = MappingProxyType(
    {builder_class(name).NAME: builder_class(name)() for name in BUILDERS}
)
"""Operator -> its builder."""
COMPATIBLE: Mapping[str, bool] = MappingProxyType(
    {name: builder.is_compatible() for name, builder in ALL_OPS.items()}
)
"""Operator -> whether it is here."""


def get_default_compute_capabilities() -> str:
    """No capabilities: nothing is compiled when a script asks."""
    return ""


def __getattr__(name: str) -> type[OpBuilder]:
    if name not in BUILDERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return builder_class(name)
