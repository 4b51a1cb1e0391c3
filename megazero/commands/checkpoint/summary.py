"""Summaries of checkpoints and of runs' folders, as plain values for tables and JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megazero.checkpoint.folder import (
    LATEST,
    iteration_folder,
    latest_iteration,
    leftovers,
    saved_iterations,
)
from megazero.checkpoint.locate import bytes_in, no_checkpoint
from megazero.checkpoint.manifest import MANIFEST, Logical
from megazero.checkpoint.reader import CheckpointReader, Verify
from megazero.errors import CheckpointError, DamagedCheckpointError


def pick(facts: Any, *path: str) -> Any:
    """Look up a nested value; None if it is missing: other versions and converters write other facts."""
    for step in path:
        if not isinstance(facts, Mapping):
            return None
        facts = facts.get(step)
    return facts


@dataclass(frozen=True)
class SavedLayout:
    """The layout of a run over ranks when it saved.

    Attributes:
        world_size: the number of ranks.
        tensor, pipeline, context, data: the sizes of the axes.
        zero_stage: the optimizer's ZeRO stage.
    """

    world_size: int
    tensor: int
    pipeline: int
    context: int
    data: int
    zero_stage: object

    def __str__(self) -> str:
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        context = f" x context {self.context}" if self.context > 1 else ""
        axes = f"tensor {self.tensor} x pipeline {self.pipeline}{context} x data {self.data}"
        return f"{ranks}: {axes}, ZeRO stage {self.zero_stage}"


def layout_of(facts: Mapping[str, object]) -> SavedLayout | None:
    """The layout that wrote a checkpoint; None for one that no training wrote."""
    parallel = pick(facts, "config", "parallel")
    world = pick(facts, "written_by", "world_size")
    sizes = [
        pick(parallel, f"{name}_parallel_size") for name in ("tensor_model", "pipeline_model", "context")
    ]
    if not all(isinstance(size, int) and size > 0 for size in (world, *sizes)):
        return None
    tensor, pipeline, context = sizes
    data = world // (tensor * pipeline * context)
    return SavedLayout(world, tensor, pipeline, context, data, pick(facts, "config", "zero", "stage"))


def programs_of(facts: Mapping[str, object]) -> list[str]:
    """The programs that wrote a checkpoint, with their versions."""
    versions = ((name, pick(facts, "written_by", name)) for name in ("megazero", "git", "torch", "python"))
    return [f"{name} {version}" for name, version in versions if version]


@dataclass(frozen=True)
class Summary:
    """One checkpoint of a run, by its manifest and the sizes of its files.

    Attributes:
        name: the folder's name.
        iteration: the iteration after which it was saved.
        latest: whether the run's file of the latest checkpoint names this one.
        bytes: the size of all files.
        saved: the time of saving, in UTC.
        samples, tokens: the numbers trained on before.
        layout: the layout that wrote it.
        trouble: why the checkpoint is not whole; None if it is.
    """

    name: str
    iteration: int
    latest: bool
    bytes: int
    saved: object = None
    samples: object = None
    tokens: object = None
    layout: SavedLayout | None = None
    trouble: str | None = None


def summarize(directory: Path, iteration: int, latest: int | None) -> Summary:
    """Summarize one checkpoint of a run; `latest` is the iteration that the run's file names."""
    folder = iteration_folder(directory, iteration)
    size = bytes_in(folder)
    try:
        facts = CheckpointReader(folder, verify=Verify.SIZE).facts
    except CheckpointError as error:
        return Summary(folder.name, iteration, iteration == latest, size, trouble=str(error))
    return Summary(
        folder.name,
        iteration,
        iteration == latest,
        size,
        pick(facts, "time"),
        pick(facts, "state", "consumed_samples"),
        pick(facts, "state", "consumed_tokens"),
        layout_of(facts),
    )


@dataclass(frozen=True)
class RunSummary:
    """The folder of a run.

    Attributes:
        directory: the folder.
        checkpoints: its checkpoints, oldest first.
        leftovers: (hidden name, bytes) of the remains of saves.
        trouble: what is wrong with the file that names the latest checkpoint; None if nothing.
    """

    directory: str
    checkpoints: tuple[Summary, ...]
    leftovers: tuple[tuple[str, int], ...]
    trouble: str | None


def describe_run(directory: Path) -> RunSummary:
    """Describe all checkpoints of a run.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    named, trouble = latest_or_trouble(directory)
    saved = saved_iterations(directory)
    left = tuple((leftover.path.name, bytes_in(leftover.path)) for leftover in leftovers(directory))
    if not (saved or left or trouble):
        raise no_checkpoint(directory)
    checkpoints = tuple(summarize(directory, iteration, named) for iteration in saved)
    return RunSummary(str(directory), checkpoints, left, trouble)


def latest_or_trouble(directory: Path) -> tuple[int | None, str | None]:
    """Read which iteration a run's file names as the latest; returns it and what is wrong with the file.

    Either is None if there is none.

    Raises:
        CheckpointError: the folder is Megatron's.
    """
    try:
        named = latest_iteration(directory)
    except DamagedCheckpointError as error:
        return None, str(error)
    there = [iteration_folder(directory, iteration) for iteration in saved_iterations(directory)]
    there += [leftover.restored for leftover in leftovers(directory) if leftover.restored is not None]
    if named is not None and iteration_folder(directory, named) not in there:
        missing = iteration_folder(directory, named).name
        return named, f"`{directory / LATEST}` names {missing}, which is missing"
    return named, None


@dataclass(frozen=True)
class KindTotal:
    """Totals over all tensors of one kind and dtype.

    Attributes:
        kind: the kind, such as ``weight`` or ``exp_avg``.
        dtype: the dtype, as safetensors names it.
        tensors, pieces, elements, bytes: the totals.
    """

    kind: str
    dtype: str
    tensors: int
    pieces: int
    elements: int
    bytes: int


def totals_by_kind(reader: CheckpointReader) -> list[KindTotal]:
    """The totals of each kind and dtype: weights first, the others by name."""
    groups: dict[tuple[str, str], list[Logical]] = defaultdict(list)
    for tensor in reader.directory.whole().tensors:
        groups[tensor.kind, tensor.dtype].append(tensor)
    totals = []
    for (kind, dtype), tensors in sorted(groups.items(), key=lambda item: (item[0][0] != "weight", item[0])):
        elements = sum(elements_of(tensor) for tensor in tensors)
        width = reader.dtype(tensors[0].key).itemsize
        pieces = sum(len(tensor.pieces) for tensor in tensors)
        totals.append(KindTotal(kind, dtype, len(tensors), pieces, elements, elements * width))
    return totals


def elements_of(tensor: Logical) -> int:
    """The number of elements of a logical tensor, which its pieces cover exactly once."""
    return sum(piece.box.numel for piece in tensor.pieces)


def file_rows(reader: CheckpointReader) -> list[dict[str, object]]:
    """A row for each file but the manifest: name, bytes, number of hashed blocks, number of pieces."""
    pieces: dict[str, int] = defaultdict(int)
    for tensor in reader.directory.whole().tensors:
        for piece in tensor.pieces:
            pieces[piece.file] += 1
    return [
        {"name": name, "bytes": entry.size, "blocks": len(entry.blocks), "pieces": pieces[name]}
        for name, entry in reader.directory.files().items()
    ]


def describe_checkpoint(reader: CheckpointReader) -> dict[str, Any]:
    """Describe one checkpoint, as JSON."""
    layout = layout_of(reader.facts)
    return {
        "folder": str(reader.folder),
        "iteration": reader.manifest.iteration,
        "bytes": bytes_in(reader.folder),
        "layout": None if layout is None else asdict(layout),
        "kinds": [asdict(total) for total in totals_by_kind(reader)],
        "files": [{"name": MANIFEST, "bytes": (reader.folder / MANIFEST).stat().st_size}, *file_rows(reader)],
        "facts": dict(reader.facts),
    }
