"""Keys of the section `sparse_attention` of a DeepSpeed JSON.

`SPARSE_EXAMPLES` has, for each key, its value, other keys that must stand beside it, and what the tree holds.
"""

from __future__ import annotations

from typing import Any

_MODE = {"sparse_attention.mode": "variable"}
_VALUES: dict[str, Any] = {
    "block": 32,
    "different_layout_per_head": True,
    "num_local_blocks": 8,
    "num_global_blocks": 2,
    "num_different_global_patterns": 4,
    "horizontal_global_attention": True,
    "num_random_blocks": 0,
    "local_window_blocks": [1, 2],
    "global_block_indices": [0, 5],
    "global_block_end_indices": [2, 7],
    "num_sliding_window_blocks": 5,
}
SPARSE_EXAMPLES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "sparse_attention.mode": ("BigBird", {}, {"model.sparse_attention": "bigbird"}),
    "sparse_attention.attention": (
        "Unidirectional",
        _MODE,
        {"model.sparse_direction": "unidirectional"},
    ),
    **{
        f"sparse_attention.{key}": (
            value,
            _MODE,
            {f"model.sparse_{key}": tuple(value) if isinstance(value, list) else value},
        )
        for key, value in _VALUES.items()
    },
}
