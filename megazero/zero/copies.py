"""`CopyCheck`: whether tensors that several ranks hold copies of are the same on all of them.

Copies drift apart without any error: a bit that flips in one rank's memory, a kernel that adds in another
order, a collective that was left out. Each rank then trains a model of its own. Megatron-LM compares hashes
of the parameters over the data-parallel replicas; here masters and moments are compared too, the copies that
tensor-parallel ranks and tied stages hold, and weights with the masters that they are rounded from.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import torch
from torch import Tensor

from megazero.errors import CommunicationError
from megazero.mpu.context import ParallelContext
from megazero.mpu.grid import SLICE_AXES
from megazero.mpu.group import Group
from megazero.mpu.host import on_device
from megazero.mpu.messages import broadcast_value, fold_values, gather_values, name_ranks, same_on_all
from megazero.mpu.param_spec import SHARERS, copy_axes
from megazero.zero.fingerprint import Fingerprints
from megazero.zero.optimizer import Optimizer
from megazero.zero.store.store import WEIGHT, LoadedBucket

_USED = "weights in use"
ROUNDED = "weights in use, against their masters"
_MASTER = "master weights"
_GROUPS = ("replica", "expert_replica", *SLICE_AXES, *SHARERS)


@dataclass(frozen=True)
class CopyDifference:
    """A tensor whose copies are not equal.

    Attributes:
        name: the parameter's global name.
        kind: the kind of the tensor: the weights in use, the master weights, a moment; or `ROUNDED` for the
            weights in use of a rank that differ from its rounded masters.
        accused: the world ranks whose copy differs from the majority's; all of them if there is no majority.
        others: the world ranks of the majority; none if no value is on more than half of the ranks.
    """

    name: str
    kind: str
    accused: tuple[int, ...]
    others: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.kind == ROUNDED:
            return f"`{self.name}` ({_USED}) on {name_ranks(self.accused)} is not what its masters round to"
        if self.others:
            where = f"on {name_ranks(self.accused)} differs from {name_ranks(self.others)}, which agree"
            return f"`{self.name}` ({self.kind}) {where}"
        return f"`{self.name}` ({self.kind}) is not the same on {name_ranks(self.accused)}"


@dataclass(frozen=True)
class TakeOver:
    """A piece that the members of a group are to take over from one of them.

    Attributes:
        group: name of the group in the context.
        piece: the parameter's global name and the kind of the tensor.
        source: the group rank whose copy most members hold.
    """

    group: str
    piece: tuple[str, str]
    source: int


@dataclass(frozen=True)
class CopyFindings:
    """The result of a comparison.

    Attributes:
        differences: all copies that are not equal; the same on all ranks.
        take_overs: the pieces that members of this rank's groups must copy from the majority.
    """

    differences: tuple[CopyDifference, ...] = ()
    take_overs: tuple[TakeOver, ...] = ()

    def told(self, most: int = 3) -> str:
        """The first differences as text, and how many more there are."""
        more = len(self.differences) - most
        shown = "; ".join(map(str, self.differences[:most]))
        return f"{shown}; and {more} more" if more > 0 else shown


@dataclass(frozen=True)
class _HeldPiece:
    """A tensor of one parameter, and the groups whose members hold copies of it."""

    name: str
    kind: str
    tensor: Tensor
    groups: Collection[str]


@dataclass
class _Compared:
    """The pieces that the members of a group hold copies of, by name and kind, in the same order on each."""

    group: Group
    prints: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    def unequal(self) -> Tensor:
        """Whether each piece differs between members, bool [pieces]; every member calls this."""
        mine = self._stacked()
        bounds = torch.cat([mine, ~mine])  # the greatest complement is that of the least
        self.group.all_reduce(bounds, "max").wait()
        return bounds[: mine.numel()] != ~bounds[mine.numel() :]

    def values(self, numbers: Sequence[int]) -> list[int]:
        """The fingerprints of some pieces here."""
        return self._stacked()[list(numbers)].tolist()

    def _stacked(self) -> Tensor:
        return torch.stack([self.prints[piece] for piece in sorted(self.prints)])


class CopyCheck:
    """Compares all copies over the ranks that hold them; every rank makes the same calls.

    A comparison reads all state once, makes one small call per group and one over the world, and waits for
    the device once.

    Args:
        optimizer: holds the state.
        context: the groups.
    """

    def __init__(self, optimizer: Optimizer, context: ParallelContext):
        self.optimizer = optimizer
        self.context = context
        self._store = optimizer.store
        # Then each replica may use weights of its own, which are not the rounded masters.
        self._apart = optimizer.rule.needs.in_use
        private = optimizer.private_kinds
        self._kinds = (WEIGHT, *(kind for kind in optimizer.state_names if kind not in private))
        # State that is offloaded stays where it is while it is looked at.
        devices = (torch.device("cpu"), context.device)
        self._fingerprints = {device.type: Fingerprints(device) for device in devices}
        # Ends come last: the order of buckets is not the same on the two stages.
        self._shared = [name for name in _GROUPS if context.groups[name].size > 1]
        self._agreed = False

    @torch.no_grad()
    def compare(self) -> CopyFindings:
        """Look at all copies; the result names the same differences on all ranks."""
        compared = {name: _Compared(self.context.groups[name]) for name in self._shared}
        rounded: list[tuple[str, Tensor]] = []
        for loaded_buckets in self._store.stream(self._kinds, self._store.buckets):
            for loaded in loaded_buckets:
                for piece in self._pieces(loaded):
                    fingerprint = self._fingerprints[piece.tensor.device.type].of(piece.tensor)
                    fingerprint = on_device(fingerprint, self.context.device)
                    for group in piece.groups:
                        compared[group].prints[piece.name, piece.kind] = fingerprint
                rounded += [] if self._apart or self.optimizer.delayed else _roundings(loaded)
        if not self._agreed:
            self._agree_on_pieces(compared)
        compared = {name: pieces for name, pieces in compared.items() if pieces.prints}
        unequal = {name: pieces.unequal() for name, pieces in compared.items()}
        wrong = [differs.any() for differs in unequal.values()] + [off for _, off in rounded]
        flag = torch.stack(wrong).any() if wrong else torch.zeros((), dtype=torch.bool)
        flag = flag.to(self.context.device, torch.int64).reshape(1)
        self.context.world.all_reduce(flag, "max").wait()
        if not int(flag):
            return CopyFindings()
        return self._details(compared, unequal, [name for name, off in rounded if bool(off)])

    @torch.no_grad()
    def repair(self, take_overs: Sequence[TakeOver]) -> None:
        """Take over the copies of the majority; every rank calls this with the result of `compare`."""
        for group in self._shared:
            sources = {needed.piece: needed.source for needed in take_overs if needed.group == group}
            for loaded_buckets in self._store.stream(self._kinds, self._store.buckets, changes=self._kinds):
                for piece in (piece for loaded in loaded_buckets for piece in self._pieces(loaded)):
                    source = sources.get((piece.name, piece.kind)) if group in piece.groups else None
                    if source is not None:
                        tensor = on_device(piece.tensor, self.context.device)  # offloaded, it is not there
                        self.context.groups[group].broadcast(tensor, source).wait()
                        if tensor is not piece.tensor:
                            piece.tensor.copy_(tensor)
        self.optimizer.publish()

    def _agree_on_pieces(self, compared: Mapping[str, _Compared]) -> None:
        """Check once that all members of each group hold the same pieces, as every comparison assumes.

        Raises:
            CommunicationError: on all members: one holds a piece that another does not.
        """
        for group in self._shared:
            pieces, device = sorted(compared[group].prints), self.context.device
            digest = blake2b(json.dumps(pieces).encode(), digest_size=16).digest()
            if same_on_all(self.context.groups[group], digest, device):
                continue
            held = gather_values(self.context.groups[group], pieces, device)
            ranks = self.context.groups[group].ranks
            for name, kind in sorted({tuple(piece) for pieces in held for piece in pieces}):
                without = [r for r, pieces in zip(ranks, held, strict=True) if [name, kind] not in pieces]
                if without:
                    holders = [r for r in ranks if r not in without]
                    raise CommunicationError(
                        f"`{name}` ({kind}) must be held by all of {name_ranks(ranks)}, which have copies of "
                        f"it, but is held by {name_ranks(holders)} and not by {name_ranks(without)}."
                    )
        self._agreed = True

    def _pieces(self, loaded: LoadedBucket) -> Iterator[_HeldPiece]:
        """The pieces of a bucket that other ranks hold copies of."""
        bucket, layout = loaded.bucket, loaded.bucket.layout
        replicas = {bucket.key.replicas} if layout.ranks > 1 else set()
        used = _in_use(loaded)
        kinds = {_MASTER if kind == WEIGHT else kind: flat for kind, flat in loaded.flats.items()}
        if used is not None and not self._apart:
            kinds = {_USED: used, **kinds}
        for kind, flat in kinds.items():
            if whole := flat.numel() == layout.padded:
                parts = [(i, flat[start:stop]) for i, (start, stop) in enumerate(layout.spans)]
            else:
                parts = [(i, part) for i, _, part in layout.member_pieces(flat)]
            for number, part in parts:
                spec = layout.specs[number]
                groups = (
                    (replicas if whole else set())
                    | set(copy_axes(spec))
                    | ({spec.sharers} if spec.shared else set())
                )
                if part.numel() and (groups := groups & set(self._shared)):
                    yield _HeldPiece(spec.tied_with or spec.name, kind, part, groups)

    def _details(
        self, compared: dict[str, _Compared], unequal: dict[str, Tensor], rounded: Sequence[str]
    ) -> CopyFindings:
        """The differences and take-overs, called only if something differs."""
        mine: list[list[object]] = [[name, ROUNDED, [self.context.rank], []] for name in rounded]
        take_overs = []
        for name, held in compared.items():
            numbers = unequal[name].nonzero().flatten().tolist()
            if not numbers:
                continue
            pieces = sorted(held.prints)
            everyone = gather_values(held.group, held.values(numbers), self.context.device)
            for i, number in enumerate(numbers):
                values = [theirs[i] for theirs in everyone]
                most = max(set(values), key=values.count)
                settled = 2 * values.count(most) > len(values)
                if settled:
                    take_overs.append(TakeOver(name, pieces[number], values.index(most)))
                accused = [
                    r for r, v in zip(held.group.ranks, values, strict=True) if not settled or v != most
                ]
                others = [r for r in held.group.ranks if r not in accused]
                mine.append([*pieces[number], accused, others])
        world, device = self.context.world, self.context.device
        reports = broadcast_value(world, fold_values(world, mine, lambda a, b: a + b, device), device)
        distinct = dict.fromkeys(
            CopyDifference(name, kind, tuple(accused), tuple(others))
            for name, kind, accused, others in reports
        )
        return CopyFindings(tuple(distinct), tuple(take_overs))


def _in_use(loaded: LoadedBucket) -> Tensor | None:
    """The flat weights that forward reads, as far as this rank keeps them; None if these are the masters."""
    bucket = loaded.bucket
    sharded = bucket.layout.row.shard_params
    used = bucket.store.shard(bucket) if sharded else bucket.full
    master = loaded.flats[WEIGHT]
    same = used.numel() == master.numel() and used.data_ptr() == master.data_ptr()
    return None if same else used


def _roundings(loaded: LoadedBucket) -> Iterator[tuple[str, Tensor]]:
    """Compare weights in use with masters on this rank: each member's name, and whether any bit differs."""
    layout = loaded.bucket.layout
    used, master = _in_use(loaded), loaded.flats[WEIGHT]
    if used is None:
        return
    mine = used if layout.row.shard_params else used[layout.state_range]
    if mine.data_ptr() == master.data_ptr():  # the masters are a part of the weights
        return
    wanted = on_device(master, mine.device).to(mine.dtype)
    if not layout.row.shard_params:  # these have been gathered
        loaded.bucket.comm_hook.round_weights(wanted)
    pieces = zip(layout.member_pieces(mine), layout.member_pieces(wanted), strict=True)
    for (number, _, left), (_, _, right) in pieces:
        yield layout.specs[number].name, (_bits(left) != _bits(right)).any()


def _bits(numbers: Tensor) -> Tensor:
    """A tensor's bits as integers, so that NaN equals itself and -0 is not 0."""
    return numbers.view({2: torch.int16, 4: torch.int32}[numbers.element_size()])
