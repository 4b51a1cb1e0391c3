"""`megazero checkpoint inspect`: show the content of a run's folder, or of one checkpoint."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from fnmatch import fnmatchcase

from megazero.checkpoint.locate import is_checkpoint, one_checkpoint
from megazero.checkpoint.manifest import STATE, Logical, parse
from megazero.checkpoint.part import Key
from megazero.checkpoint.reader import CheckpointReader
from megazero.checkpoint.remote.mirror import local_folder
from megazero.commands.checkpoint.stats import Stats, stats_of
from megazero.commands.checkpoint.stream import whole_tensors
from megazero.commands.checkpoint.summary import (
    RunSummary,
    describe_checkpoint,
    describe_run,
    elements_of,
    layout_of,
    pick,
    programs_of,
    totals_by_kind,
)
from megazero.commands.show import count_text, one_line, print_facts, print_table, size_text
from megazero.data.changing.history import History

_STATS = ("min", "max", "mean", "rms", "nan")


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the flags of `inspect`."""
    parser = verbs.add_parser(
        "inspect",
        help="show what is in a run's folder or in a checkpoint",
        description="List the checkpoints of a run, or describe one: its model, counters, layout, sizes and "
        "tensors. With --tensors, --stats or --files, a run's folder stands for the checkpoint that a resume "
        "would take.",
        epilog="Status 0; 1 if something is missing or damaged. A list looks only at the sizes of files.",
    )
    parser.add_argument("path", metavar="DIR", help="folder of a run, or DIR/iter_N of one checkpoint")
    parser.add_argument(
        "--tensors",
        nargs="?",
        const="*",
        metavar="PATTERN",
        help="list tensors: all, or those whose name or NAME/KIND matches a pattern such as 'layers.0.*'",
    )
    parser.add_argument(
        "--stats",
        action="store_true",
        help="also read them and show min, max, mean, root mean square and number of NaNs",
    )
    parser.add_argument("--files", action="store_true", help="list the files")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.set_defaults(run=run, trouble=1)


def run(flags: argparse.Namespace) -> int:
    """Print what the flags ask for."""
    path = local_folder(flags.path)
    pattern = flags.tensors or ("*" if flags.stats else None)
    if pattern is None and not flags.files and not is_checkpoint(path):
        return _show_run(describe_run(path), flags.json)
    reader = CheckpointReader(one_checkpoint(path))
    chosen = [] if pattern is None else _chosen(reader, pattern)
    with reader:
        keys = [tensor.key for tensor in chosen]
        stats = {key: stats_of(x) for key, x in whole_tensors(reader, keys)} if flags.stats else {}
    if flags.json:
        description = describe_checkpoint(reader)
        if pattern is not None:
            description["tensors"] = [
                tensor.model_dump() | ({"stats": _as_json(stats[tensor.key])} if stats else {})
                for tensor in chosen
            ]
        print(json.dumps(description))
        return 0
    if pattern is None and not flags.files:
        _show_checkpoint(reader)
    if flags.files:
        _show_files(reader)
    if pattern is not None:
        _show_tensors(chosen, stats)
    return 0


def _chosen(reader: CheckpointReader, pattern: str) -> list[Logical]:
    return [
        tensor
        for tensor in reader.directory.whole().tensors
        if fnmatchcase(tensor.name, pattern) or fnmatchcase(str(tensor.key), pattern)
    ]


def _as_json(stats: Stats) -> dict[str, float | str]:
    """The statistics as JSON, in which infinities and NaN are strings."""
    return {name: value if math.isfinite(value) else str(value) for name, value in asdict(stats).items()}


def _show_run(summary: RunSummary, as_json: bool) -> int:
    checkpoints = summary.checkpoints
    broken = summary.trouble is not None or any(checkpoint.trouble for checkpoint in checkpoints)
    if as_json:
        print(json.dumps(asdict(summary)))
        return int(broken)
    rows = [
        (
            checkpoint.name + (" (latest)" if checkpoint.latest else ""),
            checkpoint.saved or "-",
            checkpoint.layout or "-",
            "no" if checkpoint.trouble else "yes",
            size_text(checkpoint.bytes),
            count_text(checkpoint.samples),
            count_text(checkpoint.tokens),
        )
        for checkpoint in checkpoints
    ]
    if rows:
        print_table(("checkpoint", "saved", "by", "whole", "size", "samples", "tokens"), rows, left=4)
    for checkpoint in checkpoints:
        if checkpoint.trouble:
            print(f"not whole  {one_line(checkpoint.trouble)}")
    if summary.trouble:
        print(f"warning    {one_line(summary.trouble)}")
    for name, size in summary.leftovers:
        print(f"left over  {name}, {size_text(size)}: of a save under way, or of one that was killed")
    return int(broken)


def _show_checkpoint(reader: CheckpointReader) -> None:
    facts = reader.facts
    totals = totals_by_kind(reader)
    print_facts(_origin(reader))
    print()
    print_table(
        ("kind", "dtype", "tensors", "pieces", "elements", "size"),
        ((t.kind, t.dtype, t.tensors, t.pieces, f"{t.elements:,}", size_text(t.bytes)) for t in totals),
        left=2,
    )
    model = pick(facts, "config", "model") or pick(facts, "model")
    if isinstance(model, Mapping):
        print()
        print_table(
            ("model", "value"), ((name, value) for name, value in model.items() if value is not None), left=2
        )
    if (blend := facts.get("blend")) is not None:
        history = parse(History, json.dumps(blend).encode(), reader.folder / STATE)
        print()
        print_table(("blend", "by", "from sample", "share", "samples before"), history.rows, left=2)


def _origin(reader: CheckpointReader) -> list[tuple[str, str]]:
    """Rows (name, value): which program saved the checkpoint, when, and after which steps."""
    facts = reader.facts
    counters = [("samples", "consumed_samples"), ("tokens", "consumed_tokens"), ("skipped", "skipped")]
    progress = [f"{count_text(pick(facts, 'state', key))} {word}" for word, key in counters]
    precision = str(pick(facts, "config", "precision", "dtype") or "-")
    scale = pick(facts, "scaler", "scale")
    entries, tensors = reader.directory.files(), reader.directory.whole().tensors
    files = [name for name in entries if name.endswith(".safetensors")]
    pieces = sum(len(tensor.pieces) for tensor in tensors)
    size = sum(entry.size for entry in entries.values())
    return [
        ("checkpoint", str(reader.folder)),
        ("kind", str(pick(facts, "kind") or "-")),
        ("iteration", str(reader.manifest.iteration)),
        ("progress", ", ".join(progress) if pick(facts, "state") is not None else "-"),
        ("updates", count_text(pick(facts, "updates"))),
        ("saved", str(pick(facts, "time") or "-")),
        ("by", ", ".join(programs_of(facts)) or "-"),
        ("layout", str(layout_of(facts) or "-")),
        ("batch", count_text(pick(facts, "global_batch_size"))),
        ("vocabulary", count_text(pick(facts, "vocab_size"))),
        ("precision", precision + (f", loss scale {scale}" if scale is not None else "")),
        (
            "contents",
            f"{len(tensors)} tensors, {pieces} pieces, {len(files)} files, {size_text(size)}",
        ),
    ]


def _show_files(reader: CheckpointReader) -> None:
    rows = [
        (file["name"], size_text(file["bytes"]), file.get("blocks", "-"), file.get("pieces", "-"))
        for file in describe_checkpoint(reader)["files"]
    ]
    print_table(("file", "size", "blocks", "pieces"), rows)


def _show_tensors(tensors: list[Logical], stats: Mapping[Key, Stats]) -> None:
    columns = ("tensor", "kind", "dtype", "shape", "pieces", "files", "elements", *(_STATS if stats else ()))
    rows = []
    for tensor in tensors:
        shape = " x ".join(map(str, tensor.shape)) or "scalar"
        files = len({piece.file for piece in tensor.pieces})
        row = [tensor.name, tensor.kind, tensor.dtype, shape, len(tensor.pieces), files]
        row.append(f"{elements_of(tensor):,}")
        if stats:
            of_tensor = stats[tensor.key]
            row += [f"{getattr(of_tensor, name):.4g}" for name in _STATS[:-1]] + [of_tensor.nan]
        rows.append(row)
    print_table(columns, rows, left=4)
    print(f"{len(tensors)} tensors")
