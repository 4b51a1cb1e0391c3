"""Show what a blend would give a training: epochs, the first repeat of each source, and what is never seen.

`megazero data plan BLEND... --seq-length S (--tokens N | --samples N)` reads a `--data-path` as a training of
a GPT reads it, with the same code: shares, epochs and the order are its own. A source's index is built to
count in it if it has at most ten million entries (`--exact`: always), and the order of a blend up to a hundred
million samples. Beyond, repeats and unseen text are estimated and marked by `~`; the samples of a source are then
right to within the number of sources.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megazero.config.compat.blends import MARK, expanded
from megazero.data.blended import BlendedDataset, SampleDataset
from megazero.data.build import DatasetRequest, DataSources, build_datasets
from megazero.data.from_config import GPTBuilder
from megazero.data.gpt_dataset import GPTSettings
from megazero.data.indexed.reader import IndexedDataset
from megazero.data_tools import cli
from megazero.data_tools.looking.coverage import PlannedDataset
from megazero.data_tools.looking.outputs import add_picture_flags, count, print_columns
from megazero.errors import DataError

_INDEX_LIMIT, _ORDER_LIMIT = 10_000_000, 100_000_000
_NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class _Planner(GPTBuilder):
    """Builds datasets of which only what the plan looks at is there."""

    exact: bool = False

    def build(
        self, indexed: IndexedDataset, units: range, num_samples: int | None, name: str, epochs: int | None
    ) -> PlannedDataset:
        limit = _NO_LIMIT if self.exact else _INDEX_LIMIT
        return PlannedDataset(indexed, units, num_samples, self.settings, limit)

    def blend(self, *parts: Any) -> _PlannedBlend:
        """Mix datasets, of which the order is left out if it is too long."""
        return _PlannedBlend(*parts, limit=_NO_LIMIT if self.exact else _ORDER_LIMIT)


class _PlannedBlend(BlendedDataset):
    """A blend whose order is left out if it has more than `limit` samples."""

    def __init__(self, *parts: Any, limit: int):
        self._limit = limit
        super().__init__(*parts)

    def first(self, samples: int) -> tuple[list[int], bool]:
        """How many of the first `samples` samples each source gives, and whether that is counted."""
        if len(self) <= self._limit:
            counts = np.bincount(self.dataset_index[:samples], minlength=len(self.datasets))
            return counts.tolist(), True
        ends = np.rint(np.cumsum(self.shares) * samples).astype(np.int64)
        return np.diff(ends, prepend=0).tolist(), False

    @property
    def shares(self) -> np.ndarray:
        """The share of each source, float64 [d] of sum 1."""
        return np.asarray(self._shares)

    def place(self, source: int, number: int) -> int:
        """The sample of the blend that is sample `number` of a source."""
        if len(self) <= self._limit:
            return int(np.flatnonzero(self.dataset_index == source)[number])
        return min(len(self) - 1, round(number / float(self.shares[source])))

    def _build(self) -> dict[str, np.ndarray]:
        if len(self) <= self._limit:
            return super()._build()
        return {"dataset_index": np.empty(0, dtype=np.int16), "sample_index": np.empty(0, dtype=np.int64)}


@dataclass(frozen=True)
class SourcePlan:
    """What a training takes of one source, as JSON has it.

    share, realized: of all samples, as asked for and as given; tokens, sequences: of the source's part of the
    split; epochs: tokens taken by tokens; first_repeat: the sample of the training, from 0, that first reads
    a token again, and its step, from 1 (None without a batch size); None if none does. unseen_tokens,
    unseen_sequences: what the training never reads. is_exact: whether these three are counted.
    """

    prefix: str
    share: float
    realized: float
    samples: int
    tokens: int
    sequences: int
    epochs: float
    first_repeat: int | None
    first_repeat_step: int | None
    unseen_tokens: int
    unseen_sequences: int
    is_exact: bool


def make_plan(args: argparse.Namespace) -> dict[str, Any]:
    """Work out the plan as a JSON object."""
    wanted = args.samples or -(-args.tokens // args.seq_length)
    settings = GPTSettings(sequence_length=args.seq_length, seed=args.seed)
    blend = [f"{MARK}{args.data_args_path}"] if args.data_args_path else args.blend
    sources = DataSources(data_path=expanded(blend, "train"), split=args.split)
    builder = _Planner(settings, exact=args.exact)
    dataset = build_datasets(DatasetRequest(builder, (wanted, 0, 0), sources))[0]
    if dataset is None:
        raise DataError(f"the train split must have samples, but `--split` {args.split} gives it none.")
    samples = min(wanted, len(dataset))
    rows, counted = _rows(dataset, samples, args.global_batch_size)
    return {
        "samples": samples,
        "wanted_samples": wanted,
        "tokens": samples * args.seq_length,
        "seq_length": args.seq_length,
        "global_batch_size": args.global_batch_size,
        "steps": args.global_batch_size and -(-samples // args.global_batch_size),
        "order_is_counted": counted,
        "sources": [asdict(row) for row in rows],
    }


def _rows(dataset: SampleDataset, samples: int, batch_size: int | None) -> tuple[list[SourcePlan], bool]:
    blend = dataset if isinstance(dataset, _PlannedBlend) else None
    parts = [dataset] if blend is None else blend.datasets
    taken, counted = ([samples], True) if blend is None else blend.first(samples)
    rows = []
    for number, (part, count) in enumerate(zip(parts, taken, strict=True)):
        assert isinstance(part, PlannedDataset)
        coverage, plan = part.covered(count), part.plan
        place = coverage.first_repeat
        if place is not None and blend is not None:
            place = blend.place(number, place)
        rows.append(
            SourcePlan(
                prefix=part.indexed.prefix,
                share=1.0 if blend is None else float(blend.shares[number]),
                realized=count / samples,
                samples=count,
                tokens=plan.tokens_per_epoch,
                sequences=part.lengths.size,
                epochs=count * plan.sequence_length / plan.tokens_per_epoch,
                first_repeat=place,
                first_repeat_step=place // batch_size + 1 if batch_size and place is not None else None,
                unseen_tokens=coverage.unseen_tokens,
                unseen_sequences=coverage.unseen_sequences,
                is_exact=coverage.is_exact and counted,
            )
        )
    return rows, counted


def print_plan(facts: dict[str, Any]) -> None:
    """Print a plan as a table for people."""
    steps = f", {facts['steps']:,} steps of {facts['global_batch_size']:,}" if facts["steps"] else ""
    size = f"{facts['samples']:,} samples of {facts['seq_length']:,} tokens"
    print(f"{size}: {facts['tokens']:,} tokens{steps}\n")
    names = ("source", "weight", "realized", "samples", "tokens there", "epochs", "first repeat", "never seen")
    print_columns([names, *map(_cells, facts["sources"])])
    if not all(row["is_exact"] for row in facts["sources"]):
        print("\n~ estimated; `--exact` counts it in the index, which takes its time and memory")
    if facts["samples"] < facts["wanted_samples"]:
        print(
            f"\nThe blend ends before the {facts['wanted_samples']:,} samples that are asked for: without weights, "
            "each source is given once. Give weights, or train for less."
        )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    mark, again = "" if row["is_exact"] else "~ ", "never"
    if row["first_repeat"] is not None:
        step = row["first_repeat_step"]
        again = mark + (f"sample {row['first_repeat']:,}" if step is None else f"step {step:,}")
    unseen = "nothing"
    if row["unseen_tokens"]:
        share = row["unseen_tokens"] / row["tokens"]
        texts = f"{row['unseen_sequences']:,} of {row['sequences']:,} documents"
        unseen = f"{mark}{share:.2%} of tokens, {texts}"
    return (
        row["prefix"],
        f"{row['share']:.4%}",
        f"{row['realized']:.4%}",
        f"{row['samples']:,}",
        f"{row['tokens']:,}",
        f"{row['epochs']:.3f}",
        again,
        unseen,
    )


def plan(args: argparse.Namespace) -> None:
    """Print a plan, and draw it if asked to. Raises DataError for data that a training would refuse."""
    facts = make_plan(args)
    if args.json:
        print(json.dumps(facts))
    else:
        print_plan(facts)
    if args.picture is not None:
        from megazero.data_tools.looking.pictures import draw_plan

        draw_plan(facts, args.picture, args.theme)


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the tool; returns the exit status."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("blend", nargs="*", metavar="BLEND", help="as `--data-path`: prefixes, weights and prefixes, or @FILE")
    add("--data-args-path", metavar="FILE", help="the file with the blend, instead of BLEND")
    add("--split", default="969,30,1", help="train, validation and test proportions (969,30,1)")
    add("--seq-length", type=cli.positive_int, required=True, metavar="S", help="tokens of a sample")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--tokens", type=count, metavar="N", help="tokens of the training, as 300e9")
    budget.add_argument("--samples", type=count, metavar="N", help="samples of the training")
    add("--global-batch-size", type=cli.positive_int, metavar="B", help="samples of a step")
    add("--seed", type=int, default=1234, help="of the training (1234)")
    add("--exact", action="store_true", help="count in indexes of any size, instead of an estimate")
    add("--json", action="store_true", help="one JSON object instead of a table")
    add_picture_flags(parser)
    args = parser.parse_args(argv)
    if bool(args.blend) == bool(args.data_args_path):
        parser.error("give exactly one of BLEND and `--data-args-path`")
    return cli.run(plan, args)
