"""Reshard sweep: a checkpoint of one layout is loaded, saved and continued on another.

    python proofs/reshard_sweep.py --pairs 200

For a pair (A, B), two steps are trained and saved on A; that is loaded and saved again on B, and then on A.
Masters and moments must be equal in every bit after each load, and so must the weights that the model
computes with. Two further steps on B must equal two further steps on A under law 1. A longer circle, from A
over B, C and others to A, holds to the same. Ranks are threads of this process. Prints a line per pair and
exits 1 if anything differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megazero.checkpoint.box import Box
from megazero.checkpoint.folder import iteration_folder
from megazero.checkpoint.part import RANDOM, Part
from megazero.checkpoint.reader import CheckpointReader
from megazero.checkpoint.tensor_file import memory_of
from megazero.config.training_plan import training_plan_of
from megazero.config.tree.checkpoint import CheckpointConfig
from megazero.config.tree.config import Config
from megazero.mpu.context import ParallelContext, thread_context
from megazero.mpu.param_spec import ParamSpec
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.resume.resume import resume
from megazero.train.resume.snapshot import Snapshots
from megazero.train.step.engine import Engine
from megazero.train.step.state import TrainState
from megazero.train.step.timers import Timers
from megazero.verify.compare import Tolerance, compare
from megazero.verify.record import Record, micro_batches, verification_engine
from tests.layouts.layout import Layout
from tests.layouts.selection import allowed, candidates, covering

# With the padding to a multiple of four per rank: 36 rows on one tensor-parallel rank, 40 on two, and 48 on
# four, where the last has nothing but padding.
VOCABULARY = 33
BEFORE = AFTER = 2
# Layouts add in different orders, which eight bits of mantissa show: up to a third of this.
BF16 = Tolerance(loss=2e-3, grad_norm=2e-2, relative=0.1, absolute=4e-3)


@dataclass(frozen=True)
class Case:
    """A layout, and how it splits layers over stages."""

    layout: Layout
    partition: str = "uniform"

    @property
    def name(self) -> str:
        """A name in one word."""
        extras = [self.layout.dtype] if self.layout.dtype != "fp32" else []
        extras += [self.partition] if self.partition != "uniform" else []
        return "-".join([self.layout.name, *extras])

    @property
    def model(self) -> Layout:
        """What two cases must have in common: the model and its dtype."""
        return self.layout.serial

    def config(self, load: Path | None = None, save: Path | None = None) -> Config:
        """Its configuration."""
        plain = self.layout.config(BEFORE + AFTER)
        folders = CheckpointConfig(load=load and str(load), save=save and str(save))
        return plain.model_copy(
            update={
                "model": plain.model.model_copy(update={"vocab_size": VOCABULARY}),
                "parallel": plain.parallel.model_copy(update={"pipeline_partition": self.partition}),
                "checkpoint": folders,
            }
        )


@dataclass(frozen=True)
class Seen:
    """What one rank saw of a run.

    Attributes:
        state: (name, its local masters and moments) when the checkpoint was saved.
        weights: the model's own weights, whole, at that time.
        record: the record of the steps after that.
    """

    state: list[tuple[str, dict[str, Tensor]]]
    weights: dict[str, Tensor]
    record: Record


def run(case: Case, load: Path | None, save: Path, steps: int) -> list[Seen]:
    """Start (`load` is None) or resume a run, save it, and train `steps` more; returns what each rank saw."""
    world, config = ThreadWorld(case.layout.world_size), case.config(load, save)

    def work(rank: int) -> Seen:
        context = thread_context(world, case.layout.grid, rank, node_size=case.layout.hpz)
        training_plan = training_plan_of(config, context.data.size)
        if load is None:
            engine = verification_engine(config, training_plan, context)
            state = train(engine, config, context, TrainState(), BEFORE, Record())
        else:
            build = partial(verification_engine, context=context)
            resumed = resume(config, context, VOCABULARY, build)
            engine, state = resumed.engine, resumed.state
        snapshots = Snapshots(config, training_plan, engine, context, VOCABULARY, config.training.seed)
        assert snapshots.save(state) == [BEFORE]
        snapshots.saver.close()
        kept = [(s.name, {k: t.clone() for k, t in ts.items()}) for s, ts in engine.optimizer.full_state()]
        seen = Seen(kept, dict(own_weights(engine, context)), Record())
        train(engine, config, context, state, steps, seen.record)
        return seen

    return world.run(work)


def train(
    engine: Engine, config: Config, context: ParallelContext, state: TrainState, steps: int, record: Record
) -> TrainState:
    """Train that many steps and record what law 1 is about; returns the state after them."""
    training_plan = training_plan_of(config, context.data.size)
    for _ in range(steps):
        step = training_plan.at(state.progress)
        result = engine.train_step(micro_batches(config, context, step), state.progress, Timers())
        state = state.after(step, result.skipped)
        record.losses.append(result.losses.labelled())
        record.grad_norms.append(result.grad_norm)
        optimizer = engine.optimizer
        weights = ((spec, kinds["weight"]) for spec, kinds in optimizer.full_state(("weight",)))
        for found, kept in ((optimizer.full_gradients(), record.gradients), (weights, record.weights)):
            kept.append({name_of(s): s.unshard(t.float(), context.groups).clone() for s, t in found})
    return state


def own_weights(engine: Engine, context: ParallelContext) -> Iterator[tuple[str, Tensor]]:
    """The weights that this rank's stage computes with, whole, in their own dtype."""
    for bucket in engine.optimizer.store.buckets:
        bucket.unshard()
        bucket.wait()
        for spec, view in zip(bucket.layout.specs, bucket.layout.views(bucket.full), strict=True):
            yield name_of(spec), spec.unshard(view, context.groups).clone()
        bucket.reshard()


def name_of(spec: ParamSpec) -> str:
    """The name that records give a parameter, or a copy of a tied one."""
    return spec.name if spec.tied_with is None else f"copy of {spec.tied_with}"


def logical(directory: Path) -> dict[str, Tensor]:
    """All masters and moments of the checkpoint that a run saved."""
    reader = CheckpointReader(iteration_folder(directory, BEFORE))
    parts = [
        Part(key, shape, Box.whole(shape), torch.empty(shape, dtype=reader.dtype(key)))
        for key, shape in reader.shapes.items()
        if key.kind != RANDOM
    ]
    reader.read(parts)
    return {str(part.key): part.tensor for part in parts}


def difference(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> str | None:
    """The first tensor that is not equal in every bit, in words; None if all are."""
    if a.keys() != b.keys():
        return f"{sorted(a.keys() ^ b.keys())[0]} is on one side only"
    for name, tensor in a.items():
        other = b[name]
        if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
            return f"{name} is {tensor.dtype} {list(tensor.shape)}, then {other.dtype} {list(other.shape)}"
        if memory_of(tensor.contiguous()) != memory_of(other.contiguous()):
            return f"{name} differs in {int((tensor != other).sum())} elements"
    return None


def merged(ranks: Sequence[Seen]) -> Record:
    """The records of all ranks, merged as if of one process."""
    first = ranks[0].record
    whole = Record(first.losses, first.grad_norms)
    for step in range(len(first.losses)):
        for field in ("gradients", "weights"):
            found = {k: t for seen in ranks for k, t in getattr(seen.record, field)[step].items()}
            getattr(whole, field).append({k: t for k, t in found.items() if not k.startswith("copy of ")})
    return whole


@dataclass(frozen=True)
class Verdict:
    """What was found of one circle.

    Attributes:
        wrong: what is wrong, in words; empty if all laws hold.
        share: the largest deviation of the further steps, as a share of the tolerance.
    """

    wrong: tuple[str, ...]
    share: float


def check(circle: Sequence[Case], folder: Path) -> Verdict:
    """Take a training from the first layout over all others and back; `folder` holds the checkpoints."""
    first = circle[0]
    assert all(case.model == first.model for case in circle), "a checkpoint continues the same model"
    begun = run(first, None, folder / "0", AFTER)
    saved = logical(folder / "0")
    wrong, worst = [], 0.0
    for number, case in enumerate((*circle[1:], first), 1):
        back = number == len(circle)
        where = f"{case.name} again" if back else case.name
        ranks = run(case, folder / str(number - 1), folder / str(number), 0 if back else AFTER)
        wrong.append(prefixed(f"saved on {where}", difference(saved, logical(folder / str(number)))))
        wrong += different_weights(begun, ranks, where)
        if back:
            for rank, (a, b) in enumerate(zip(begun, ranks, strict=True)):
                wrong.append(prefixed(f"state of rank {rank}", difference(flat(a.state), flat(b.state))))
        else:
            tolerance = BF16 if case.layout.dtype == "bf16" else Tolerance()
            deviations = compare([seen.record for seen in ranks], merged(begun), tolerance)
            wrong += [f"{where}: {d}" for d in deviations if d.share > 1]
            worst = max(worst, *(d.share for d in deviations))
    return Verdict(tuple(w for w in wrong if w), worst)


def different_weights(begun: Sequence[Seen], ranks: Sequence[Seen], where: str) -> list[str | None]:
    """Weights that the ranks of another layout compute with and that are not those at the beginning."""
    weights = {k: t for seen in begun for k, t in seen.weights.items() if not k.startswith("copy of ")}
    wrong: list[str | None] = []
    for rank, seen in enumerate(ranks):
        # Which stage has a copy of a tied parameter depends on the layout; what it holds must not.
        expected = {name: weights[name.removeprefix("copy of ")] for name in seen.weights}
        wrong.append(prefixed(f"weights of rank {rank} of {where}", difference(expected, seen.weights)))
    if missing := weights.keys() - {name for seen in ranks for name in seen.weights}:
        wrong.append(f"{sorted(missing)[0]} is on no rank of {where}")
    return wrong


def flat(state: list[tuple[str, dict[str, Tensor]]]) -> dict[str, Tensor]:
    """The tensors by name and kind."""
    return {f"{name}/{kind}": tensor for name, kinds in state for kind, tensor in kinds.items()}


def prefixed(where: str, what: str | None) -> str | None:
    """Both in words, if there is anything to report."""
    return what and f"{where}: {what}"


@cache
def cases(most_ranks: int) -> tuple[Case, ...]:
    """Allowed cases that differ for a checkpoint: axes, stages, chunks, ZeRO, model and dtype."""
    return tuple(
        Case(replace(layout, layers=4, dtype=dtype))
        for layout in candidates(most_ranks)
        if layout.recompute == "none" and layout.micro_batch == 2 and not layout.keep
        if layout.layers <= 4 and max(layout.tp, layout.pp, layout.dp) <= 4 and allowed(layout)
        for dtype in ("fp32", "bf16")
    )


SMALL = Layout(layers=4, micro_batch=2)
DEEP = replace(SMALL, layers=8)
# What `cases` lacks: uneven stages, the second partition within a node (ZeRO++), and the eight layers that
# two chunks on each of four stages need.
EXTRA = (
    Case(replace(SMALL, pp=2, zero=1, dp=2), "1,3"),
    Case(replace(SMALL, pp=2, tp=2, sequence_parallel=True), "3,1"),
    Case(replace(SMALL, dp=4, zero=3, hpz=2)),
    Case(replace(SMALL, dp=4, zero=3, hpz=4, untied=True, shape="llama", dtype="bf16")),
    Case(replace(DEEP, tp=4, zero=3)),
    Case(replace(DEEP, pp=4, schedule="interleaved", virtual=2)),
    Case(replace(DEEP, dp=4, zero=2)),
    Case(replace(DEEP, pp=4, schedule="zb-v")),
    Case(replace(DEEP, pp=4, schedule="zb-h1"), "1,4,2,1"),
)


def circles(count: int, most_ranks: int) -> list[list[Case]]:
    """About `count` cases, always the same, in a circle for each model.

    They hold every pair of settings' values (see `covering`).
    """
    chosen = covering([case.layout for case in cases(most_ranks)], count - len(EXTRA))
    by_model: dict[Layout, list[Case]] = defaultdict(list)
    for case in (*EXTRA, *map(Case, chosen)):
        by_model[case.model].append(case)
    return [circle for circle in by_model.values() if len(circle) > 1]


def pairs(around: Sequence[Sequence[Case]]) -> list[tuple[Case, Case]]:
    """The neighbours in circles: each case is once the first and once the second of a pair."""
    return [pair for circle in around for pair in zip(circle, [*circle[1:], circle[0]], strict=True)]


BIASED, SHARED, RESIDUAL, PYRAMID = (
    replace(SMALL, layers=layers, experts=experts, shape=shape)
    for experts, layers, shape in (
        ("biased", 2, "gpt2"),
        ("shared", 2, "llama"),
        ("residual", 2, "gpt2"),
        ("pyramid", 4, "llama"),
    )
)
# Circles in which the ranks that share the experts change, together with every other axis and stage.
EXPERT_CIRCLES = (
    (
        BIASED,
        replace(BIASED, dp=2, ep=2, zero=1),
        replace(BIASED, tp=2, ep=2, etp=1),
        replace(BIASED, tp=2, dp=2, ep=2, zero=3),
        replace(BIASED, pp=2, dp=2, ep=2, zero=2),
        replace(BIASED, tp=2, dp=2, ep=4, etp=1, zero=2, sequence_parallel=True),
        replace(BIASED, dp=4, ep=4, zero=3),
        replace(BIASED, tp=2, pp=2, sequence_parallel=True),
    ),
    (
        replace(SHARED, tp=2, sequence_parallel=True),
        replace(SHARED, dp=2, ep=2, zero=3),
        replace(SHARED, pp=2, dp=2, schedule="zb-h1", zero=1),
        replace(SHARED, tp=2, dp=2, ep=2, zero=1),
        SHARED,
        replace(SHARED, dp=4, ep=2, zero=2, dispatcher="allgather"),
    ),
    (
        replace(RESIDUAL, pp=2),
        replace(RESIDUAL, dp=2, ep=2, zero=2, dispatcher="allgather"),
        replace(RESIDUAL, tp=2, dp=2, ep=4, etp=1, zero=3),
        replace(RESIDUAL, dp=2, zero=1),
    ),
    (
        replace(PYRAMID, dp=2, ep=2, zero=3),
        replace(PYRAMID, pp=2),
        replace(PYRAMID, tp=2, ep=2, etp=1),
        replace(PYRAMID, dp=2, zero=2),
    ),
)


SHARED_SEQUENCES = replace(SMALL, sequence=24, shape="llama")
CONTEXT_CIRCLE = (
    SHARED_SEQUENCES,
    *(
        replace(SHARED_SEQUENCES, **changes)
        for changes in (
            {"cp": 2},
            {"cp": 4, "comm": "a2a", "zero": 1},
            {"cp": 3, "zero": 3},
            {"cp": 2, "dp": 2, "zero": 2, "comm": "all_gather"},
            {"tp": 2, "zero": 1},
            {"cp": 2, "tp": 2, "sequence_parallel": True},
            {"dp": 4, "zero": 3},
            {"cp": 4, "comm": "a2a+p2p", "zero": 3},
            {"cp": 2, "pp": 2, "zero": 1},
            {"pp": 2, "dp": 2, "zero": 2},
            {"cp": 2, "comm": "a2a", "zero": 3, "dp": 2},
            {"cp": 3, "comm": "mixed"},
            {"dp": 2, "zero": 1},
            {"cp": 4, "zero": 2, "store": "cpu"},
            {"tp": 2, "dp": 2, "zero": 3},
            {"cp": 2, "tp": 2, "comm": "a2a", "zero": 2},
            {"cp": 4, "comm": "all_gather", "zero": 1},
            {"cp": 2, "pp": 2, "schedule": "zb-h1", "zero": 3},
            {"cp": 3, "zero": 1, "comm": "a2a"},
            {"cp": 2, "zero": 2, "recompute": "full"},
            {"cp": 4},
        )
    ),
)


HYBRID = replace(SMALL, letters="M*M-", shape="llama")
HYBRID_CIRCLE = (
    HYBRID,
    replace(HYBRID, tp=2, zero=1, sequence_parallel=True),
    replace(HYBRID, pp=4, schedule="zb-h1"),
    replace(HYBRID, dp=2, zero=3),
    replace(HYBRID, tp=2, pp=2, schedule="zb-v", zero=2),
)


def hybrid_circle() -> list[Case]:
    """Cases of one model with state-space layers."""
    return [Case(layout) for layout in HYBRID_CIRCLE]


def context_circle() -> list[Case]:
    """Cases of one model whose sequences 1 to 4 ranks share, each with another number than the one before."""
    return [Case(layout) for layout in CONTEXT_CIRCLE]


def expert_circles() -> list[list[Case]]:
    """Cases with experts, in a circle for each model."""
    return [[Case(layout) for layout in circle] for circle in EXPERT_CIRCLES]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pairs",
        type=int,
        default=200,
        help="number of pairs without experts, roughly; at least those that cover all settings",
    )
    parser.add_argument("--ranks", type=int, choices=(4, 8), default=8, help="the most ranks of a layout")
    args = parser.parse_args()
    torch.set_num_threads(1)
    failed = 0
    chosen = pairs([*circles(args.pairs, args.ranks), *expert_circles(), hybrid_circle()])
    for number, (first, second) in enumerate(chosen, 1):
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            verdict = check((first, second), Path(folder))
        failed += bool(verdict.wrong)
        result = "; ".join(verdict.wrong) or f"bit-equal; further steps {verdict.share:4.0%} of the tolerance"
        print(
            f"{number:4} {first.name:42} -> {second.name:42} {time.monotonic() - started:5.1f} s  {result}",
            flush=True,
        )
    print(f"{len(chosen) - failed} of {len(chosen)} pairs hold")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
