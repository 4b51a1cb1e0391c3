"""Lists the tensors of a checkpoint, under Core's names in a whole model, and checks them against a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.checkpoint.naming import TensorLink
from megazero.errors import CheckpointError
from megazero.formats.hf.folder import named
from megazero.formats.megatron.dialects import (
    BLOCK,
    HEAD,
    HEAD_COPY,
    WORD,
    WORD_COPY,
    core_name,
    foreign_kind,
    has_two_stacks,
    layer_of,
    moved,
)
from megazero.formats.megatron.names import ShardedRule, held_whole
from megazero.formats.megatron.stages import Opened, RankStages
from megazero.formats.megatron.weights import Weights

IN_USE = "in use"
"""The kind of the model's own weights; the optimizer's masters have the kind `WEIGHT`."""

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_MOST_NAMED = 8


@dataclass(frozen=True)
class SavedTensor:
    """The place of a tensor: pipeline stage, model chunk in the stage's files, and name there."""

    stage: int
    chunk: str
    name: str

    def tensors(self, stages: Opened) -> tuple[Tensor, ...]:
        """The tensor of every tensor-parallel rank."""
        return tuple(rank[self.name] for rank in stages.chunks(self.stage)[self.chunk])


@dataclass(frozen=True)
class TensorRecord:
    """One tensor: its place, its shape and dtype on each rank, and the largest difference between copies."""

    saved: SavedTensor
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    difference: float = 0.0


Inventory = Mapping[str, TensorRecord]
"""Core's name, with the layer's number in the whole model -> the record of the tensor."""


def take_inventories(stages: RankStages) -> Mapping[str, Inventory]:
    """Open each file once and list its tensors, by kind.

    Raises:
        CheckpointError: ranks of a stage have different tensors, or a tensor is there twice.
    """
    kinds: dict[str, dict[tuple[int, int], dict[str, TensorRecord]]] = {IN_USE: {}}
    for stage in range(len(stages.files.stages)):
        for chunk, ranks in stages.chunks(stage).items():
            kind, _, own = chunk.rpartition("/")
            virtual = int(own.removeprefix("model") or 0)
            kinds.setdefault(kind or IN_USE, {})[virtual, stage] = dict(_of_chunk(stage, chunk, ranks))
    two_stacks = has_two_stacks([name for names in kinds[IN_USE].values() for name in names])
    first, firsts = 0, {}
    # With virtual stages, the second chunk of the first stage follows the first chunk of the last stage.
    for place in sorted(kinds[IN_USE]):
        called = [core_name(name, two_stacks) for name in kinds[IN_USE][place]]
        numbers = {number for name in called if name and (number := layer_of(name)) is not None}
        if numbers != set(range(len(numbers))):
            raise CheckpointError(
                f"`{stages.files.stages[place[1]][0]}` must number its layers from 0, but has "
                f"{sorted(numbers)}; copy all files"
            )
        firsts[place] = first
        first += len(numbers)
    return {kind: _whole(stages, chunks, firsts, two_stacks) for kind, chunks in kinds.items()}


def _whole(
    stages: RankStages,
    chunks: Mapping[tuple[int, int], Mapping[str, TensorRecord]],
    firsts: Mapping[tuple[int, int], int],
    two_stacks: bool,
) -> Inventory:
    """The tensors of all chunks, given each chunk's first layer."""
    whole: dict[str, TensorRecord] = {}
    twice: list[str] = []
    for place in sorted(chunks):
        cored = ((core_name(name, two_stacks), record) for name, record in chunks[place].items())
        own = {moved(name, firsts[place]): record for name, record in cored if name is not None}
        if WORD in own and WORD in whole and any(name.startswith(BLOCK) for name in own):
            own[WORD_COPY] = own.pop(WORD)  # the last stage's copy, for multi-token prediction
        twice += [name for name in own if name in whole]
        whole |= own
    if twice:
        raise CheckpointError(
            f"`{stages.files.folder}` must hold each tensor once, but has {named(twice)} twice"
        )
    return whole


def _of_chunk(stage: int, chunk: str, ranks: Sequence[Weights]) -> Iterator[tuple[str, TensorRecord]]:
    for rank, weights in enumerate(ranks):
        if uneven := weights.keys() ^ ranks[0].keys():
            raise CheckpointError(
                f"tensor-parallel ranks 0 and {rank} of stage {stage} must hold the same tensors, "
                f"but only one holds {named(uneven)}; copy all files of one checkpoint"
            )
    for name in ranks[0]:
        core = core_name(name)
        if core is not None:
            tensors = [weights[name] for weights in ranks]
            shapes, dtypes = tuple(tuple(t.shape) for t in tensors), tuple(t.dtype for t in tensors)
            comparable = len({*shapes}) == 1 and dtypes[0] in _FLOATS and len({*dtypes}) == 1 < len(tensors)
            apart = _difference(tensors) if comparable and held_whole(core) else 0.0
            yield name, TensorRecord(SavedTensor(stage, chunk, name), shapes, dtypes, apart)


def _difference(copies: Sequence[Tensor]) -> float:
    """The largest difference between an element of a copy and of the first; NaN if one of these is NaN."""
    unequal = [copy for copy in copies[1:] if not torch.equal(copy, copies[0])]
    return float(torch.stack([(copy - copies[0]).abs().max() for copy in unequal]).max()) if unequal else 0.0


def check(
    inventory: Inventory,
    links: Mapping[str, tuple[ShardedRule, TensorLink]],
    stages: Opened,
    *,
    average_replicas: bool,
) -> None:
    """Check that the inventory has exactly the tensors of the model's `links`, in their shapes.

    Raises:
        CheckpointError: tensors are missing, unknown, of another shape, or unequal although they must be
            copies; all are named.
    """
    copies = {HEAD_COPY, HEAD, WORD_COPY} - links.keys()
    unknown = inventory.keys() - links.keys() - copies
    if unknown:
        kind = foreign_kind(unknown)
        raise CheckpointError(
            f"`{stages.files.folder}` must hold a model that megazero supports, but holds {named(unknown)}"
            + (f", of a model with {kind}" if kind else "")
        )
    wrong = []
    if missing := links.keys() - inventory.keys():
        wrong.append(f"lacks {named(missing)}")
    for name, (sliced, link) in links.items():
        if name in inventory:
            wrong += _misfits(name, inventory[name], sliced, link, average_replicas)
    if WORD in inventory:
        wrong += [
            f"holds {name}, which differs from the embedding that it is a copy of; if it is a head of its "
            f"own, set untie_embeddings_and_output_weights with --megatron-args"
            for name in sorted(copies & inventory.keys())
            if not _same(inventory[WORD], inventory[name], stages)
        ]
    if wrong:
        raise CheckpointError(
            f"`{stages.files.folder}` must fit its arguments, but " + "; ".join(wrong[:_MOST_NAMED])
        )


def _misfits(
    name: str, record: TensorRecord, sliced: ShardedRule, link: TensorLink, average_replicas: bool
) -> Iterator[str]:
    ranks = len(record.shapes)
    expected = sliced.shape(link, ranks)
    if expected is None:
        yield f"cannot have {name}, {list(link.their_shape)}, split over {ranks} ranks"
        return
    if sliced.letter == "v":  # padded to any number of rows
        expected = (record.shapes[0][0] if record.shapes[0] else 0, *expected[1:])
    if any(shape != expected for shape in record.shapes):
        shapes = [list(shape) for shape in record.shapes]
        yield f"holds {name} as {shapes} instead of {list(expected)} per rank"
    if record.dtypes[0] not in _FLOATS or len(set(record.dtypes)) > 1:
        dtypes = ", ".join(sorted({str(dtype) for dtype in record.dtypes}))
        yield f"holds {name} as {dtypes} instead of floats of one kind"
    # NaN != 0.0, so it counts as a difference too.
    if sliced.letter is None and record.difference != 0.0 and not average_replicas:
        yield (
            f"holds {name}, whose copies on the tensor-parallel ranks differ by up to "
            f"{record.difference:.2g}; --average-replicas takes their mean"
        )


def _same(word: TensorRecord, copy: TensorRecord, stages: Opened) -> bool:
    if (word.shapes, word.dtypes) != (copy.shapes, copy.dtypes):
        return False
    # Cloned, because opening the copy's stage closes this one.
    first = [tensor.clone() for tensor in word.saved.tensors(stages)]
    return all(map(torch.equal, first, copy.saved.tensors(stages)))
