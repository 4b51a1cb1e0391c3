"""Step times that others have published, as data: one file a campaign, and every row must multiply out.

A file has the fields that its rows share (``common``), the names of the others (``columns``) and the rows.
Whatever a source does not say is taken to be what its row says, and is named in ``unknown``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.published.flops import COUNTS, Rate, Shape, step_flops
from megazero.errors import DataError
from megazero.plan.device import Device

FOLDER = Path(__file__).parent
RECOMPUTES = ("none", "selective", "full")
FEATURES = (
    *("async-tensor", "compiled", "dp-overlap", "dropout", "fused-accumulation", "flash-attention-2"),
    *("fused-attention", "launch-blocking", "pp-overlap", "scatter-gather", "tp-overlap", "whole-gradients"),
)
TOLERANCE = 0.02
"""Printed figures are rounded; two of one row may differ by this share."""


@dataclass(frozen=True)
class Layout:
    """Who does what: sizes of the axes, sequences of a micro-batch and of the global batch."""

    gpus: int
    tensor: int
    pipeline: int
    virtual: int
    context: int
    micro_batch: int
    global_batch: int

    @property
    def data(self) -> int:
        """The number of replicas."""
        return self.gpus // (self.tensor * self.pipeline * self.context)

    @property
    def microbatches(self) -> int:
        """Micro-batches of a replica in a step."""
        return self.global_batch // (self.data * self.micro_batch)


@dataclass(frozen=True)
class Software:
    """What ran: its family and release, and the choices that decide its work.

    Attributes:
        family: a generation of software, which has one efficiency.
        precision: torch's name of the dtype of matrix products.
        recompute: ``none``, ``selective`` (attention) or ``full``.
        zero: ZeRO's stage; 1 is a distributed optimizer.
        gradient_bytes: of a gradient between replicas.
        features: of `FEATURES`.
    """

    family: str
    precision: str
    recompute: str
    sequence_parallel: bool
    zero: int
    gradient_bytes: int
    features: tuple[str, ...]


@dataclass(frozen=True)
class Machine:
    """Where it ran; `nic_gbit_per_s_per_rank` if it is not the device's usual one."""

    device: str
    gpus_per_node: int | None = None
    nic_gbit_per_s_per_rank: float | None = None

    def load(self) -> Device:
        """The device as data, with this machine's NICs."""
        device = Device.load(self.device)
        nic = self.nic_gbit_per_s_per_rank
        return device.with_nic(nic) if nic else device


@dataclass(frozen=True)
class Figure:
    """What was published: one of seconds, rate or tokens, or that it did not fit; and by which count.

    Attributes:
        seconds: of a step.
        tflop_per_s: of a GPU, by `count`.
        tokens_per_s: of a GPU.
        count: of `benchmarks.published.flops.COUNTS`.
        fits: whether it ran at all.
        unknown: fields that the source does not say.
        left_out: why it is not compared with a plan; empty if it is.
    """

    count: str
    seconds: float | None = None
    tflop_per_s: float | None = None
    tokens_per_s: float | None = None
    fits: bool = True
    unknown: tuple[str, ...] = ()
    left_out: str = ""


@dataclass(frozen=True)
class Row:
    """A published row."""

    name: str
    shape: Shape
    sequence: int
    layout: Layout
    software: Software
    machine: Machine
    figure: Figure

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Row:
        """The row of a flat document.

        Raises:
            DataError: it does not multiply out, or fields are missing or unknown; all reasons are listed.
        """
        values = dict(values)
        source, printed = values.pop("source"), values.pop("printed", {})
        name = values.pop("name")
        if not source:
            raise DataError(f"{name}: `source` must be there, but is missing; add it")
        kinds = (Shape, Layout, Software, Machine, Figure)
        parts = [_part(kind, values, name) for kind in kinds]
        sequence = values.pop("sequence")
        if values:
            raise DataError(f"{name}: fields must be known, but {', '.join(values)} are not; correct them")
        row = cls(name, parts[0], sequence, *parts[1:])
        violations = list(violations_of(row, printed))
        if violations:
            raise DataError(f"{name}: " + "; ".join(violations))
        return row

    @property
    def judged(self) -> bool:
        """Whether a plan of it must come near: it ran, and its micro-batch and number of GPUs are known."""
        hidden = {"micro_batch", "gpus"} & set(self.figure.unknown)
        return self.figure.fits and not self.figure.left_out and not hidden

    @property
    def flops(self) -> float:
        """The FLOPs of a step by the row's own count."""
        return step_flops(self.figure.count, self.shape, [self.sequence] * self.layout.global_batch)

    @cached_property
    def seconds(self) -> float:
        """The seconds of a step, as published or derived from what was."""
        figure, gpus = self.figure, self.layout.gpus
        if figure.seconds is not None:
            return figure.seconds
        if figure.tokens_per_s is not None:
            return self.layout.global_batch * self.sequence / gpus / figure.tokens_per_s
        assert figure.tflop_per_s is not None
        return self.flops / gpus / (figure.tflop_per_s * 1e12)

    @property
    def rate(self) -> Rate:
        """FLOP/s of a GPU, by the row's own count."""
        return Rate(self.figure.count, self.flops / self.layout.gpus / self.seconds)


def _part(kind: type, values: dict[str, Any], name: str) -> Any:
    """Take the fields of a dataclass out of `values`."""
    taken = {field.name: values.pop(field.name) for field in fields(kind) if field.name in values}
    missing = [f.name for f in fields(kind) if f.default is MISSING and f.name not in taken]
    if missing:
        raise DataError(f"{name}: {', '.join(missing)} must be there, but are missing; add them")
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in taken.items()})


def violations_of(row: Row, printed: Mapping[str, float]) -> Iterator[str]:
    """Reasons why a row cannot be true: its parts do not multiply out, or contradict what else was printed.

    `printed` may have ``data``, ``microbatches``, ``seconds``, ``tflop_per_s``, ``tokens_per_s``.
    """
    layout, software, figure = row.layout, row.software, row.figure
    choices = [(COUNTS, figure.count), (RECOMPUTES, software.recompute)]
    choices += [(FEATURES, feature) for feature in software.features]
    wrong = [
        f"`{value}` must be one of {', '.join(known)}, but is not"
        for known, value in choices
        if value not in known
    ]
    model = layout.tensor * layout.pipeline * layout.context
    if layout.gpus % model:
        wrong.append(f"T x P x C = {model} must divide {layout.gpus} GPUs, but does not")
    elif layout.microbatches * layout.micro_batch * layout.data != layout.global_batch:
        wrong.append(
            f"m x b x D must be {layout.global_batch} sequences, but D is {layout.data} and b "
            f"{layout.micro_batch}"
        )
    if row.shape.hidden % row.shape.heads or row.shape.heads % row.shape.kv_heads:
        wrong.append("heads must divide the width, and groups the heads, but do not")
    if wrong:
        yield from wrong
        return
    given = [figure.seconds, figure.tflop_per_s, figure.tokens_per_s]
    if sum(value is not None for value in given) != figure.fits:
        yield "it must have one figure, or none if it did not fit, but has not"
        return
    for key in ("data", "microbatches"):
        if printed.get(key, getattr(layout, key)) != getattr(layout, key):
            yield f"{key} is printed as {printed[key]}, but must be {getattr(layout, key)}"
    if not figure.fits:
        return
    derived = {
        "seconds": row.seconds,
        "tflop_per_s": row.rate.flop_per_s / 1e12,
        "tokens_per_s": layout.global_batch * row.sequence / layout.gpus / row.seconds,
    }
    for key, value in derived.items():
        if abs(printed.get(key, value) / value - 1) > TOLERANCE:
            yield f"{key} is printed as {printed[key]:g}, but must be {value:.4g}"


def read(path: Path) -> list[Row]:
    """The rows of a campaign.

    Raises:
        DataError: as for `Row.of`; all rows' reasons are listed.
    """
    document = json.loads(path.read_text(encoding="utf-8"))
    rows, violations = [], []
    for values in document["rows"]:
        if len(values) != len(document["columns"]):
            raise DataError(
                f"{path.name}: each row must have {len(document['columns'])} values, but is {values}"
            )
        given = dict(zip(document["columns"], values, strict=True))
        more = given.pop("more", {})
        merged = {"source": document["source"], **document["common"], **given, **more}
        try:
            rows.append(Row.of({key: value for key, value in merged.items() if value is not None}))
        except DataError as error:
            violations.append(f"{path.name}: {error}")
    if violations:
        raise DataError("\n".join(violations))
    return rows


def all_rows() -> list[Row]:
    """The rows of all campaigns; those that contradict themselves are in `refused` alone."""
    return [row for path in sorted(FOLDER.glob("*.json")) for row in read(path)]
