"""Writes a model as transformers reads it: safetensors, ``config.json`` and the tokenizer's files."""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from megazero.checkpoint.box import Box
from megazero.checkpoint.disk import Disk, appear
from megazero.checkpoint.naming import Table, TensorLink, cut
from megazero.checkpoint.part import WEIGHT, Key, Part, Source, misfits
from megazero.checkpoint.tensor_file import Later, write_bytes, write_tensors
from megazero.checkpoint.writer import NAMES as INDEX
from megazero.checkpoint.writer import SHARD_BYTES, deal
from megazero.config.tree.model import ModelConfig
from megazero.errors import CheckpointError
from megazero.formats.hf.architecture import GENERATING, Architecture, Json
from megazero.formats.hf.config_json import CONFIG, NO_TOKENS, TokenIds, architecture_of, config_of
from megazero.formats.hf.folder import SINGLE
from megazero.spec.model import ModelSpec
from megazero.spec.resolve import model_spec

CHUNK = 1 << 18
"""Elements that are requested from a source at a time, if it must convert or transpose them."""

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
)
NAMES: Mapping[torch.dtype, str] = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})
GENERATION = "generation_config.json"
CARD = "README.md"
_MOST_NAMED = 8


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


@dataclass(frozen=True)
class HFTensor:
    """A tensor to write: one link, or several whose rows are concatenated (a fused tensor).

    Attributes:
        theirs: the name.
        links: the links, in the order of rows.
        dtype: the dtype that is written.
    """

    theirs: str
    links: tuple[TensorLink, ...]
    dtype: torch.dtype

    @property
    def their_shape(self) -> tuple[int, ...]:
        """Shape of the tensor in the Hugging Face checkpoint."""
        if not self.links[0].their_shape:
            return ()
        rows = sum(link.their_shape[0] for link in self.links)
        return (rows, *self.links[0].their_shape[1:])

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.their_shape) * self.dtype.itemsize

    @classmethod
    def of_model(
        cls, architecture: Architecture, spec: ModelSpec, vocab_size: int, dtype: torch.dtype
    ) -> tuple[HFTensor, ...]:
        """The tensors of a model, in the order of blocks.

        dtype: the dtype of weights. Expert biases stay fp32, as in transformers: rounding would change which
        experts are chosen.
        """
        # Name of a link -> name of the fused tensor that has its rows.
        fused = {part: whole for whole, parts in architecture.fused_in(len(spec.layers)) for part in parts}
        order = {part: place for place, part in enumerate(fused)}
        joined: dict[str, list[TensorLink]] = defaultdict(list)
        for rules in (architecture.rules, architecture.without_ours):
            for link in Table.of(rules, spec, vocab_size).links:
                joined[fused.get(link.theirs, link.theirs)].append(link)
        tensors = tuple(
            cls(
                name,
                tuple(sorted(run, key=lambda link: order.get(link.theirs, 0))),
                dtype if run[0].key.kind == WEIGHT else torch.float32,
            )
            for name, run in joined.items()
        )
        return tuple(sorted(tensors, key=lambda tensor: _block_of(tensor.links[0].key)))


def _block_of(key: Key) -> float:
    """The number of the layer that a tensor of ours is in; less for the embedding, more for what follows."""
    first, *rest = key.name.split(".")
    return float(rest[0]) if first == "layers" else -1.0 if first == "embedding" else math.inf


Packing = Callable[[HFTensor], Sequence[tuple[str, Later]] | None]
"""The tensors, with their names, that are stored for one; None if it is stored as it is."""


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
    out, disk, extras = Path(os.path.abspath(out)), disk or Disk(), extras or ModelFiles()
    if dtype not in NAMES:
        raise CheckpointError(f"`dtype` must be one of {', '.join(DTYPES)}, but is {dtype}")
    if max_shard_bytes < 1:
        raise CheckpointError(f"`max_shard_bytes` must be positive, but is {max_shard_bytes}")
    architecture = architecture_of(model, extras.architecture)
    spec = model_spec(model)
    table = Table.of(architecture.rules, spec, vocab_size)
    check_source(source, table)
    constants = {
        link.key: constant.number
        for constant in architecture.constants
        for link in Table.of([constant.rule], spec, vocab_size).links
    }
    tensors = HFTensor.of_model(architecture, spec, vocab_size, dtype)
    config = config_of(architecture, model, vocab_size, extras.tokens, NAMES[dtype], extras.labels)
    config |= extras.settings
    values = _Values(source, constants)
    stored = [pair for t in tensors for pair in packing(t) or ((t.theirs, values.later(t)),)]
    export = _Export(plan_shards(stored, max_shard_bytes))
    small = {CONFIG: _json(config), **dict(extras.files)}
    if architecture.auto == GENERATING:
        small[GENERATION] = _json(extras.tokens.as_json())
    parameters = sum(math.prod(tensor.their_shape) for tensor in tensors)
    exported = Exported(out, architecture.name, architecture.auto, NAMES[dtype], len(stored), parameters, ())
    if extras.card is not None:
        small[CARD] = extras.card(exported).encode()
    try:
        if os.path.lexists(out) and (not out.is_dir() or os.listdir(out)):
            raise CheckpointError(f"`{out}` must be new or an empty folder, but is neither; name another")
        files = appear(disk, out, lambda aside: tuple(export.write(disk, aside, small)))
    except OSError as error:
        raise CheckpointError(f"`{out}` must be written, but cannot be: {error}") from error
    return replace(exported, files=files)


def check_source(source: Source, table: Table) -> None:
    """Check that a source holds exactly the weights of a table.

    Raises:
        CheckpointError: weights are missing, superfluous or have other shapes.
    """
    weights = {key: tuple(shape) for key, shape in source.shapes.items() if key.kind == WEIGHT}
    wrong = misfits(weights, {key: shape for key, shape in table.shapes.items() if key.kind == WEIGHT})
    wrong += [f"{key} is unknown to transformers" for key in weights if key not in table.shapes]
    if wrong:
        more = f"; and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
        raise CheckpointError(
            f"the weights must be those of the model, but {'; '.join(wrong[:_MOST_NAMED])}{more}"
        )


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


def read_theirs(source: Source, link: TensorLink, dtype: torch.dtype) -> Tensor:
    """Read a tensor of transformers: let the source fill it through a view with our dims.

    Raises:
        CheckpointError: `dtype` is float16, and a value overflows.
    """
    theirs = torch.empty(link.their_shape, dtype=dtype)
    ours = link.as_ours(theirs)
    # To convert, transpose or skip elements, a source holds a copy of what is asked for: ask for little.
    straight = link.is_straight and link.box == Box.whole(link.shape) and dtype == torch.float32
    boxes = [link.box] if straight else cut(link.box, range(len(link.shape)), CHUNK)
    source.read([Part(link.key, link.shape, box, ours[box.within(link.box)]) for box in boxes])
    if dtype == torch.float16 and not all(math.isfinite(extreme) for extreme in theirs.aminmax()):
        raise CheckpointError(
            f"`{link.key}` must be finite as float16, but has values beyond its range; export bfloat16 or "
            "float32"
        )
    return theirs


@dataclass(frozen=True)
class _Values:
    source: Source
    constants: Mapping[Key, float]

    def later(self, tensor: HFTensor) -> Later:
        def make() -> Tensor:
            rows = [self._rows(link, tensor.dtype) for link in tensor.links]
            return rows[0] if len(rows) == 1 else torch.cat(rows)

        return Later(tensor.dtype, tensor.their_shape, make)

    def _rows(self, link: TensorLink, dtype: torch.dtype) -> Tensor:
        if link.key not in self.source.shapes:  # one of `Architecture.blank`
            return torch.full(link.their_shape, self.constants.get(link.key, 0.0), dtype=dtype)
        return read_theirs(self.source, link, dtype)


@dataclass(frozen=True)
class _Export:
    shards: list[tuple[str, list[tuple[str, Later]]]]

    def write(self, disk: Disk, folder: Path, small: Mapping[str, bytes]) -> Iterator[tuple[str, int]]:
        """Write all files into `folder`; yield the name and size of each after it is written."""
        for name, stored in self.shards:
            record = write_tensors(disk, folder / name, stored, metadata={"format": "pt"}, hashed=False)
            yield name, record.size
        if len(self.shards) > 1:
            small = {INDEX: _json(self._index()), **small}
        for name, data in small.items():
            write_bytes(disk, folder / name, data)
            yield name, len(data)

    def _index(self) -> Json:
        total = sum(_size(later) for _, stored in self.shards for _, later in stored)
        places = {tensor: name for name, stored in self.shards for tensor, _ in stored}
        return {"metadata": {"total_size": total}, "weight_map": places}


def _json(content: Json) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
