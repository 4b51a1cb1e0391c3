"""Facts of a step for the report of an incident: gradient norms by layer, losses by replica, samples."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TypedDict

from megazero.config.steps import Step
from megazero.models.batch import MicroBatch
from megazero.mpu.messages import gather_values
from megazero.train.step.engine import Attempt, Engine
from megazero.train.step.feed import Feed, SampleFacts

_LAYER = re.compile(r"layers\.[0-9]+")


class _RankFacts(TypedDict):
    """One rank's part: gradient norms by parameter, and the sum and count of the first loss term."""

    replica: int
    rank: int
    norms: dict[str, float]
    sum: float
    count: float
    samples: list[SampleFacts]


def step_facts(
    engine: Engine,
    feed: Feed[MicroBatch],
    step: Step,
    attempt: Attempt,
    batches: Sequence[MicroBatch],
) -> dict[str, object]:
    """Gather the facts of a step, as JSON, before its update; every rank calls this, and all get the same.

    Args:
        engine: computed the step, and holds its gradients.
        feed: gave its samples.
        step: the step.
        attempt: its losses and norms.
        batches: this rank's micro-batches.
    """
    context = engine.context
    scale = attempt.grad_norm / attempt.sums_norm if attempt.sums_norm else 1.0
    norms = {name: norm * scale for name, norm in engine.optimizer.measures.gradient_norms().items()}
    first = engine.executor.terms[0]
    mine: _RankFacts = {
        "replica": context.data.rank,
        "rank": context.rank,
        "norms": norms,
        "sum": float(attempt.local[0]) if context.tp.rank == 0 else 0.0,
        "count": sum(batch.counts[first.over] for batch in batches),
        "samples": feed.samples_of(step) if context.model.rank == 0 else [],
    }
    everyone: list[_RankFacts] = gather_values(context.world, mine, context.device)
    return {
        "losses": attempt.losses.record(),
        "gradient norm": attempt.grad_norm,
        "samples from and to": [step.before.samples, step.after.samples],
        f"{first.label} of each replica": _by_replica(everyone),
        "gradient norm by layer": _by_layer({k: v for facts in everyone for k, v in facts["norms"].items()}),
        "samples": sorted((s for facts in everyone for s in facts["samples"]), key=lambda s: s["place"]),
    }


def _by_replica(everyone: Sequence[_RankFacts]) -> list[dict[str, object]]:
    """The mean loss of each replica, and the ranks that hold it; replicas come in order."""
    replicas: dict[int, list[_RankFacts]] = defaultdict(list)
    for facts in everyone:
        replicas[facts["replica"]].append(facts)
    return [
        {
            "replica": number,
            "loss": sum(part["sum"] for part in parts) / max(1, max(part["count"] for part in parts)),
            "ranks": [part["rank"] for part in parts],
        }
        for number, parts in sorted(replicas.items())
    ]


def _by_layer(norms: Mapping[str, float]) -> dict[str, float]:
    """Gradient norms by layer, from those by parameter; a parameter outside of layers keeps its name."""
    squares: dict[str, float] = defaultdict(float)
    for name, norm in norms.items():
        layer = _LAYER.search(name)
        squares[layer[0] if layer else name] += norm * norm
    return {name: math.sqrt(total) for name, total in squares.items()}
