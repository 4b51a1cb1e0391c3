"""Pipeline schedules against torch's, on the same GPT in the same chunks, with one thread per stage.

    python benchmarks/pipeline.py --dtype bf16                  # every schedule, each in a run of its own
    python benchmarks/pipeline.py --schedules 1f1b zb-v --predict
    python benchmarks/pipeline.py --ranks 4 --contenders torch-1f1b torch-1f1b-same megazero-1f1b

There are three contenders per schedule: `torch-X` is `torch.distributed.pipelining` over the plain GPT,
`torch-X-same` is the same over megazero's own layers, so that only the executor differs, and `megazero-X`.
The baseline of every run is torch-1f1b. All start from the same weights and train on the same tokens: their
losses are compared, and the exit code is 1 if they differ or a contender fails.

`--predict` compares the measured time of a step with what `megazero.pipeline.simulate` computes from the
median times of the single computations, on a schedule whose messages take no time, plus the update after it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.contenders import ActionTime, Shape
from benchmarks.teams import Contender, Team, add_arguments, present, results, started, take_turns, write
from megazero.pipeline.actions import Op
from megazero.pipeline.lower import add_transfers
from megazero.pipeline.schedules import build_schedule
from megazero.pipeline.simulate import Costs, simulate

BASELINE = "torch-1f1b"
# schedule -> chunks per stage
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}
# Largest difference of losses: rounding. In bf16 the plain GPT keeps its weights and residual stream in fp32.
LOSS_SPREAD = {"fp32": 2e-4, "bf16": 2e-2}


def contenders(ranks: int) -> dict[str, Contender]:
    """All of them by name, on a pipeline with this many stages."""
    found = []
    for kind, per_stage in SCHEDULES.items():
        virtual = per_stage if kind == "interleaved" else None
        ours = {"pipeline_schedule": kind, "num_virtual_stages_per_pipeline_rank": virtual}
        for suffix, same in (("", False), ("-same", True)):
            options = {"kind": kind, "per_stage": per_stage, "same_stages": same}
            name = f"torch-{kind}{suffix}"
            found.append(Contender(name, "pipelining", "build", (ranks,), "torch", ranks, options))
        options = {"pp": ranks, "parallel": ours}
        found.append(Contender(f"megazero-{kind}", "ours", "build", (ranks,), "torch", ranks, options))
    return {c.name: c for c in found}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, list(contenders(2)))
    parser.add_argument("--schedules", nargs="*", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--ranks", type=int, choices=[2, 4], default=2, help="pipeline stages")
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=8, help="micro-batches per step")
    parser.add_argument("--layers", type=int, default=8, help="a multiple of the chunks of the model")
    parser.add_argument("--predict", action="store_true", help="compare with simulated times")
    args = parser.parse_args()
    if args.layers % (2 * args.ranks):
        parser.error(f"`--layers` must be a multiple of {2 * args.ranks}, but is {args.layers}")
    if args.micro_batches % args.ranks:
        parser.error(f"`--micro-batches` must be a multiple of {args.ranks}, but is {args.micro_batches}")
    return args


def runs(args: argparse.Namespace) -> Iterator[list[Contender]]:
    """The contenders of each run."""
    by_name = contenders(args.ranks)
    if args.contenders:
        yield present([by_name[name] for name in args.contenders])
        return
    for kind in args.schedules:
        names = dict.fromkeys((BASELINE, f"torch-{kind}", f"torch-{kind}-same", f"megazero-{kind}"))
        yield present([by_name[name] for name in names])


def measured_costs(records: Iterable[ActionTime], chunks: int) -> Costs:
    """The median seconds of each operation on each chunk; 0 for those that a schedule does not have."""
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    for record in records:
        seconds[record.op, record.chunk].append(record.seconds)

    def of(op: Op) -> tuple[float, ...]:
        return tuple(statistics.median(seconds.get((op.value, chunk), [0.0])) for chunk in range(chunks))

    return Costs(of(Op.FORWARD), of(Op.BACKWARD), of(Op.INPUT), of(Op.WEIGHT))


def prediction(team: Team, settings: Mapping[str, object]) -> dict:
    """The measured time of a step beside the simulated one, in seconds."""
    ranks, microbatches = settings["ranks"], settings["micro_batches"]
    kind = next(kind for kind in SCHEDULES if team.name.removesuffix("-same").endswith(f"-{kind}"))
    records = team.action_times()
    schedule = build_schedule(kind, ranks, microbatches, SCHEDULES[kind])
    timeline = simulate(add_transfers(schedule), measured_costs(records, schedule.chunks))
    updates = [[r.seconds for r in records if r.op == "U" and r.stage == stage] for stage in range(ranks)]
    update = max(statistics.median(times) for times in updates)
    measured = team.tokens_per_step / statistics.median(r.tokens_per_second for r in team.rounds)
    return {
        "benchmark": "pipeline-prediction",
        "contender": team.name,
        **settings,
        "measured_seconds": round(measured, 4),
        "predicted_seconds": round(timeline.makespan + update, 4),
        "ratio": round(measured / (timeline.makespan + update), 3),
        "predicted_bubble": round(timeline.bubble, 3),
        "update_seconds": round(update, 4),
    }


def compare_losses(teams: list[Team], dtype: str) -> bool:
    """Print all losses; whether they agree."""
    losses = {team.name: team.rounds[-1].loss for team in teams}
    spread = max(losses.values()) - min(losses.values())
    agree = spread <= LOSS_SPREAD[dtype]
    shown = {name: round(loss, 6) for name, loss in losses.items()}
    line = {"benchmark": "pipeline-losses", "losses": shown, "spread": round(spread, 7), "agree": agree}
    print(json.dumps(line), flush=True)
    return agree


def main() -> int:
    args = arguments()
    shape = replace(
        Shape(),
        dtype=args.dtype,
        micro_batch=args.micro_batch,
        accumulations=args.micro_batches,
        layers=args.layers,
    )
    settings = {key: getattr(args, key) for key in ("dtype", "ranks", "threads", "micro_batches", "layers")}
    sound = True
    for number, chosen in enumerate(runs(args)):
        with started(chosen, shape, args.ranks, max(1, args.threads // args.ranks)) as (teams, failed):
            sound = sound and not failed
            if not teams:
                continue
            for team in teams:
                team.action_times()  # those of the first steps do not count
            take_turns(teams, shape, args.rounds, args.steps)
            run = {"run": number, **settings}
            lines = results(teams, "pipeline", run, BASELINE, step_peak=True)
            if args.predict:
                lines += [prediction(team, run) for team in teams]
            write(lines, args.output)
            sound = compare_losses(teams, args.dtype) and sound
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
