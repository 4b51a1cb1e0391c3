"""Remarks on sums that a resumed run adds up in another order, so that last bits may differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from megazero.config.tree import ParallelConfig
from megazero.mpu import AXES
from megazero.train.state_json import RunFacts


def changed_sums(run: RunFacts, config: ParallelConfig, now: Mapping[str, str], world_size: int) -> list[str]:
    """A remark for each way in which sums were made that has changed since the checkpoint.

    On another layout sums are made of other parts anyway, and nothing is said.

    Args:
        run: the checkpoint's facts.
        config: the parallelism now.
        now: the `transports` now.
        world_size: the number of ranks now.
    """
    before, saved = run.written_by.transports, run.config.get("parallel") or {}
    settings = [axis.setting for axis in AXES.values() if axis.setting is not None]
    alike = all(saved.get(name) == getattr(config, name) for name in settings)
    if run.written_by.world_size != world_size or not alike:
        return []
    changed: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, way in now.items():
        if before.get(name, way) != way:
            changed[before[name], way].append(name)
    return [
        f"sums over {', '.join(names)} go over {way} now, and went over {then} before the checkpoint, in "
        "another order: the last bits may differ from those of a run that was not interrupted"
        for (then, way), names in changed.items()
    ]
