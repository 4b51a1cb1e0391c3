"""Opens the files of a checkpoint, one pipeline stage at a time."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megazero.checkpoint.megatron.expert_files import Weights, experts_moved, one_by_one
from megazero.checkpoint.megatron.folder import Files, Form
from megazero.checkpoint.megatron.names import prefix_of_layer_file
from megazero.checkpoint.megatron.pickles import Inert, PositionEmbedding, load_pickle
from megazero.errors import CheckpointError

_MODEL = re.compile(r"model\d*")
_DEEPEST = 16


@dataclass(frozen=True)
class Header:
    """The contents of a rank's file besides its weights.

    Attributes:
        arguments: Megatron's arguments, or None.
        iteration: the iteration after which it was saved, or None.
        version: the checkpoint's version; 0 if it does not say, as with the oldest.
        original_vocab_size: entries before padding, or None.
        optimizer: the numbers of the optimizer's groups and of its loss scaler, or None.
    """

    arguments: Mapping[str, Any] | None
    iteration: int | None
    version: float
    original_vocab_size: int | None
    optimizer: Any = None


class Opened(Protocol):
    """The tensors of a checkpoint, by stage; see `Stages`."""

    files: Files
    headers: dict[Path, Header]

    def close(self) -> None: ...

    def chunks(self, stage: int) -> Mapping[str, tuple[Weights, ...]]:
        """The model chunks of a stage, by their names in its files, each with the weights of every rank."""


class Stages(Opened):
    """The files of a checkpoint by stage. Those of the last stage asked for stay open.

    Args:
        files: the files.
        inert: classes whose objects are not needed, by full name.

    Attributes:
        headers: the headers of the rank files that have been opened.

    Raises:
        CheckpointError: in all methods: a file names something that may not be called, or has another
            structure; DamagedCheckpointError if it cannot be read.
    """

    def __init__(self, files: Files, inert: Iterable[str] = ()):
        self.files = files
        self.headers: dict[Path, Header] = {}
        self._inert = tuple(inert)
        self._held: tuple[int, Mapping[str, tuple[Weights, ...]]] | None = None
        if files.form is Form.LAYERS:
            for path in files.ranks:
                self._load(path)
        if files.form is Form.MEGATRON and len(files.stages) > 1 and not files.experts:
            self._load(files.ranks[0])
            arguments = self.headers[files.ranks[0]].arguments or {}
            stages = arguments.get("pipeline_model_parallel_size")
            # Without a pipeline, the second number of a folder is that of an expert-parallel rank.
            if stages == 1 and arguments.get("expert_model_parallel_size") == len(files.stages):
                self.files = files.by_experts

    def close(self) -> None:
        """Close the open files."""
        self._held = None

    def chunks(self, stage: int) -> Mapping[str, tuple[Weights, ...]]:
        """The model chunks of a stage, by their names in its files, each with the weights of every rank."""
        if self._held is None or self._held[0] != stage:
            self._held = None  # close what is open before opening more
            ranks = [self._weights(path) for path in self.files.stages[stage]]
            if any(rank.keys() != ranks[0].keys() for rank in ranks):
                raise CheckpointError(
                    f"`{self.files.stages[stage][0]}` and its other ranks must hold the same model "
                    f"chunks, but hold {'; '.join(', '.join(rank) for rank in ranks)}; copy all files"
                )
            self._held = stage, {chunk: tuple(rank[chunk] for rank in ranks) for chunk in ranks[0]}
        return self._held[1]

    def _weights(self, path: Path) -> dict[str, Weights]:
        """The model chunks in a file, with the experts of all expert-parallel ranks."""
        chunks = self._chunks(path)
        for number, other in enumerate(self.files.experts.get(path, ()), 1):
            for chunk, weights in self._chunks(other).items():
                chunks[chunk] = {**chunks[chunk], **dict(experts_moved(weights, number))}
        return chunks

    def _chunks(self, path: Path) -> dict[str, Weights]:
        loaded = self._load(path)
        if self.files.form is Form.LAYERS:
            names = dict(flatten(path, loaded))
            prefix = prefix_of_layer_file(names)
            return {"model": {prefix + name: tensor for name, tensor in names.items()}}
        if self.files.form is Form.DEEPSPEED:
            loaded = {"model": loaded["module"]} if loaded.get("module") is not None else {}
        chunks = {name: content for name, content in loaded.items() if _MODEL.fullmatch(str(name))}
        if not chunks or chunks.keys() not in (
            {"model"},
            {f"model{number}" for number in range(len(chunks))},
        ):
            raise CheckpointError(
                f"`{path}` must hold `module`, `model`, or `model0`, `model1` and so on, but holds "
                f"{', '.join(sorted(map(str, loaded)))[:200] or 'nothing'}; copy all files of the checkpoint"
            )
        arguments = self.headers[path].arguments or {}
        return {name: one_by_one(dict(flatten(path, part)), arguments) for name, part in chunks.items()}

    def _load(self, path: Path) -> Mapping[str, Any]:
        loaded = load_pickle(path, self._inert)
        if not isinstance(loaded, Mapping):
            raise CheckpointError(f"`{path}` must hold a mapping, but holds a {type(loaded).__name__}")
        if path in self.files.ranks:
            self.headers[path] = _header(loaded)
        return loaded


def read_header(path: Path, inert: Iterable[str] = ()) -> Header:
    """The contents of a file besides weights.

    Raises:
        CheckpointError: it names something that may not be called; DamagedCheckpointError if it cannot be
            read.
    """
    loaded = load_pickle(path, inert)
    return _header(loaded if isinstance(loaded, Mapping) else {})


def _header(loaded: Mapping[str, Any]) -> Header:
    arguments = loaded.get("args")
    if isinstance(arguments, argparse.Namespace):
        arguments = vars(arguments)
    iteration, version = loaded.get("iteration"), loaded.get("checkpoint_version")
    universal = loaded.get("universal_checkpoint_info")
    size = universal.get("original_vocab_size") if isinstance(universal, Mapping) else None
    return Header(
        {str(name): _plain(value) for name, value in arguments.items()}
        if isinstance(arguments, Mapping)
        else None,
        iteration if isinstance(iteration, int) else None,
        float(version) if isinstance(version, (int, float)) else 0.0,
        size if isinstance(size, int) else None,
        loaded.get("optimizer"),
    )


def _plain(value: Any) -> Any:
    """A value that can be compared and printed; anything else becomes inert."""
    if isinstance(value, (list, tuple)):
        return tuple(_plain(item) for item in value)
    return value if isinstance(value, (bool, int, float, str, PositionEmbedding, type(None))) else Inert()


def flatten(path: Path, tree: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Tensors in nested mappings, by their names joined with dots. Whatever is not a tensor is left out.

    Raises:
        CheckpointError: a name is not a string, mappings are nested too deeply, or a tensor is not dense.
    """
    if depth > _DEEPEST:
        raise CheckpointError(
            f"`{path}` must hold a model's weights, but nests mappings more than {_DEEPEST} deep"
        )
    if not isinstance(tree, Mapping):
        raise CheckpointError(f"`{path}` must hold weights by name, but holds a {type(tree).__name__}")
    for name, value in tree.items():
        if not isinstance(name, str):
            raise CheckpointError(f"`{path}` must hold weights by name, but one is called {name!r}")
        if isinstance(value, Mapping):
            yield from flatten(path, value, f"{prefix}{name}.", depth + 1)
        elif isinstance(value, Tensor):
            if value.layout is not torch.strided or value.device.type != "cpu":
                raise CheckpointError(
                    f"`{path}` must hold dense tensors, but {prefix}{name} is {value.layout} on "
                    f"{value.device}"
                )
            yield prefix + name, value
