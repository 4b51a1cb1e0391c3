"""A checkpoint for the layout that wrote it: one safetensors file per slice of the model, one JSON file.

``DIR/iter_0000100/model_tp00_pp00.safetensors`` holds, under ``name/weight``, ``name/exp_avg``, ..., the
fp32 masters and moments of one tensor-parallel slice; data-parallel replicas are equal, so the first of them
writes. ``meta.json`` holds everything else. A checkpoint is written beside its final name and appears by one
rename, so it is whole or invisible; ``latest_checkpointed_iteration.txt`` names the newest, as in Megatron.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megazero.errors import CheckpointError
from megazero.mpu import ParallelContext, gather_values

LATEST = "latest_checkpointed_iteration.txt"
FORMAT = 1


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds, as one rank sees it: its slice's tensors by key, and JSON-able facts."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


def iteration_folder(directory: str | Path, iteration: int) -> Path:
    """Where the checkpoint of `iteration` lies."""
    return Path(directory) / f"iter_{iteration:07d}"


def save_checkpoint(
    directory: str | Path, iteration: int, snapshot: Snapshot, context: ParallelContext
) -> Path:
    """Write a checkpoint; all ranks call this and return when it is visible.

    Raises:
        CheckpointError: on every rank, if any rank could not write its part; nothing becomes visible then.
    """
    final = iteration_folder(directory, iteration)
    aside = final.with_name(final.name + ".partial")
    first = context.rank == 0

    def prepare() -> None:
        if aside.exists():
            shutil.rmtree(aside)
        aside.mkdir(parents=True)

    def write_part() -> None:
        tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in snapshot.tensors.items()}
        path = aside / part_name(context)
        save_file(tensors, path)
        _sync(path)

    def publish() -> None:
        facts = {"format": FORMAT, "iteration": iteration, "layout": layout(context), **snapshot.facts}
        write_text(aside / "meta.json", json.dumps(facts, indent=1))
        if final.exists():
            shutil.rmtree(final)
        os.replace(aside, final)
        _sync(final.parent)
        write_text(Path(directory) / LATEST, f"{iteration}\n")

    together(context, prepare if first else None, f"prepare {aside}")
    together(context, write_part if context.replica.rank == 0 else None, f"write into {aside}")
    together(context, publish if first else None, f"publish {final}")
    return final


def latest_iteration(directory: str | Path) -> int | None:
    """The newest checkpoint's iteration, or None where there is none.

    Raises:
        CheckpointError: the file that names it is damaged.
    """
    path = Path(directory) / LATEST
    if not path.exists():
        return None
    text = path.read_text(errors="replace").strip()
    if not text.isdecimal():
        raise CheckpointError(
            f"`{path}` must hold an iteration number, but holds {text[:40]!r}; mend or delete it"
        )
    return int(text)


def read_facts(folder: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint.

    Raises:
        CheckpointError: it is missing, damaged or of another format.
    """
    path = folder / "meta.json"
    try:
        facts = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"`{path}` must be a checkpoint's description, but cannot be read: {error}"
        ) from error
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        found = facts.get("format") if isinstance(facts, dict) else type(facts).__name__
        raise CheckpointError(f"`{path}` must be of format {FORMAT}, but is of {found}")
    return facts


class SliceReader(Mapping[str, Tensor]):
    """This rank's slice of a checkpoint, read tensor by tensor.

    Args:
        folder: of the checkpoint.
        shapes: key -> shape, of all that will be read.
        context: says which slice is this rank's.

    Raises:
        CheckpointError: the checkpoint is of another layout, damaged, or lacks a tensor or has it in another
            shape; all such tensors are listed.
    """

    def __init__(self, folder: Path, shapes: Mapping[str, tuple[int, ...]], context: ParallelContext):
        saved = read_facts(folder)["layout"]
        if saved != layout(context):
            raise CheckpointError(
                f"`{folder}` was written with {saved}, but this run has {layout(context)}; use the same sizes"
            )
        self.path = folder / part_name(context)
        self.shapes = shapes
        with self._errors():
            self.file = safe_open(self.path, framework="pt")
            present = {key: tuple(self.file.get_slice(key).get_shape()) for key in self.file.keys()}  # noqa: SIM118
        wrong = [f"{key} is missing" for key in shapes if key not in present]
        wrong += [
            f"{key} has shape {present[key]}, not {shape}"
            for key, shape in shapes.items()
            if key in present and present[key] != shape
        ]
        if wrong:
            raise CheckpointError(f"`{self.path}` does not fit this model: " + "; ".join(wrong))

    def __enter__(self) -> SliceReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.__exit__(*error)

    def __getitem__(self, key: str) -> Tensor:
        with self._errors():
            return self.file.get_tensor(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"`{self.path}` must be a safetensors file, but cannot be read: {error}"
            ) from error


def layout(context: ParallelContext) -> dict[str, int]:
    """The sizes that a checkpoint of this kind is bound to."""
    return {"tensor_model_parallel_size": context.grid.tp, "pipeline_model_parallel_size": context.grid.pp}


def part_name(context: ParallelContext) -> str:
    """The file of this rank's slice of the model."""
    return f"model_tp{context.place.tp:02d}_pp{context.place.pp:02d}.safetensors"


def write_text(path: Path, text: str) -> None:
    """Write a small file so that it is whole or absent."""
    aside = path.with_name(path.name + ".partial")
    aside.write_text(text)
    _sync(aside)
    os.replace(aside, path)


def together(context: ParallelContext, work, what: str) -> None:
    """Do `work` here if this rank has any; a failure on one rank is raised on all."""
    failure = None
    if work is not None:
        try:
            work()
        except (OSError, SafetensorError) as error:
            failure = f"{type(error).__name__}: {error}"
    failures = gather_values(context.world, failure, context.device)
    for rank, found in enumerate(failures):
        if found is not None:
            raise CheckpointError(f"rank {rank} could not {what}: {found}")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
