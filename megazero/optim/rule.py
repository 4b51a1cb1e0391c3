"""`UpdateRule`: the contract between an optimizer's arithmetic and ZeRO, which hands it flat fp32 pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard

import torch
from torch import Tensor

from megazero.mpu.group import Group, Reduction
from megazero.ops.segments import NO_SIGNALS, DeviceSignals


@dataclass(frozen=True)
class Needs:
    """The needs of a rule beyond its pieces: none, if each element's update depends only on that element.

    Attributes:
        norms: names of the norms that it needs for each parameter, see `NormRule`.
        reduces: whether it sums gradients over the replicas itself, see `ReducingRule`.
        private: the `state_names` whose tensors differ between replicas.
        scalars: names of further state, one number for each whole parameter.
        in_use: whether the model uses other weights than the masters; the rule's `in_use` makes them.
        matrices: whether it updates whole matrices, and another rule the rest, see `MatrixRule`.
        one_pass: whether it reads gradients as they are stored and writes the model's weights while it moves
            the masters; its pieces then have `ends`.
    """

    norms: tuple[str, ...] = ()
    reduces: bool = False
    private: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()
    in_use: bool = False
    matrices: bool = False
    one_pass: bool = False


@dataclass(frozen=True)
class PassEnds:
    """Both ends of a one-pass update: the gradients that it reads, and the model's weights that it writes.

    Attributes:
        scale: factor of the gradients, which are of any width (fp32, bf16 or fp16) and stay as they are.
        weights: for each piece, the tensor for its new weights, rounded; None where only masters are used.
        signals: inputs of the update that only the device knows; only for rules that `heed` them.
    """

    scale: float
    weights: Sequence[Tensor | None]
    signals: DeviceSignals = NO_SIGNALS


_FP32 = (torch.float32,)
_STORED = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Pieces:
    """Flat pieces of parameters, and what an update of them takes beside a learning rate.

    Attributes:
        params: contiguous fp32 tensors of any shape, empty ones included.
        grads: for each, a contiguous fp32 gradient of its shape, unscaled and clipped.
        states: for each, its `init_state`.
        weight_decays: for each, its weight decay.
        step: number of this update, from 1 (skipped steps do not count).
        ends: both ends of the pass if the rule's `needs.one_pass`; otherwise None.
    """

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    states: Sequence[dict[str, Tensor]]
    weight_decays: Sequence[float]
    step: int
    ends: PassEnds | None = None

    @property
    def scale(self) -> float:
        """The factor by which gradients are multiplied."""
        return 1.0 if self.ends is None else self.ends.scale

    @property
    def signals(self) -> DeviceSignals:
        """Inputs of the update that only the device knows."""
        return NO_SIGNALS if self.ends is None else self.ends.signals

    @property
    def weights(self) -> Sequence[Tensor | None]:
        """For each piece, the tensor for its new weights, rounded; None where only masters are used."""
        return [None] * len(self.params) if self.ends is None else self.ends.weights

    def of(self, kind: str) -> list[Tensor]:
        """The pieces' states of one kind."""
        return [state[kind] for state in self.states]

    def by_decay(self) -> Iterator[tuple[float, list[int]]]:
        """Each weight decay, and the numbers of the pieces that have it and are not empty."""
        for decay in dict.fromkeys(self.weight_decays):
            chosen = [
                i for i, own in enumerate(self.weight_decays) if own == decay and self.params[i].numel()
            ]
            if chosen:
                yield decay, chosen

    def check(self, names: tuple[str, ...], scalars: tuple[str, ...] = ()) -> None:
        """Refuse what an in-place kernel would read or write incorrectly.

        Args:
            names: the rule's `state_names`.
            scalars: the rule's `needs.scalars`, if each piece is of one parameter.

        Raises:
            ValueError: see `UpdateRule.step`.
        """
        lists = (self.params, self.grads, self.states, self.weight_decays, self.weights)
        lengths = [len(members) for members in lists]
        if len(set(lengths)) != 1:
            raise ValueError(
                f"`params`, `grads`, `states`, `weight_decays` and `ends.weights` must have the same length, "
                f"but have {lengths}; give one of each per tensor."
            )
        if self.step < 1:
            raise ValueError(f"`step` must be at least 1, but is {self.step}; count updates from 1.")
        for index, (param, grad, state, weights) in enumerate(
            zip(self.params, self.grads, self.states, self.weights, strict=True)
        ):
            if tuple(state) != (*names, *scalars):
                raise ValueError(
                    f"`states[{index}]` must have the keys {(*names, *scalars)}, but has {tuple(state)}; "
                    "make it with `init_state`."
                )
            for name in names:
                _check_tensor(name, index, state[name], param, _FP32)
            _check_tensor("params", index, param, param, _FP32)
            _check_tensor("grads", index, grad, param, _FP32 if self.ends is None else _STORED)
            if weights is not None:
                _check_tensor("ends.weights", index, weights, param, _STORED)


def _check_tensor(
    name: str, index: int, tensor: Tensor, param: Tensor, dtypes: tuple[torch.dtype, ...]
) -> None:
    if not tensor.is_contiguous():
        raise ValueError(
            f"`{name}[{index}]` must be contiguous, but has strides {tensor.stride()}; pass a flat tensor."
        )
    if tensor.dtype not in dtypes or tensor.shape != param.shape:
        raise ValueError(
            f"`{name}[{index}]` must be fp32 of shape {tuple(param.shape)}, but is {tensor.dtype} of "
            f"shape {tuple(tensor.shape)}; convert it."
        )


WORKER_ERROR = "worker_error"
"""Kind of the part of a replica's numbers that its messages left out; the rule adds it to the next ones."""

SERVER_ERROR = "server_error"
"""Kind of the part of the sums that a replica's messages to all left out, for the slice that it sends."""


@dataclass(frozen=True)
class Replicas:
    """The replicas of one bucket, as a rule that sums over them by itself needs to know them.

    Attributes:
        group: the replicas.
        spans: start and stop of each parameter in the bucket's flat tensors [padded].
        worker_error: fp32 [padded], this replica's own; kept from step to step.
        server_error: fp32 [padded / replicas], of the slice with this replica's number; kept likewise.
        over_slices: takes measurements of this rank's slices of the parameters, [parameters, count], and
            ``sum`` or ``max``; reduces them in place over the ranks that slice this replica's model.
        lrs: learning rate of each parameter in this step.
    """

    group: Group
    spans: Sequence[tuple[int, int]]
    worker_error: Tensor
    server_error: Tensor
    over_slices: Callable[[Tensor, Reduction], None]
    lrs: Sequence[float]


class UpdateRule(Protocol):
    """One optimizer's arithmetic.

    A rule knows nothing about groups, shards or dtypes of the model: it gets flat pieces of the master
    weights. Without `needs.norms`, a piece may hold parts of several parameters; with them, of one only.
    """

    @property
    def needs(self) -> Needs:
        """The needs of the rule beyond its pieces."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """Keys of `init_state`'s result, which name the arrays in a checkpoint, in that order."""

    def init_state(self, like: Tensor) -> dict[str, Tensor]:
        """Fresh state for one parameter tensor: contiguous zeros with its shape, dtype and device."""
        return {
            name: torch.zeros_like(like, memory_format=torch.contiguous_format) for name in self.state_names
        }

    def heeds_signals(self, device: str) -> bool:
        """Whether on a type of device its `step` takes the factor of gradients, and whether to change
        anything, from the device.
        """
        return False

    step: Callable[..., None]
    """Updates the parameters and states of `Pieces` in place, with a learning rate, its second argument.

    A rule's needs may add further arguments, see `NormRule` and `MatrixRule`.

    Raises:
        ValueError: the lists differ in length, the step is below 1, or a tensor is not contiguous, not fp32
            or not of its parameter's shape. Nothing has been changed then.
    """


class NormRule(UpdateRule, Protocol):
    """A rule that scales each parameter's update by norms over the whole parameter (LARS, LAMB).

    A step then has two phases. `prepare` sees all pieces on this rank; next, the squares for all parameters
    are summed together over the ranks that hold parts of them; finally `step` sees the pieces again.
    """

    def prepare(self, pieces: Pieces) -> Iterable[Sequence[Tensor]]:
        """Bring the states up to date and return the tensors to measure, piece by piece.

        Args:
            pieces: as in `step`, but each is part of one parameter; neither parameters nor gradients may be
                changed.

        Returns:
            For each piece, one tensor for each of `needs.norms`, such as the weights and their update, or any
            tensor with the same norm, such as the norm itself. A generator keeps only one piece's tensors in
            memory at a time.
        """

    def step(self, pieces: Pieces, lr: float, norms: Sequence[Tensor], exempt: Sequence[bool]) -> None:
        """Update the pieces in place, as `UpdateRule.step` does.

        Args:
            pieces, lr: as in `UpdateRule.step`.
            norms: for each piece, the L2 norms of its whole parameter's tensors, fp64 [len(needs.norms)].
            exempt: for each piece, whether its parameter is exempt from weight decay, and not only for now,
                while a schedule has it at 0.
        """


class MatrixRule(UpdateRule, Protocol):
    """A rule whose update of a matrix depends on all of it (Muon, Shampoo), however it is cut and sharded.

    `prepare` sees this rank's pieces; its results are put together to whole matrices, `change` turns these
    into updates, and `step` gets this rank's pieces of the updates. Parameters whose `ParamSpec` names no
    matrices are for `rest`.

    Attributes:
        rest: the rule for other parameters, which has other buckets and its own state.
        split_joined: whether matrices that are stored as one (queries, keys and values) are changed apart.
    """

    rest: UpdateRule
    split_joined: bool

    def prepare(self, pieces: Pieces) -> Iterable[Tensor]:
        """Bring the states up to date and return the tensors for `change`, piece by piece."""

    def change(self, matrices: Tensor) -> Tensor:
        """The updates of whole matrices [n, rows, columns], in the same shape, each by itself."""

    def step(self, pieces: Pieces, lr: float, updates: Sequence[Tensor]) -> None:
        """Update the pieces in place, as `UpdateRule.step` does.

        Args:
            pieces, lr: as in `UpdateRule.step`.
            updates: for each piece, its part of the tensors that `change` returned.
        """


class ReducingRule(UpdateRule, Protocol):
    """A rule that sums gradients over the replicas itself, compressed or infrequently (the 1-bit family).

    In the steps that it does not sum exactly, the communication hook reduces nothing. If state were sharded,
    no replica could use the sums, so such a rule works only with stage 0.
    """

    def sums_exactly(self, step: int) -> bool:
        """Whether gradients are summed for `step` as for any other rule, and `reduce` is not called.

        It depends on the number alone, so that all ranks agree, and a resumed run agrees with them.
        """

    def reduce(self, grads: Tensor, state: dict[str, Tensor], *, replicas: Replicas, step: int) -> None:
        """Replace the gradients, or update `state`, by the values over all replicas that `step` then uses.

        Called for one bucket after another, in the same order on every rank, before the other phases, and
        only in steps in which all ranks' gradients are finite.

        Args:
            grads: a bucket's flat fp32 sums over only this replica's samples, scaled so that their sum over
                the replicas is the whole gradient, and clipped.
            state: the bucket's moments, of the same shape, and its `needs.scalars`, [parameters].
            replicas: the replicas, and the errors of the messages to them so far.
            step: number of this update, from 1.
        """


class LocalRule(ReducingRule, Protocol):
    """A rule whose replicas go on alone for some steps: each then uses weights of its own (0/1 Adam).

    The masters are those that the replicas had in common, and stay the same on all of them.
    """

    def in_use(self, master: Tensor, state: dict[str, Tensor]) -> Tensor:
        """The weights that the model is to use on this replica; may be `master` itself."""


def is_norm_rule(rule: UpdateRule) -> TypeGuard[NormRule]:
    """Whether the rule asks for norms of whole parameters."""
    return bool(rule.needs.norms)


def is_matrix_rule(rule: UpdateRule) -> TypeGuard[MatrixRule]:
    """Whether the rule updates whole matrices."""
    return rule.needs.matrices


def is_reducing_rule(rule: UpdateRule) -> TypeGuard[ReducingRule]:
    """Whether the rule sums gradients over the replicas itself."""
    return rule.needs.reduces


def is_local_rule(rule: UpdateRule) -> TypeGuard[LocalRule]:
    """Whether the rule makes the weights that the model uses."""
    return rule.needs.in_use
