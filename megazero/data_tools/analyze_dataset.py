"""Measure every training sample for a curriculum: lengths, rarity of words, or a function of your own.

`megazero data analyze --data-path P --seq-length 512 --vocab-size 50257 --output DIR --metric
total_vocab_freq vocab_rarity --analyzing-num-threads 8` writes, for each metric, the index files that
DeepSpeed and megazero read, in a folder of its own in DIR. A stopped analysis goes on where it stopped.
With `--shard I/N` on each of N machines, and `--merge` on one after that, many machines share the work.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megazero.data_tools import cli
from megazero.errors import DataError

if TYPE_CHECKING:
    from megazero.data.blended import SampleDataset
    from megazero.data_efficiency.analyzed import AnalyzedDataset
    from megazero.data_efficiency.map import ChunkAssignment, MapJob, MetricFolder


def build_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """Build a parser of the flags, named as in Megatron-DeepSpeed, with the training's data flags."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.split("\n")[0])
    add, number = parser.add_argument, cli.positive_int
    add("--output", "--save", required=True, type=Path, metavar="DIR", help="folder of all metrics")
    add(
        "--metric",
        "--analyzing-metric",
        dest="analyzing_metric",
        nargs="+",
        default=[],
        metavar="METRIC",
        help="seqlen, total_vocab_freq, vocab_rarity, seqlen_vocab_rarity, or your own as module:function or "
        "file.py:function",
    )
    add(
        "--accumulate",
        nargs="+",
        default=[],
        metavar="METRIC",
        help="module:function or file.py:function, whose vectors are summed over all samples",
    )
    add(
        "--analyzing-task",
        choices=("map", "reduce"),
        help="measure samples, or make the index files of what was measured (default: both)",
    )
    add("--histogram", nargs="?", const="png", choices=("png", "svg", "pdf"), help="draw each metric too")
    add("--theme", choices=("light", "dark"), default="light", help="paper of the pictures (light)")
    _add_data_flags(parser)
    cli.add_tokenizer_flags(parser, required=False)
    group = parser.add_argument_group("who does what")
    add = group.add_argument
    add("--shard", type=cli.shard, metavar="I/N", help="measure share I (from 0) of N; a rerun goes on")
    add("--merge", action="store_true", help="make the index files of what all shards have measured")
    add("--analyzing-num-workers", type=number, default=1, metavar="N", help="machines that map")
    add("--analyzing-worker-id", type=int, default=0, metavar="I", help="which of them this is, from 0")
    add("--analyzing-num-threads", type=number, default=1, metavar="N", help="processes of this machine")
    add("--analyzing-num-threads-reduce", type=number, default=1, metavar="N", help="processes that reduce")
    add(
        "--analyzing-specific-threads",
        type=int,
        nargs="+",
        default=[],
        metavar="I",
        help="map only the parts of these processes, from 0",
    )
    return parser


def _add_data_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("samples; give what the training gives").add_argument
    add("--analyzing-data-type", choices=("GPT", "BERT"), default="GPT", help="kind of samples (GPT)")
    add(
        "--data-path", nargs="+", required=True, metavar="P", help="prefix, prefixes, or weights and prefixes"
    )
    add("--split", default="969,30,1", help="shares of train, valid and test; train is analyzed (969,30,1)")
    add("--seq-length", type=cli.positive_int, required=True, metavar="N", help="tokens of a sample")
    add("--seed", type=int, default=1234, help="of the order of samples (1234)")
    add(
        "--train-data-exact-num-epochs",
        type=cli.positive_int,
        metavar="N",
        help="epochs that the samples are (1, unless --train-samples says otherwise)",
    )
    add("--train-samples", type=cli.positive_int, metavar="N", help="samples that the training takes")
    add("--data-cache-path", metavar="DIR", help="where indexes of samples are kept (beside the data)")
    add("--short-seq-prob", type=float, default=0.1, help="BERT: share of short samples (0.1)")
    add("--bert-no-binary-head", action="store_true", help="BERT: samples have one segment")


def analyze_dataset(args: argparse.Namespace) -> None:
    """Measure and reduce as the flags say, and print a report. Raises DataError or ConfigError."""
    from megazero.data_efficiency.analyzed import AnalyzedDataset
    from megazero.data_efficiency.histogram import check_drawing
    from megazero.data_efficiency.map import ChunkAssignment, ChunkGrid, MapJob, MetricFolder
    from megazero.data_efficiency.reduce import is_reduced
    from megazero.data_tools.analysis import MetricChoice, TrainSplit

    _take_shard(args)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # to import a user's modules
    if args.analyzing_task is None and (args.analyzing_num_workers > 1 or args.analyzing_specific_threads):
        raise DataError(
            "`--analyzing-task` must be map or reduce where only a part is mapped here, but is neither; map "
            "every part, then reduce once."
        )
    if args.histogram is not None:
        check_drawing()
    split, wanted = TrainSplit(args), MetricChoice.of(args)
    assignment = ChunkAssignment(
        args.analyzing_num_workers,
        args.analyzing_worker_id,
        args.analyzing_num_threads,
        tuple(args.analyzing_specific_threads),
    )
    dataset = split()
    facts = AnalyzedDataset.of(dataset)
    grid = ChunkGrid.of(len(dataset))
    for wave in wanted.waves:
        metrics = wave.metrics(split, args.output, facts)
        pairs = tuple((metric, MetricFolder.of(args.output, metric, facts, grid)) for metric in metrics)
        todo = tuple((metric, folder) for metric, folder in pairs if not is_reduced(folder))
        if args.analyzing_task != "reduce" and todo:
            _map(MapJob(split, todo), assignment, dataset)
        if args.analyzing_task != "map":
            _reduce([folder for _, folder in pairs], [folder for _, folder in todo], facts, args)


def _take_shard(args: argparse.Namespace) -> None:
    """Translate `--shard` and `--merge` to Megatron-DeepSpeed's flags. DataError if these say it too."""
    if args.shard is None and not args.merge:
        return
    if args.analyzing_task is not None or args.analyzing_num_workers > 1 or (args.shard and args.merge):
        raise DataError(
            "`--shard` and `--merge` must come one at a time and without `--analyzing-task` and "
            "`--analyzing-num-workers`, but more are given; leave some out."
        )
    args.analyzing_task = "reduce" if args.merge else "map"
    if args.shard is not None:
        args.analyzing_worker_id, args.analyzing_num_workers = args.shard


def _map(job: MapJob, assignment: ChunkAssignment, dataset: SampleDataset) -> None:
    from megazero.data_efficiency.map import run_map
    from megazero.data_tools.analysis import metered

    names = ", ".join(metric.name for metric, _ in job.metrics)
    total = sum(len(job.grid[chunk]) for chunk in assignment.chunks(job.grid))
    with metered(f"map {names}", total) as meter:
        for number, done in enumerate(run_map(job, assignment, dataset)):
            if number == 0 and done:
                print(f"{done:,} of {total:,} samples were measured before", file=sys.stderr)
            meter.show(done)


def _reduce(
    folders: list[MetricFolder], todo: list[MetricFolder], facts: AnalyzedDataset, args: argparse.Namespace
) -> None:
    from megazero.data_efficiency.reduce import reduce_metric, reduce_steps
    from megazero.data_tools.analysis import metered, report

    for folder in folders:
        if folder not in todo:
            print(
                f"{folder.name} was analyzed before; delete {folder.results} to do it again", file=sys.stderr
            )
            report(folder, args.histogram, args.theme)
            continue
        with metered(f"reduce {folder.name}", reduce_steps(folder)) as meter:
            for done in reduce_metric(folder, facts, args.analyzing_num_threads_reduce):
                meter.show(done)
        report(folder, args.histogram, args.theme)


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the tool; returns 0 if all index files are whole, else an error's status."""
    args = build_parser(prog).parse_args(argv)
    return cli.run(
        analyze_dataset, args, left="finished chunks are kept: the same command goes on from there"
    )
