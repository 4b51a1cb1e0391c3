"""`WeightStream`: a model's tensors under transformers' names, one after the other, from any `Source`.

Conversion, `--save-hf` and `send_weights` take weights from such a stream.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megazero.checkpoint.box import Box
from megazero.checkpoint.naming import Table, TensorLink, cut
from megazero.checkpoint.part import WEIGHT, Key, Part, Source, misfits
from megazero.checkpoint.safetensors_header import DTYPES, NAME_OF_DTYPE
from megazero.checkpoint.tensor_file import Later, memory_of
from megazero.config.tree.model import ModelConfig
from megazero.errors import CheckpointError
from megazero.formats.hf.architecture import Architecture
from megazero.mpu.context import ParallelContext
from megazero.mpu.group import Transfer
from megazero.mpu.messages import gather_values
from megazero.spec.model import ModelSpec
from megazero.spec.resolve import model_spec

CHUNK = 1 << 18
"""Elements that are requested from a source at a time, if it must convert or transpose them."""
_MOST_NAMED = 8


class WeightStream(Iterator[tuple[str, Tensor]]):
    """Yields (name, tensor on the CPU) once, holding one tensor at a time.

    Where ranks gather each tensor, all of them iterate to the end, in which case only the first one is given
    tensors: for the others, the iteration takes part in the gathering and yields nothing.

    Args:
        tensors: names, and what makes the tensors; the same on all ranks.
        version: counts the states of the weights, such as the iteration; None leaves out hashes.
        yields: whether this rank is given the tensors.

    Attributes:
        parameters: the number of the model's, however they are stored.
        hashes: name -> SHA-256 of the tensor's bytes, of the tensors that were yielded.
    """

    def __init__(
        self, tensors: Iterable[tuple[str, Later]], version: int | None = None, *, yields: bool = True
    ):
        self.tensors = tuple(tensors)
        self.version = version
        self.yields = yields
        self.parameters = sum(math.prod(later.shape) for _, later in self.tensors)
        self.hashes: dict[str, str] = {}
        self._left = iter(self.tensors)

    @classmethod
    def of_model(
        cls,
        source: Source,
        architecture: Architecture,
        model: ModelConfig,
        vocab_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        version: int | None = None,
        packing: Packing = lambda tensor: None,
    ) -> WeightStream:
        """The tensors of a model, in the order of blocks: the embedding's, those of each layer, the rest.

        Args:
            source: the weights of `model`; other kinds are left out. Of a `GatheredSource`, every rank calls
                this and iterates.
            architecture: the class in transformers.
            vocab_size: entries of the vocabulary, without padding.
            dtype: the dtype of weights.
            packing: stores some tensors otherwise.

        Raises:
            CheckpointError: the source does not hold exactly the model's weights; or, in the iteration, a
                weight overflows in float16.
        """
        spec = model_spec(model)
        check_source(source, Table.of(architecture.rules, spec, vocab_size))
        constants = {
            link.key: constant.number
            for constant in architecture.constants
            for link in Table.of([constant.rule], spec, vocab_size).links
        }
        yields = not isinstance(source, GatheredSource) or source.arrives
        values = _Values(source, constants, torch.device("cpu" if yields else "meta"))
        tensors = HFTensor.of_model(architecture, spec, vocab_size, dtype)
        stored = [pair for t in tensors for pair in packing(t) or ((t.theirs, values.later(t)),)]
        stream = cls(stored, version, yields=yields)
        stream.parameters = sum(math.prod(tensor.their_shape) for tensor in tensors)
        return stream

    def __next__(self) -> tuple[str, Tensor]:
        for name, later in self._left:
            tensor = later.make()
            if self.yields:
                if self.version is not None:
                    self.hashes[name] = hash_of(tensor)
                return name, tensor
        raise StopIteration

    @property
    def laters(self) -> list[tuple[str, Later]]:
        """The tensors as a writer takes them, which must make each of them in order."""

        def taken(expected: str) -> Tensor:
            name, tensor = next(self)
            assert name == expected, f"{name} is next, but {expected} was asked for"
            return tensor

        return [(n, Later(later.dtype, later.shape, partial(taken, n))) for n, later in self.tensors]

    def finish(self) -> None:
        """Take part in what is left of the iteration, for the sake of the other ranks."""
        for _ in self:
            pass


def hash_of(tensor: Tensor) -> str:
    """The SHA-256 of a CPU tensor's bytes, in hexadecimal digits."""
    return hashlib.sha256(memory_of(tensor.contiguous())).hexdigest()


class GatheredSource(Source):
    """The weights of a live training, gathered by its first rank box by box; no rank holds a whole model.

    Every rank makes the same calls of `read`. The first one's memory is filled; that of others stays as it
    is, and may be on the device meta.

    Args:
        parts: what this rank contributes; over all ranks each element is there once.
        context: the ranks.

    Attributes:
        arrives: whether this is the rank whose memory is filled.
    """

    def __init__(self, parts: Iterable[Part], context: ParallelContext):
        self.context = context
        self.arrives = context.rank == 0
        self._own = [part for part in parts if part.box.numel]
        listed = [
            (*(p.key.name, p.key.kind, p.shape), NAME_OF_DTYPE[p.tensor.dtype], p.box.offset, p.box.shape)
            for p in self._own
        ]
        self._pieces: dict[Key, list[_Piece]] = defaultdict(list)
        self._shapes: dict[Key, tuple[int, ...]] = {}
        for rank, rows in enumerate(gather_values(context.world, listed, context.device)):
            for number, (name, kind, shape, dtype, offset, sizes) in enumerate(rows):
                self._shapes[Key(name, kind)] = tuple(shape)
                piece = _Piece(rank, number, DTYPES[dtype], Box(tuple(offset), tuple(sizes)))
                self._pieces[Key(name, kind)].append(piece)

    @property
    def shapes(self) -> Mapping[Key, tuple[int, ...]]:
        """Logical tensor -> its shape; the same on every rank."""
        return self._shapes

    def read(self, parts: Iterable[Part]) -> None:
        """Fill the memory of parts on the first rank; every rank calls this with the same boxes.

        Ranks meet first. On a GPU a rank does not wait for what it has sent, and one that has nothing to send
        would go on: its later calls would be too old by the time a first rank that writes slowly gets there.
        """
        self.context.world.barrier()
        for part in parts:
            arriving: list[tuple[Tensor, Tensor]] = []
            transfers: list[Transfer] = []
            for piece in self._pieces[part.key]:
                box = piece.box.overlap(part.box)
                if box is None:
                    continue
                if piece.rank == self.context.rank:
                    own = self._own[piece.number].tensor.detach()[box.within(piece.box)]
                    if self.arrives:
                        part.tensor[box.within(part.box)].copy_(own)
                    else:
                        transfers.append(Transfer("send", own.to(self.context.device).contiguous(), 0))
                elif self.arrives:
                    buffer = torch.empty(box.shape, dtype=piece.dtype, device=self.context.device)
                    transfers.append(Transfer("recv", buffer, piece.rank))
                    arriving.append((part.tensor[box.within(part.box)], buffer))
            for work in self.context.world.exchange(transfers) if transfers else ():
                work.wait()
            for memory, buffer in arriving:
                memory.copy_(buffer)


@dataclass(frozen=True)
class _Piece:
    """A part of a rank, as the other ranks know it."""

    rank: int
    number: int
    dtype: torch.dtype
    box: Box


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


Packing = Callable[[HFTensor], Sequence[tuple[str, Later]] | None]
"""The tensors, with their names, that are stored for one; None if it is stored as it is."""


def _block_of(key: Key) -> float:
    """The number of the layer that a tensor of ours is in; less for the embedding, more for what follows."""
    first, *rest = key.name.split(".")
    return float(rest[0]) if first == "layers" else -1.0 if first == "embedding" else math.inf


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


def read_theirs(
    source: Source, link: TensorLink, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensor:
    """Read a tensor of transformers: let the source fill it through a view with our dims.

    Raises:
        CheckpointError: `dtype` is float16, and a value overflows.
    """
    theirs = torch.empty(link.their_shape, dtype=dtype, device=device)
    ours = link.as_ours(theirs)
    # To convert, transpose or skip elements, a source holds a copy of what is asked for: ask for little.
    straight = link.is_straight and link.box == Box.whole(link.shape) and dtype == torch.float32
    boxes = [link.box] if straight else cut(link.box, range(len(link.shape)), CHUNK)
    source.read([Part(link.key, link.shape, box, ours[box.within(link.box)]) for box in boxes])
    if dtype == torch.float16 and not theirs.is_meta and not all(map(math.isfinite, theirs.aminmax())):
        raise CheckpointError(
            f"`{link.key}` must be finite as float16, but has values beyond its range; export bfloat16 or "
            "float32"
        )
    return theirs


@dataclass(frozen=True)
class _Values:
    source: Source
    constants: Mapping[Key, float]
    device: torch.device

    def later(self, tensor: HFTensor) -> Later:
        def make() -> Tensor:
            rows = [self._rows(link, tensor.dtype) for link in tensor.links]
            return rows[0] if len(rows) == 1 else torch.cat(rows)

        return Later(tensor.dtype, tensor.their_shape, make)

    def _rows(self, link: TensorLink, dtype: torch.dtype) -> Tensor:
        if link.key not in self.source.shapes:  # one of `Architecture.blank`
            number = self.constants.get(link.key, 0.0)
            return torch.full(link.their_shape, number, dtype=dtype, device=self.device)
        return read_theirs(self.source, link, dtype, self.device)
