"""Keys of a DeepSpeed JSON that make training cheaper: curricula, random-LTD and layer dropping.

`EXAMPLES` has, for each key, its value, other keys that must stand beside it, and what the tree then holds.
"""

from __future__ import annotations

from typing import Any

from megazero.config.tree.data_sampling import CurriculumMetric

LTD = "data_efficiency.data_routing.random_ltd"
DROPS = {
    "data_efficiency.enabled": True,
    "data_efficiency.data_routing.enabled": True,
    f"{LTD}.enabled": True,
}
EXAMPLES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    **{
        switch: (
            True,
            {other: True for other in DROPS if other != switch},
            {"skipping.random_ltd": True},
        )
        for switch in DROPS
    },
    f"{LTD}.total_layer_num": (24, DROPS, {"skipping.random_ltd_total_layer_num": 24}),
    f"{LTD}.random_ltd_layer_num": (22, DROPS, {"skipping.random_ltd_layer_num": 22}),
    f"{LTD}.random_ltd_layer_id": ([0, 1], DROPS, {"skipping.random_ltd_layer_id": (0, 1)}),
    f"{LTD}.random_ltd_schedule.min_value": (128, DROPS, {"skipping.random_ltd_min_value": 128}),
    f"{LTD}.random_ltd_schedule.max_value": (512, DROPS, {"skipping.random_ltd_max_value": 512}),
    f"{LTD}.random_ltd_schedule.schedule_config.require_steps": (
        9000,
        DROPS,
        {"skipping.random_ltd_require_steps": 9000},
    ),
    f"{LTD}.random_ltd_schedule.schedule_config.seq_per_step": (
        8,
        DROPS,
        {"skipping.random_ltd_seq_per_step": 8},
    ),
    "progressive_layer_drop.enabled": (
        True,
        {},
        # DeepSpeed's own share is 1 unless the JSON names one: no layer is ever left out.
        {"skipping.progressive_layer_drop": True, "skipping.pld_theta": 1.0, "skipping.pld_gamma": 0.001},
    ),
    "progressive_layer_drop.theta": (
        0.25,
        {"progressive_layer_drop.enabled": True},
        {"skipping.pld_theta": 0.25},
    ),
    "progressive_layer_drop.gamma": (
        0.01,
        {"progressive_layer_drop.enabled": True},
        {"skipping.pld_gamma": 0.01},
    ),
}

RAMP = {
    "curriculum_learning.enabled": True,
    "curriculum_learning.schedule_type": "fixed_root",
}
EXAMPLES |= {
    "curriculum_learning.enabled": (
        True,
        {"curriculum_learning.schedule_type": "fixed_linear"},
        {"curriculum.seqlen_schedule": "fixed_linear"},
    ),
    "curriculum_learning.schedule_type": (
        "fixed_linear",
        {"curriculum_learning.enabled": True},
        {"curriculum.seqlen_schedule": "fixed_linear"},
    ),
    "curriculum_learning.min_difficulty": (64, RAMP, {"curriculum.seqlen_min_difficulty": 64}),
    "curriculum_learning.max_difficulty": (512, RAMP, {"curriculum.seqlen_max_difficulty": 512}),
    "curriculum_learning.schedule_config.total_curriculum_step": (
        900,
        RAMP,
        {"curriculum.seqlen_total_curriculum_step": 900},
    ),
    "curriculum_learning.schedule_config.difficulty_step": (
        16,
        RAMP,
        {"curriculum.seqlen_difficulty_step": 16},
    ),
    "curriculum_learning.schedule_config.root_degree": (2, RAMP, {"curriculum.seqlen_root_degree": 2.0}),
    "curriculum_learning.schedule_config.difficulty": (
        [8, 16],
        {**RAMP, "curriculum_learning.schedule_type": "fixed_discrete"},
        {"curriculum.seqlen_difficulty": (8, 16)},
    ),
    "curriculum_learning.schedule_config.max_step": (
        [10],
        {**RAMP, "curriculum_learning.schedule_type": "fixed_discrete"},
        {"curriculum.seqlen_max_step": (10,)},
    ),
}

RARITY = {
    "index_to_sample_path": "clusters/rarity_index_to_sample_percentile_merged",
    "index_to_metric_path": "clusters/rarity_index_to_metric",
    "difficulty_type": "percentile",
    "clustering_type": "schedule_based",
    "min_difficulty": 1,
    "max_difficulty": 100,
    "schedule_type": "fixed_root",
    "schedule_config": {"total_curriculum_step": 110000, "difficulty_step": 1, "root_degree": 2},
}
TRUNCATE = {
    "index_to_sample_path": "dummy",
    "index_to_metric_path": "dummy",
    "difficulty_type": "value",
    "clustering_type": "single_cluster",
    "min_difficulty": 80,
    "max_difficulty": 2048,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 110000, "difficulty_step": 8},
}
BY_RARITY = (
    CurriculumMetric(
        name="vocabularyrarity",
        **{key: value for key, value in RARITY.items() if key != "schedule_config"},
        **RARITY["schedule_config"],
    ),
)
TO_2048 = {
    "curriculum.seqlen_schedule": "fixed_linear",
    "curriculum.seqlen_min_difficulty": 80,
    "curriculum.seqlen_max_difficulty": 2048,
    "curriculum.seqlen_total_curriculum_step": 110000,
    "curriculum.seqlen_difficulty_step": 8,
}
SAMPLING = "data_efficiency.data_sampling"
LEARNING = f"{SAMPLING}.curriculum_learning"
METRICS = f"{LEARNING}.curriculum_metrics"
SWITCHES = {f"{section}.enabled": True for section in ("data_efficiency", SAMPLING, LEARNING)}
SAMPLED = {**SWITCHES, METRICS: {"vocabularyrarity": RARITY}}


def without(values: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}


EXAMPLES |= {
    **{
        key: (True, without(SAMPLED, key), {"data_sampling.curriculum_metrics": BY_RARITY})
        for key in SWITCHES
    },
    METRICS: (
        {"seqlen_truncate": TRUNCATE, "vocabularyrarity": RARITY},
        SWITCHES,
        {
            "data_sampling.curriculum_metrics": BY_RARITY,
            "curriculum.seqlen_kind": "truncate",
            **TO_2048,
        },
    ),
    "data_efficiency.seed": (7, SAMPLED, {"data_sampling.curriculum_seed": 7}),
}


def metric(name: str, **changes: Any) -> dict[str, Any]:
    """The section with one metric, which is `TRUNCATE` or `RARITY` with changes."""
    base = TRUNCATE if name.startswith("seqlen") else RARITY
    return {**SWITCHES, METRICS: {name: {**base, **changes}}}
