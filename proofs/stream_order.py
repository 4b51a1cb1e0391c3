"""Stream order: every copy, message and computation of a training is recorded, and all pairs must be ordered.

    python proofs/stream_order.py                # the layouts of the default sweeps, then all planted faults
    python proofs/stream_order.py --many         # those of the slow sweeps
    python proofs/stream_order.py --part 1/4     # every fourth of them
    python proofs/stream_order.py --figures      # copies of a step, beside compute and among it

Trains each layout that law 1 is held over for two steps, on threads, with state where its store says, or with
an offload that takes turns; half of them are saved in the background, and inputs of recomputed layers are
offloaded where there are any. A recording takes each operation of torch for one that is queued on a device,
copies for a second queue, messages for one more each, and judges by happens-before (`tests/streams`): two
accesses to the same bytes, of which one writes, must be ordered by events and waits. Losses and weights must
be those of the same run without any of that, bit for bit. JSON lines; exits 1 if anything is amiss.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megazero.config.rules.table import broken_rules
from tests.equivalence.swept import swept
from tests.streams import plants
from tests.streams.plants import PLANTS
from tests.streams.recorder import RecordingStreams, WaitingStreams
from tests.streams.runs import Run, races, record

CPU: Mapping[str, Any] = {"optimizer": "cpu"}
OFFLOADS: tuple[Mapping[str, Any], ...] = (
    CPU,
    {**CPU, "parameters": "cpu"},
    {**CPU, "gradients": "none"},
    {**CPU, "fraction": 0.3},
    {"optimizer": "nvme", "gradients": "cpu", "parameters": "nvme"},
    {"parameters": "cpu"},
    {**CPU, "delayed_param_update": True, "delayed_param_update_start": 1},
    {"optimizer": "nvme", "fraction": 0.9},
    {"parameters": "nvme"},
)


def runs(many: bool) -> Iterator[Run]:
    """One run for each layout of the sweeps, but those that are compiled: their operations are not seen."""
    for number, layout in enumerate(swept(many)):
        if layout.compiled:
            continue
        inputs, saves = layout.recompute == "full", number % 2 == 0
        places = [{}] if layout.store else [OFFLOADS[(number + i) % len(OFFLOADS)] for i in range(9)]
        for place in places:
            offload = {k: v for k, v in place.items() if k != "parameters" or layout.zero == 3}
            steps = 3 if "delayed_param_update" in offload else 2
            run = Run(layout.brief, offload, inputs=inputs, saves=saves, steps=steps)
            if not broken_rules(run.config("/tmp"), layout.world_size):
                yield run
                break


def tell(**values: object) -> None:
    """Print a line of JSON."""
    print(json.dumps({"proof": "stream_order", **values}), flush=True)


def sweep(many: bool, part: int, parts: int) -> int:
    """How many runs have a race, or other numbers than without a recording."""
    bad = total = accesses = copied = blocking = 0
    began = time.process_time()
    for number, run in enumerate(runs(many)):
        if number % parts != part - 1:
            continue
        recorded = record(run, quick=number % 5 == 0)
        plain = record(run, watched=False)
        unordered = races(recorded)
        same = all(
            one.losses == other.losses
            and all(torch.equal(one.weights[name], weight) for name, weight in other.weights.items())
            for one, other in zip(recorded, plain, strict=True)
        )
        total += 1
        accesses += sum(one.recorder.order.accesses for one in recorded)
        copied += sum(one.recorder.copied for one in recorded)
        blocking += sum(one.recorder.blocking_bytes for one in recorded)
        if unordered or not same:
            bad += 1
            tell(run=run.name, unordered=unordered, same_bits=same)
    seconds = round(time.process_time() - began)
    tell(runs=total, bad=bad, accesses=accesses, copied=copied, blocking=blocking, seconds=seconds)
    return bad


def faults() -> int:
    """How many planted faults nothing shows."""
    missed = 0
    for plant in PLANTS:
        with plant.planted():
            unordered = races(record(plant.run))
        missed += not unordered
        tell(fault=plant.name, run=plant.run.name, seen=unordered[:1])
    tell(faults=len(PLANTS), missed=missed)
    return missed


def figures() -> None:
    """Copies of a step of one rank, on a stream of their own and as they were without one."""
    chosen = {
        "all on the host, stage 3": plants.ON_HOST,
        "all on disk, stage 3": plants.ON_DISK,
        "optimizer on the host, stage 2": plants.SUMS,
        "optimizer on the host, gradients not": plants.HALF,
        "parameters on the host": plants.SLICES,
        "inputs": plants.INPUTS,
    }
    for name, run in chosen.items():
        for streams in (WaitingStreams, RecordingStreams):
            recorder = record(run, streams=streams)[0].recorder
            tell(
                figure=name,
                beside=streams is RecordingStreams,
                bytes_beside=recorder.copied // run.steps,
                copies_among=sum(recorder.blocking.values()) // run.steps,
                bytes_among=recorder.blocking_bytes // run.steps,
            )


def main() -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--many", action="store_true")
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--only", choices=("sweep", "faults"))
    parser.add_argument("--figures", action="store_true")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    if flags.figures:
        figures()
        return 0
    part, parts = map(int, flags.part.split("/"))
    bad = 0 if flags.only == "faults" else sweep(flags.many, part, parts)
    return int(bool(bad + (0 if flags.only == "sweep" else faults())))


if __name__ == "__main__":
    sys.exit(main())
