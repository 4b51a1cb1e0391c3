"""The section `sparse_attention` of a JSON, for scripts that build their attention of it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

SECTION = "sparse_attention"
_SHARED: Mapping[str, Any] = MappingProxyType({"block": 16, "different_layout_per_head": False})
_TWO_WAYS: Mapping[str, Any] = MappingProxyType(
    {"attention": "bidirectional", "horizontal_global_attention": False}
)
_RUNS: Mapping[str, Any] = MappingProxyType({"global_block_indices": (0,), "global_block_end_indices": None})
_BY_MODE: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "dense": {"block": 16},
        "fixed": {
            **_SHARED,
            "num_local_blocks": 4,
            "num_global_blocks": 1,
            **_TWO_WAYS,
            "num_different_global_patterns": 1,
        },
        "variable": {**_SHARED, "num_random_blocks": 0, "local_window_blocks": (4,), **_RUNS, **_TWO_WAYS},
        "bigbird": {
            **_SHARED,
            "num_random_blocks": 0,
            "num_sliding_window_blocks": 3,
            "num_global_blocks": 1,
        },
        "bslongformer": {**_SHARED, "num_sliding_window_blocks": 3, **_RUNS},
    }
)
"""Mode -> its keys with DeepSpeed's defaults."""


def sparse_section(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """The section with the defaults of its mode, which `DeepSpeedConfig` shows; None if there is none.

    Args:
        given: the JSON's content, which has been read and found right.
    """
    section = given.get(SECTION)
    if not isinstance(section, Mapping):
        return None
    mode = str(section.get("mode", "fixed")).lower()
    defaults = {k: list(v) if isinstance(v, tuple) else v for k, v in _BY_MODE[mode].items()}
    return {"mode": mode, **{key: section.get(key, default) for key, default in defaults.items()}}


def sparse_faults(mode: str | None, model: nn.Module | None) -> list[str]:
    """A sentence if a JSON asks for sparse attention and the script's model, if it is known, has none."""
    if mode in (None, "dense") or model is None:
        return []
    if any(hasattr(module, "sparsity_config") for module in model.modules()):
        return []
    return [
        f"the model must have a `SparseSelfAttention` with `{SECTION}`, but has none; replace its attention "
        "by `deepspeed.ops.sparse_attention.SparseAttentionUtils`, or leave the section out"
    ]
