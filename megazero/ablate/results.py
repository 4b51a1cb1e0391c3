"""The results of finished runs: losses on validation data, and the tokens, FLOPs and time spent by then."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megazero.ablate.sizes import ModelSize
from megazero.ablate.trial import Trial, records
from megazero.train.observe.monitors.jsonl import to_json


@dataclass(frozen=True)
class EvaluationPoint:
    """One evaluation: the loss, and the cost of the training before it.

    Attributes:
        iteration: optimizer steps.
        tokens: tokens trained on.
        flops: FLOPs of training as the trainer counts them, over all ranks.
        seconds: time of the steps alone, without start-up, evaluations and checkpoints.
        loss: mean loss on validation data, in nats per token; NaN if nothing counted.
    """

    iteration: int
    tokens: float
    flops: float
    seconds: float
    loss: float


@dataclass(frozen=True)
class Outcome:
    """The result of one finished run.

    Attributes:
        configuration, title: name and title of the member.
        seed, ranks, fingerprint: as in `Trial`.
        size: the size of its model.
        curve: its evaluations, in order; the last one is at the end of the training.
    """

    configuration: str
    title: str
    seed: int
    ranks: int
    fingerprint: str
    size: ModelSize
    curve: tuple[EvaluationPoint, ...]

    @property
    def end(self) -> EvaluationPoint:
        """The evaluation at the end of the training."""
        return self.curve[-1]

    def record(self) -> dict[str, Any]:
        """Everything as a JSON object."""
        facts = asdict(self)
        curve, size = facts.pop("curve"), facts.pop("size")
        end = {"validation_loss": self.end.loss, **{n: curve[-1][n] for n in ("tokens", "flops", "seconds")}}
        record = to_json({**facts, **size, **end, "curve": curve})
        assert isinstance(record, dict)
        return record


@dataclass(frozen=True)
class Findings:
    """The results of all runs of one member, seed by seed.

    Attributes:
        outcomes: the member's finished runs, by seed; at least one.
    """

    outcomes: tuple[Outcome, ...]

    @property
    def name(self) -> str:
        """The member's name."""
        return self.outcomes[0].configuration

    @property
    def file(self) -> str:
        """The name of the member's file, which its trainings of other lengths share."""
        return self.name.partition("@")[0]

    @property
    def losses(self) -> list[float]:
        """The loss of each run at its end."""
        return [outcome.end.loss for outcome in self.outcomes]

    @property
    def spread(self) -> float | None:
        """The standard deviation of the final losses over the seeds; None with one seed."""
        return statistics.stdev(self.losses) if len(self.losses) > 1 else None

    @property
    def curve(self) -> tuple[EvaluationPoint, ...]:
        """The mean over the seeds of each evaluation."""
        return tuple(
            EvaluationPoint(
                together[0].iteration,
                *(
                    statistics.fmean(getattr(point, name) for point in together)
                    for name in ("tokens", "flops", "seconds", "loss")
                ),
            )
            for together in zip(*(outcome.curve for outcome in self.outcomes), strict=True)
        )

    def band(self) -> list[tuple[float, float]]:
        """The lowest and the highest loss of each evaluation."""
        together = zip(*(outcome.curve for outcome in self.outcomes), strict=True)
        return [(min(losses), max(losses)) for losses in ([m.loss for m in points] for points in together)]


def outcome_of(trial: Trial, size: ModelSize) -> Outcome:
    """The result of a finished trial, read from its metrics."""
    steps = sorted(records(trial.metrics), key=lambda record: record["iteration"])
    curve = []
    for evaluation in {record["iteration"]: record for record in trial.evaluations()}.values():
        before = [step for step in steps if step["iteration"] <= evaluation["iteration"]]
        spent = [float(step["seconds"]) for step in before]
        teraflops = (float(step["tflops"]) * step["seconds"] for step in before)
        loss = evaluation["lm_loss"]
        curve.append(
            EvaluationPoint(
                evaluation["iteration"],
                evaluation["consumed_tokens"],
                1e12 * trial.ranks * math.fsum(teraflops),
                math.fsum(spent),
                math.nan if loss is None else float(loss),
            )
        )
    member = trial.member
    return Outcome(member.name, member.title, trial.seed, trial.ranks, trial.fingerprint, size, tuple(curve))


def grouped(outcomes: Iterable[Outcome]) -> tuple[Findings, ...]:
    """The outcomes by member, in the order in which members first appear."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.configuration, []).append(outcome)
    return tuple(Findings(tuple(sorted(runs, key=lambda run: run.seed))) for runs in groups.values())


def reaching(curve: Sequence[EvaluationPoint], loss: float) -> EvaluationPoint | None:
    """The point at which a curve gets down to `loss` for good, on straight lines between evaluations.

    None if the curve ends above `loss`. A curve that is never above it gets there at its first evaluation.
    """
    if not curve[-1].loss <= loss:
        return None
    first = next(i for i in reversed(range(-1, len(curve))) if i < 0 or not curve[i].loss <= loss) + 1
    if first == 0:
        return curve[0]
    above, below = asdict(curve[first - 1]), asdict(curve[first])
    share = (above["loss"] - loss) / (above["loss"] - below["loss"])
    if math.isnan(share):  # nothing counted in the evaluation before
        return curve[first]
    between = {name: above[name] + share * (below[name] - above[name]) for name in above}
    return EvaluationPoint(**{**between, "iteration": curve[first].iteration, "loss": loss})


def write_lines(outcomes: Iterable[Outcome], path: Path) -> None:
    """Write one JSON object per run, a line each."""
    path.write_text("".join(json.dumps(outcome.record()) + "\n" for outcome in outcomes), encoding="utf-8")
