"""The results of finished runs: validation losses, and the tokens, FLOPs and time spent before each."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megazero.ablate.sizes import ModelSize
from megazero.ablate.trial import Trial, records
from megazero.train.observe.monitors.jsonl import to_json


@dataclass(frozen=True)
class EvaluationPoint:
    """One evaluation: the loss, and the cost of the training before it.

    Attributes:
        iteration: optimizer steps.
        tokens: tokens trained on.
        flops: FLOPs of training over all ranks, as the trainer counts them.
        seconds: time of the steps, without start-up, evaluations and checkpoints.
        loss: mean loss on validation data, in nats per token; NaN if nothing counted.
    """

    iteration: int
    tokens: float
    flops: float
    seconds: float
    loss: float


@dataclass(frozen=True)
class RunResult:
    """The result of one finished run.

    Attributes:
        configuration, title: name and title of the member.
        seed, ranks, fingerprint: as in `Trial`.
        size: the size of the model.
        curve: the evaluations in order; the last is at the end of the training.
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

    def record(self) -> dict[str, object]:
        """The result as a JSON object."""
        facts = asdict(self)
        curve, size = facts.pop("curve"), facts.pop("size")
        end = {"validation_loss": self.end.loss, **{n: curve[-1][n] for n in ("tokens", "flops", "seconds")}}
        record = to_json({**facts, **size, **end, "curve": curve})
        assert isinstance(record, dict)
        return record


@dataclass(frozen=True)
class Findings:
    """The results of all finished runs of one member, by seed; at least one."""

    runs: tuple[RunResult, ...]

    @property
    def name(self) -> str:
        """The member's name."""
        return self.runs[0].configuration

    @property
    def file(self) -> str:
        """The name of the member's file, the same for all lengths of its training."""
        return self.name.partition("@")[0]

    @property
    def length(self) -> str:
        """The share of the file's length that was trained; empty for all of it."""
        return self.name.partition("@")[2]

    @property
    def losses(self) -> list[float]:
        """The loss of each run at its end."""
        return [run.end.loss for run in self.runs]

    @property
    def spread(self) -> float | None:
        """The standard deviation of the final losses over the seeds; None with one seed."""
        return statistics.stdev(self.losses) if len(self.losses) > 1 else None

    @property
    def curve(self) -> tuple[EvaluationPoint, ...]:
        """The mean of each evaluation over the seeds."""
        names = ("tokens", "flops", "seconds", "loss")
        return tuple(
            EvaluationPoint(
                points[0].iteration,
                *(statistics.fmean(getattr(point, name) for point in points) for name in names),
            )
            for points in zip(*(run.curve for run in self.runs), strict=True)
        )

    def band(self) -> list[tuple[float, float]]:
        """The lowest and the highest loss of each evaluation over the seeds."""
        losses = zip(*([point.loss for point in run.curve] for run in self.runs), strict=True)
        return [(min(values), max(values)) for values in losses]


def result_of(trial: Trial, size: ModelSize) -> RunResult:
    """Read the result of a finished trial from its metrics."""
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
    return RunResult(
        member.name, member.title, trial.seed, trial.ranks, trial.fingerprint, size, tuple(curve)
    )


def grouped(results: Iterable[RunResult]) -> tuple[Findings, ...]:
    """Group results by member, in the order in which members first appear."""
    groups: dict[str, list[RunResult]] = {}
    for result in results:
        groups.setdefault(result.configuration, []).append(result)
    return tuple(Findings(tuple(sorted(runs, key=lambda run: run.seed))) for runs in groups.values())


def reaching(curve: Sequence[EvaluationPoint], loss: float) -> EvaluationPoint | None:
    """The point from which a curve stays at or below `loss`, interpolated between evaluations.

    None if the curve ends above `loss`; the first evaluation if the curve is never above it.
    """
    if not curve[-1].loss <= loss:
        return None
    first = next(i for i in reversed(range(-1, len(curve))) if i < 0 or not curve[i].loss <= loss) + 1
    if first == 0:
        return curve[0]
    above, below = asdict(curve[first - 1]), asdict(curve[first])
    share = (above["loss"] - loss) / (above["loss"] - below["loss"])
    if math.isnan(share):  # the evaluation before has no loss
        return curve[first]
    between = {name: above[name] + share * (below[name] - above[name]) for name in above}
    return EvaluationPoint(**{**between, "iteration": curve[first].iteration, "loss": loss})


def write_lines(results: Iterable[RunResult], path: Path) -> None:
    """Write a line of JSON per run."""
    path.write_text("".join(json.dumps(result.record()) + "\n" for result in results), encoding="utf-8")
