"""Writes a model as transformers reads it: safetensors, ``config.json`` and the tokenizer's files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import torch

from megazero.checkpoint.disk import Disk, appear
from megazero.checkpoint.part import Source
from megazero.checkpoint.tensor_file import Later, write_bytes, write_tensors
from megazero.checkpoint.writer import NAMES as INDEX
from megazero.checkpoint.writer import SHARD_BYTES, deal
from megazero.config.tree.model import ModelConfig
from megazero.errors import CheckpointError
from megazero.formats.hf.architecture import GENERATING, Architecture, Json
from megazero.formats.hf.config_json import CONFIG, NO_TOKENS, TokenIds, architecture_of, config_of
from megazero.formats.hf.folder import SINGLE
from megazero.formats.hf.stream import Packing, WeightStream

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
)
NAMES: Mapping[torch.dtype, str] = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})
GENERATION = "generation_config.json"
CARD = "README.md"
VERSIONS = "megazero_weights.json"
"""The file with the version of the weights, and the hash of each tensor's bytes."""


@dataclass(frozen=True)
class ModelFiles:
    """The content of a folder besides weights.

    Attributes:
        tokens: the special tokens.
        files: (name, content) of the tokenizer's files.
        labels: the names of a classifier's classes, or of the choices; empty if they have none.
        architecture: the class in transformers; None for the first one that can express the model.
        card: makes the text of README.md, given the folder without its files; None for no such file.
        settings: further fields of ``config.json``.
    """

    tokens: TokenIds = NO_TOKENS
    files: tuple[tuple[str, bytes], ...] = ()
    labels: tuple[str, ...] = ()
    architecture: str | None = None
    card: Callable[[Exported], str] | None = None
    settings: Json = field(default_factory=dict)


@dataclass(frozen=True)
class Exported:
    """The folder that was written for transformers.

    Attributes:
        folder: the folder.
        architecture: the class in transformers.
        auto: transformers' class that picks the architecture by itself.
        dtype: the dtype of all weights.
        tensors, parameters: their numbers.
        files: (name, bytes), in the order of writing.
    """

    folder: Path
    architecture: str
    auto: str
    dtype: str
    tensors: int
    parameters: int
    files: tuple[tuple[str, int], ...]


def write_hf(
    source: Source,
    model: ModelConfig,
    vocab_size: int,
    out: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_bytes: int = SHARD_BYTES,
    extras: ModelFiles | None = None,
    disk: Disk | None = None,
    packing: Packing = lambda tensor: None,
) -> Exported:
    """Write the folder `out`, which appears whole by one rename; one tensor is in memory at a time.

    Tensors are read in the order of blocks: the embedding's, those of each layer, the rest.

    Args:
        source: the weights of `model`; other kinds are left out.
        model: the model, which one of the architectures must support.
        vocab_size: entries of the vocabulary, without padding.
        out: a folder that does not exist yet, or is empty.
        dtype: float32, float16 or bfloat16.
        max_shard_bytes: the size at which another file is begun.
        extras: special tokens and the tokenizer's files.
        disk: writes the files.
        packing: stores some tensors otherwise.

    Raises:
        CheckpointError: no architecture supports the model, the source does not hold exactly its weights, a
            weight overflows in float16, `out` is not empty, or the disk cannot be written.
    """
    if dtype not in NAMES:
        raise CheckpointError(f"`dtype` must be one of {', '.join(DTYPES)}, but is {dtype}")
    extras = extras or ModelFiles()
    architecture = architecture_of(model, extras.architecture)
    stream = WeightStream.of_model(source, architecture, model, vocab_size, dtype=dtype, packing=packing)
    described = FolderFiles.of(architecture, model, vocab_size, dtype, extras)
    return write_stream(stream, described, out, max_shard_bytes=max_shard_bytes, disk=disk)


@dataclass(frozen=True)
class FolderFiles:
    """The files that are written beside a stream of weights.

    Attributes:
        architecture: the class in transformers.
        dtype: the dtype of weights.
        small: name -> content of the small files.
        card: see `ModelFiles`.
    """

    architecture: Architecture
    dtype: torch.dtype
    small: Mapping[str, bytes]
    card: Callable[[Exported], str] | None

    @classmethod
    def of(
        cls,
        architecture: Architecture,
        model: ModelConfig,
        vocab_size: int,
        dtype: torch.dtype,
        extras: ModelFiles,
    ) -> FolderFiles:
        """Describe a model."""
        config = config_of(architecture, model, vocab_size, extras.tokens, NAMES[dtype], extras.labels)
        small = {CONFIG: _json({**config, **extras.settings}), **dict(extras.files)}
        if architecture.auto == GENERATING:
            small[GENERATION] = _json(extras.tokens.as_json())
        return cls(architecture, dtype, small, extras.card)


def write_stream(
    stream: WeightStream,
    described: FolderFiles,
    out: str | Path,
    *,
    max_shard_bytes: int = SHARD_BYTES,
    disk: Disk | None = None,
) -> Exported:
    """Write a stream that has not begun as a folder, which appears whole by one rename.

    With a version, the folder has a file `VERSIONS` too, with the version and the hash of each tensor.

    Raises:
        CheckpointError: see `write_hf`.
    """
    out, disk, architecture = Path(os.path.abspath(out)), disk or Disk(), described.architecture
    if max_shard_bytes < 1:
        raise CheckpointError(f"`max_shard_bytes` must be positive, but is {max_shard_bytes}")
    counts = len(stream.tensors), stream.parameters
    exported = Exported(out, architecture.name, architecture.auto, NAMES[described.dtype], *counts, ())
    small = dict(described.small)
    if described.card is not None:
        small[CARD] = described.card(exported).encode()
    export = _Export(plan_shards(stream.laters, max_shard_bytes), stream)
    try:
        check_new(out)
        files = appear(disk, out, lambda aside: tuple(export.write(disk, aside, small)))
    except OSError as error:
        raise CheckpointError(f"`{out}` must be written, but cannot be: {error}") from error
    return replace(exported, files=files)


def check_new(out: Path) -> None:
    """Refuse a folder in which something is.

    Raises:
        CheckpointError: there is.
    """
    if os.path.lexists(out) and (not out.is_dir() or os.listdir(out)):
        raise CheckpointError(f"`{out}` must be new or an empty folder, but is neither; name another")


def plan_shards(
    stored: Sequence[tuple[str, Later]], max_shard_bytes: int
) -> list[tuple[str, list[tuple[str, Later]]]]:
    """File names and their tensors: in order, at most `max_shard_bytes`, or one larger tensor."""
    shards = deal(stored, lambda pair: _size(pair[1]), max_shard_bytes)
    if len(shards) == 1:
        return [(SINGLE, shards[0])]
    return [(f"model-{n:05d}-of-{len(shards):05d}.safetensors", shard) for n, shard in enumerate(shards, 1)]


def _size(later: Later) -> int:
    return math.prod(later.shape) * later.dtype.itemsize


@dataclass(frozen=True)
class _Export:
    shards: list[tuple[str, list[tuple[str, Later]]]]
    stream: WeightStream

    def write(self, disk: Disk, folder: Path, small: Mapping[str, bytes]) -> Iterator[tuple[str, int]]:
        """Write all files into `folder`; yield the name and size of each after it is written."""
        for name, stored in self.shards:
            record = write_tensors(disk, folder / name, stored, metadata={"format": "pt"}, hashed=False)
            yield name, record.size
        if len(self.shards) > 1:
            small = {INDEX: _json(self._index()), **small}
        if self.stream.version is not None:
            versions = {"version": self.stream.version, "sha256": self.stream.hashes}
            small = {**small, VERSIONS: _json(versions)}
        for name, data in small.items():
            write_bytes(disk, folder / name, data)
            yield name, len(data)

    def _index(self) -> Json:
        total = sum(_size(later) for _, stored in self.shards for _, later in stored)
        places = {tensor: name for name, stored in self.shards for tensor, _ in stored}
        return {"metadata": {"total_size": total}, "weight_map": places}


def _json(content: Json) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
