"""What an incident tells of a step: gradient norms by layer, losses by replica, and the samples."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from megazero.config.steps import Step
from megazero.models import MicroBatch
from megazero.mpu import ParallelContext, gather_values
from megazero.train.engine import Attempt, Engine
from megazero.train.feed import Feed

_LAYER = re.compile(r"layers\.[0-9]+")


def step_facts(
    engine: Engine,
    feed: Feed[MicroBatch],
    step: Step,
    attempt: Attempt,
    batches: Sequence[MicroBatch],
    context: ParallelContext,
) -> dict[str, Any]:
    """Facts of a step whose gradients are there, as JSON; every rank calls this, and all get the same.

    Args:
        engine: computed the step.
        feed: gave its samples.
        step: which one.
        attempt: what came out.
        batches: this rank's micro-batches.
        context: all ranks.
    """
    scale = attempt.grad_norm / attempt.sums_norm if attempt.sums_norm else 1.0
    norms = {name: norm * scale for name, norm in engine.optimizer.gradient_norms().items()}
    first = engine.executor.terms[0]
    mine = {
        "replica": context.data.rank,
        "rank": context.rank,
        "norms": norms,
        "sum": float(attempt.local[0]) if context.tp.rank == 0 else 0.0,
        "count": sum(batch.counts[first.over] for batch in batches),
        "samples": feed.samples_of(step) if context.model.rank == 0 else [],
    }
    everyone = gather_values(context.world, mine, context.device)
    return {
        "losses": attempt.losses.record(),
        "gradient norm": attempt.grad_norm,
        "samples from and to": [step.before.samples, step.after.samples],
        f"{first.label} of each replica": _by_replica(everyone),
        "gradient norm by layer": _by_layer({k: v for each in everyone for k, v in each["norms"].items()}),
        "samples": sorted((s for each in everyone for s in each["samples"]), key=lambda s: s["place"]),
    }


def _by_replica(everyone: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The mean loss of each replica, and the ranks that hold it; replicas come in order."""
    found: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for each in everyone:
        found[each["replica"]].append(each)
    return [
        {
            "replica": number,
            "loss": sum(each["sum"] for each in parts) / max(1, max(each["count"] for each in parts)),
            "ranks": [each["rank"] for each in parts],
        }
        for number, parts in sorted(found.items())
    ]


def _by_layer(norms: Mapping[str, float]) -> dict[str, float]:
    """Norms of parameters as those of layers; what belongs to none goes by its name."""
    squares: dict[str, float] = defaultdict(float)
    for name, norm in norms.items():
        layer = _LAYER.search(name)
        squares[layer[0] if layer else name] += norm * norm
    return {name: math.sqrt(total) for name, total in squares.items()}
