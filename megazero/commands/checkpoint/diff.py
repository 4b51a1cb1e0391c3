"""`megazero checkpoint diff`: compare the training states of two checkpoints, whatever their layouts."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from megazero.checkpoint.locate import one_checkpoint
from megazero.checkpoint.part import RANDOM, Key
from megazero.checkpoint.reader import CheckpointReader
from megazero.commands.checkpoint.stats import Distance, distance
from megazero.commands.checkpoint.stream import whole_tensors
from megazero.commands.checkpoint.summary import pick
from megazero.commands.show import one_line, print_facts, print_table
from megazero.errors import ConfigError

_COUNTERS = ("state", "updates", "scaler", "stream_seed", "vocab_size")
# Losses and norms of the latest updates; they lie among the counters, but differ by rounding between layouts.
_ESTIMATES = "state.recent"
_ABSENT = "-"


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the flags of `diff`."""
    parser = verbs.add_parser(
        "diff",
        help="compare two checkpoints, whatever their layouts",
        description="List the settings and counters that differ, and how far apart the tensors are: the "
        "largest difference of two elements, also as a share of the tensor's largest magnitude. Random "
        "state is not compared between different numbers of ranks.",
        epilog="Status 0: counters and tensors are the same, bit for bit or to the tolerance; 1: they are "
        "not; 2: an error. Settings that differ do not count.",
    )
    parser.add_argument("a", metavar="A", help="a checkpoint, or a run's folder, whose newest is taken")
    parser.add_argument("b", metavar="B", help="another")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="tensors are the same if no elements are farther apart than X times the largest magnitude "
        "(default: only if they are equal bit for bit)",
    )
    parser.add_argument("--top", type=int, default=20, metavar="N", help="tensors to list (default 20)")
    parser.set_defaults(run=run, trouble=2)


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that both checkpoints have, but not with the same bits."""

    key: Key
    dtypes: tuple[str, str]
    distance: Distance


@dataclass(frozen=True)
class Comparison:
    """The tensors of two checkpoints.

    Attributes:
        alike: the number of tensors that are equal bit for bit.
        apart: the others, by falling relative distance.
        unequal: a sentence for each tensor that is missing in one, or has two shapes.
    """

    alike: int
    apart: tuple[TensorDifference, ...]
    unequal: tuple[str, ...]


def run(flags: argparse.Namespace) -> int:
    """Compare, and print what differs."""
    if flags.tolerance is not None and not 0 <= flags.tolerance < float("inf"):
        raise ConfigError(f"`--tolerance` must be a finite number of at least 0, but is {flags.tolerance:g}")
    if flags.top < 0:
        raise ConfigError(f"`--top` must be at least 0, but is {flags.top}")
    a, b = (CheckpointReader(one_checkpoint(path)) for path in (flags.a, flags.b))
    print_facts([("A", a.folder), ("B", b.folder)])
    settings = differences(pick(a.facts, "config"), pick(b.facts, "config"))
    _show("setting", settings)
    iterations = {"iteration": a.manifest.iteration}, {"iteration": b.manifest.iteration}
    counters = differences(*(it | _counters(r.facts) for it, r in zip(iterations, (a, b), strict=True)))
    counters = [row for row in counters if row[0] != _ESTIMATES]
    _show("counter", counters)
    with a, b:
        comparison = compare(a, b)
    tolerance = -1.0 if flags.tolerance is None else flags.tolerance  # without one, any difference counts
    beyond = [tensor for tensor in comparison.apart if tensor.distance.relative > tolerance]
    _show_tensors(comparison, flags.top)
    if counters or comparison.unequal or beyond:
        print("different")
        return 1
    if comparison.apart:
        print(f"the same to {flags.tolerance:g} of each tensor's largest magnitude")
    else:
        print("equal bit for bit" + (", settings apart" if settings else ""))
    return 0


def differences(a: object, b: object) -> list[tuple[str, object, object]]:
    """Compare two JSON objects, two levels deep; returns (name, value in a, value in b) of what differs."""
    flat_a, flat_b = dict(_flat(a)), dict(_flat(b))
    return [
        (name, flat_a.get(name, _ABSENT), flat_b.get(name, _ABSENT))
        for name in {**flat_a, **flat_b}
        if flat_a.get(name, _ABSENT) != flat_b.get(name, _ABSENT)
    ]


def compare(a: CheckpointReader, b: CheckpointReader) -> Comparison:
    """Compare all tensors of two checkpoints, reading them in bounded memory."""
    unequal = [f"{key} is only in A" for key in a.shapes if key not in b.shapes and key.kind != RANDOM]
    unequal += [f"{key} is only in B" for key in b.shapes if key not in a.shapes and key.kind != RANDOM]
    common = []
    for key, shape in a.shapes.items():
        if b.shapes.get(key) == shape:
            common.append(key)
        elif key in b.shapes and key.kind != RANDOM:
            unequal.append(f"{key} has shape {list(shape)} in A and {list(b.shapes[key])} in B")
    apart = []
    for (key, x), (_, y) in zip(whole_tensors(a, common), whole_tensors(b, common), strict=True):
        between = distance(x, y)
        if not between.equal_bits:
            apart.append(TensorDifference(key, (_dtype_name(x), _dtype_name(y)), between))
    apart.sort(key=lambda difference: (-difference.distance.relative, str(difference.key)))
    return Comparison(len(common) - len(apart), tuple(apart), tuple(unequal))


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _flat(value: object) -> Iterator[tuple[str, object]]:
    for name, entry in value.items() if isinstance(value, Mapping) else ():
        if isinstance(entry, Mapping):
            yield from ((f"{name}.{inner}", value) for inner, value in entry.items())
        else:
            yield name, entry


def _counters(facts: Mapping[str, object]) -> dict[str, object]:
    return {name: facts[name] for name in _COUNTERS if facts.get(name) is not None}


def _show(what: str, rows: list[tuple[str, object, object]]) -> None:
    if rows:
        print()
        print_table((what, "A", "B"), rows, left=3)


def _show_tensors(tensors: Comparison, top: int) -> None:
    print()
    for words in tensors.unequal[:top]:
        print(one_line(words))
    if len(tensors.unequal) > top:
        print(f"and {len(tensors.unequal) - top} more of this kind")
    if tensors.apart[:top]:
        rows = [
            (
                difference.key.name,
                difference.key.kind,
                difference.dtypes[0] if len(set(difference.dtypes)) == 1 else " and ".join(difference.dtypes),
                f"{difference.distance.largest:.3g}",
                f"{difference.distance.relative:.3g}",
            )
            for difference in tensors.apart[:top]
        ]
        print_table(("tensor", "kind", "dtype", "difference", "relative"), rows, left=3)
    if len(tensors.apart) > top:
        print(f"and {len(tensors.apart) - top} more that differ, by less")
    total = tensors.alike + len(tensors.apart)
    print(f"{tensors.alike} of {total} tensors that both have are equal bit for bit")
