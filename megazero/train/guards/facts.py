"""Facts of a step for the report of an incident: gradient norms by layer, losses by replica, samples."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TypedDict

from megazero.config.steps import Step
from megazero.models.batch import MicroBatch
from megazero.mpu.messages import fold_values
from megazero.train.step.engine import Attempt, Engine
from megazero.train.step.feed import Feed, SampleFacts

_LAYER = re.compile(r"layers\.[0-9]+")


class _ReplicaFacts(TypedDict):
    """The sum and count of the first loss term over ranks of one replica."""

    sum: float
    count: float
    ranks: list[int]


class _Folded(TypedDict):
    """The facts of some ranks: parameter -> gradient norm, replica -> losses, and samples."""

    norms: dict[str, float]
    replicas: dict[str, _ReplicaFacts]
    samples: list[SampleFacts]


def step_facts(
    engine: Engine,
    feed: Feed[MicroBatch],
    step: Step,
    attempt: Attempt,
    batches: Sequence[MicroBatch],
) -> dict[str, object]:
    """Gather the facts of a step, as JSON, before its update; every rank calls this.

    Returns:
        The facts on the first rank, and an empty dict on the others.
    """
    context = engine.context
    scale = attempt.grad_norm / attempt.totals.norm if attempt.totals.norm else 1.0
    norms = {name: norm * scale for name, norm in engine.optimizer.measures.gradient_norms().items()}
    first = engine.executor.terms[0]
    replica: _ReplicaFacts = {
        "sum": float(attempt.local[0]) if context.tp.rank == 0 else 0.0,
        "count": sum(batch.counts[first.over] for batch in batches),
        "ranks": [context.rank],
    }
    own: _Folded = {
        "norms": norms,
        "replicas": {str(context.data.rank): replica},  # keys of JSON are strings
        "samples": feed.samples_of(step) if context.model.rank == 0 else [],
    }
    everyone: _Folded | None = fold_values(context.world, own, _fold, context.device)
    if everyone is None:
        return {}
    return {
        "losses": attempt.losses.record(),
        "gradient norm": attempt.grad_norm,
        "samples from and to": [step.before.samples, step.after.samples],
        f"{first.label} of each replica": [
            {"replica": int(number), "loss": facts["sum"] / max(1, facts["count"]), "ranks": facts["ranks"]}
            for number, facts in sorted(everyone["replicas"].items(), key=lambda item: int(item[0]))
        ],
        "gradient norm by layer": _by_layer(everyone["norms"]),
        "samples": sorted(everyone["samples"], key=lambda sample: sample["place"]),
    }


def _fold(some: _Folded, others: _Folded) -> _Folded:
    """Merge the facts of two sets of ranks."""
    replicas = dict(some["replicas"])
    for number, more in others["replicas"].items():
        if (known := replicas.get(number)) is not None:
            more = {
                "sum": known["sum"] + more["sum"],
                "count": max(known["count"], more["count"]),
                "ranks": [*known["ranks"], *more["ranks"]],
            }
        replicas[number] = more
    return {
        "norms": {**some["norms"], **others["norms"]},
        "replicas": replicas,
        "samples": [*some["samples"], *others["samples"]],
    }


def _by_layer(norms: Mapping[str, float]) -> dict[str, float]:
    """Combine the gradient norms of each layer's parameters; other parameters keep their names."""
    squares: dict[str, float] = defaultdict(float)
    for name, norm in norms.items():
        layer = _LAYER.search(name)
        squares[layer[0] if layer else name] += norm * norm
    return {name: math.sqrt(total) for name, total in squares.items()}
