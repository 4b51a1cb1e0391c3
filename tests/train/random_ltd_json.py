"""DeepSpeed's JSON section for random-LTD, as published configurations write it."""

from __future__ import annotations

from typing import Any


def random_ltd_section(least: int, most: int, steps: int, multiple: int) -> dict[str, Any]:
    """The inner two of four layers see `least` tokens at first and `most` after so many steps.

    multiple: what numbers in between are rounded down to.
    """
    return {
        "enabled": True,
        "total_layer_num": 4,
        "random_ltd_layer_num": 2,
        "random_ltd_layer_id": [1, 2],
        "model_mask_name": "attention_mask",
        "model_type": "decoder",
        "hidden_state_order": "seq_batch_dim",
        "random_ltd_schedule": {
            "min_value": least,
            "max_value": most,
            "schedule_type": "fixed_linear",
            "schedule_config": {"require_steps": steps, "seq_per_step": multiple},
        },
    }
