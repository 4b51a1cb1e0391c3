"""Policies of ZeRO for tests, which name the settings that they are about."""

from __future__ import annotations

from typing import Any

from megazero.zero.policy import Codes, GatherPolicy, StateDtypes, ZeroPolicy

# Name in a test -> the part of the policy, and the name there.
PARTS = {
    **{name: ("gathers", name) for name in ("prefetch", "persistence_threshold", "max_live", "hpz")},
    "overlap_gather": ("gathers", "overlap"),
    **{f"{name}_dtype": ("dtypes", name) for name in ("reduce", "accumulation", "main")},
    **{"weight_codes": ("codes", "weights"), "gradient_codes": ("codes", "gradients")},
    "rounding_seed": ("codes", "rounding_seed"),
}
KINDS = {"gathers": GatherPolicy, "dtypes": StateDtypes, "codes": Codes}


def make_policy(stage: int = 0, **settings: Any) -> ZeroPolicy:
    """A policy with these settings, whichever of its parts they belong to; the rest are defaults."""
    own = {name: value for name, value in settings.items() if name not in PARTS}
    of_parts: dict[str, dict[str, Any]] = {}
    for name in settings.keys() - own.keys():
        part, field = PARTS[name]
        of_parts.setdefault(part, {})[field] = settings[name]
    return ZeroPolicy(stage, **own, **{part: KINDS[part](**values) for part, values in of_parts.items()})
