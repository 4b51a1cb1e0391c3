"""A door to the functions of `deepspeed.moe.utils` under their upstream path."""

from __future__ import annotations

from typing import Any

from megazero.door import through_door


def __getattr__(name: str) -> Any:
    return through_door(
        __name__,
        name,
        "megazero.deepspeed.moe.utils",
        "is_moe_param",
        "is_moe_param_group",
        "split_params_into_different_moe_groups_for_optimizer",
    )
