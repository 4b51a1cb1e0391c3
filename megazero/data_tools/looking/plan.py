"""Show what a blend would give a training: epochs, the first repeat of each source, and what is never seen.

`megazero data plan BLEND... --seq-length S (--tokens N | --samples N)` reads a `--data-path` as a training
of a GPT does, with the same code: shares, epochs and order are its own. A source's index of up to ten million
entries is built and counted in, and so is the order of a blend of up to a hundred million samples (`--exact`:
always). Beyond, what is marked by `~` is estimated, and samples are right to within the number of sources.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megazero.config.compat.blends import MARK, expanded
from megazero.data.blended import BlendedDataset
from megazero.data.build import DatasetRequest, DataSources, build_datasets
from megazero.data.from_config import GPTBuilder
from megazero.data.gpt_dataset import GPTSettings
from megazero.data.indexed.reader import IndexedDataset
from megazero.data_tools import cli
from megazero.data_tools.looking.coverage import PlannedDataset, covered
from megazero.data_tools.looking.outputs import add_output_flags, count, present, print_columns
from megazero.data_tools.looking.pictures import first_repeat, never_seen, plan_figure
from megazero.errors import DataError

_INDEX_LIMIT, _ORDER_LIMIT, _NO_LIMIT = 10_000_000, 100_000_000, 1 << 62


@dataclass(frozen=True)
class _Planner(GPTBuilder):
    """Builds datasets and blends without what would be too large."""

    exact: bool = False

    def build(
        self, indexed: IndexedDataset, units: range, num_samples: int | None, name: str, epochs: int | None
    ) -> PlannedDataset:
        limit = _NO_LIMIT if self.exact else _INDEX_LIMIT
        return PlannedDataset(indexed, units, num_samples, self.settings, limit)

    def blend(self, *parts: Any) -> _PlannedBlend:
        """Mix datasets, without the order if it is too long."""
        return _PlannedBlend(*parts, limit=_NO_LIMIT if self.exact else _ORDER_LIMIT)


class _PlannedBlend(BlendedDataset):
    """A blend whose order is left out if it has more than `limit` samples."""

    def __init__(self, *parts: Any, limit: int):
        self._limit = limit
        super().__init__(*parts)
        self.is_built = len(self) <= limit
        self.shares = np.asarray(self._shares)

    def taken(self, samples: int) -> list[int]:
        """How many of the first `samples` samples each source gives."""
        if self.is_built:
            counts = np.bincount(self.dataset_index[:samples], minlength=len(self.datasets))
        else:
            counts = np.diff(np.rint(np.cumsum(self.shares) * samples), prepend=0)
        return [int(count) for count in counts]

    def place(self, source: int, number: int) -> int:
        """The sample of the blend that is sample `number` of a source."""
        if self.is_built:
            return int(np.flatnonzero(self.dataset_index == source)[number])
        return min(len(self) - 1, round(number / float(self.shares[source])))

    def _build(self) -> dict[str, np.ndarray]:
        if len(self) <= self._limit:
            return super()._build()
        return {"dataset_index": np.empty(0, dtype=np.int16), "sample_index": np.empty(0, dtype=np.int64)}


def make_plan(args: argparse.Namespace) -> dict[str, Any]:
    """Work out the plan as a JSON object.

    Of a source: its `share` as asked for and as `realized`; its `samples`; the `tokens` and `sequences` of
    its part of the split; `epochs`, of tokens; its `first_repeat`, the sample of the training from 0, and the
    step from 1; what is `unseen` of it; and whether that and the repeat are counted (`exact`).
    """
    wanted, batch = args.samples or -(-args.tokens // args.seq_length), args.global_batch_size
    blend = [f"{MARK}{args.data_args_path}"] if args.data_args_path else args.blend
    sources = DataSources(data_path=expanded(blend, "train"), split=args.split)
    builder = _Planner(GPTSettings(args.seq_length, args.seed), exact=args.exact)
    dataset = build_datasets(DatasetRequest(builder, (wanted, 0, 0), sources, blend=builder.blend))[0]
    if dataset is None:
        raise DataError(f"the train split must have samples, but `--split` {args.split} gives it none.")
    samples, rows = min(wanted, len(dataset)), []
    mixed = dataset if isinstance(dataset, _PlannedBlend) else None
    taken = [samples] if mixed is None else mixed.taken(samples)
    for number, part in enumerate([dataset] if mixed is None else mixed.datasets):
        assert isinstance(part, PlannedDataset)
        coverage, there = covered(part, taken[number]), part.plan.tokens_per_epoch
        first = coverage.first_repeat
        if first is not None and mixed is not None:
            first = mixed.place(number, first)
        row = {"prefix": part.indexed.prefix, "share": 1.0 if mixed is None else float(mixed.shares[number])}
        row |= {"realized": taken[number] / samples, "samples": taken[number], "tokens": there}
        row |= {"sequences": part.lengths.size, "epochs": taken[number] * args.seq_length / there}
        row |= {"first_repeat": first, "first_repeat_step": None}
        if first is not None and batch:
            row["first_repeat_step"] = first // batch + 1
        row |= {"unseen_tokens": coverage.unseen_tokens, "unseen_sequences": coverage.unseen_sequences}
        rows.append(row | {"exact": part.is_built and (mixed is None or mixed.is_built)})
    facts = {"samples": samples, "wanted_samples": wanted, "tokens": samples * args.seq_length}
    facts |= {"seq_length": args.seq_length, "global_batch_size": batch}
    return {**facts, "steps": batch and -(-samples // batch), "sources": rows}


def print_plan(facts: dict[str, Any]) -> None:
    """Print a plan as a table for people."""
    steps = f", {facts['steps']:,} steps of {facts['global_batch_size']:,}" if facts["steps"] else ""
    size = f"{facts['samples']:,} samples of {facts['seq_length']:,} tokens"
    print(f"{size}: {facts['tokens']:,} tokens{steps}\n")
    names = "source", "weight", "realized", "samples", "tokens there", "epochs", "first repeat", "never seen"
    rows: list[Sequence[str]] = [names]
    for row in facts["sources"]:
        numbers = (f"{row['samples']:,}", f"{row['tokens']:,}", f"{row['epochs']:.3f}")
        shares = (f"{row['share']:.3%}", f"{row['realized']:.3%}")
        rows.append((row["prefix"], *shares, *numbers, first_repeat(row), never_seen(row)))
    print_columns(rows)
    if not all(row["exact"] for row in facts["sources"]):
        print("\n~ estimated; `--exact` counts it in the index, which takes time and memory")
    if facts["samples"] < facts["wanted_samples"]:
        asked = f"the {facts['wanted_samples']:,} samples that are asked for"
        print(f"\nThe blend ends before {asked}: without weights, each source is given once. Give weights.")


def plan(args: argparse.Namespace) -> None:
    """Print a plan, and draw it if asked to. Raises DataError for data that a training would refuse."""
    present(make_plan(args), args, print_plan, plan_figure)


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the tool; returns the exit status."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("blend", nargs="*", metavar="BLEND", help="a `--data-path`: prefixes, weights and prefixes, @FILE")
    add("--data-args-path", metavar="FILE", help="the file with the blend, instead of BLEND")
    add("--split", default="969,30,1", help="train, validation and test proportions (969,30,1)")
    add("--seq-length", type=cli.positive_int, required=True, metavar="S", help="tokens of a sample")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--tokens", type=count, metavar="N", help="tokens of the training, as 300e9")
    budget.add_argument("--samples", type=count, metavar="N", help="samples of the training")
    add("--global-batch-size", type=cli.positive_int, metavar="B", help="samples of a step")
    add("--seed", type=int, default=1234, help="of the training (1234)")
    add("--exact", action="store_true", help="count in indexes of any size, rather than estimate")
    add_output_flags(parser)
    args = parser.parse_args(argv)
    if bool(args.blend) == bool(args.data_args_path):
        parser.error("give exactly one of BLEND and `--data-args-path`")
    return cli.run(plan, args)
