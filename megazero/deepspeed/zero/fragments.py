"""DeepSpeed's `safe_get_*` and `safe_set_*`: fp32 weights, gradients and optimizer states of one parameter.

Functions with ``full`` in their name work at every stage, and every rank calls them. Functions with
``local`` work at stage 3, on the elements that this rank keeps: as whole buckets are sharded, a rank may keep
any number of a parameter's elements, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megazero.deepspeed.zero.parallel import ExpertShards, UserParallel
from megazero.deepspeed.zero.partition import partition_of
from megazero.errors import ConfigError
from megazero.mpu.host import on_device
from megazero.zero.bucket import Bucket, whole_state
from megazero.zero.store.store import GRADIENT, WEIGHT

GradUpdate = Callable[[Tensor, nn.Parameter], Tensor]
"""Computes the new value of a parameter's gradient."""


@dataclass(frozen=True)
class _Fragment:
    """A parameter of an engine: member `number` of a bucket."""

    parallel: UserParallel
    bucket: Bucket
    number: int

    @property
    def span(self) -> tuple[int, int]:
        return self.bucket.layout.spans[self.number]

    @property
    def local_slice(self) -> slice:
        """The slice of the parameter's elements in a flat tensor over `state_range`."""
        return self.bucket.layout.overlap(*self.span)

    @property
    def factor(self) -> float:
        """The factor from gradient sums to the mean gradient times the loss scale."""
        optimizer = self.parallel.optimizer
        return float(optimizer.cur_scale / (optimizer.loss_factor * self.parallel.group.size))

    @contextmanager
    def loaded(self, kind: str, *, changes: bool = False) -> Iterator[Tensor]:
        """Context with the bucket's state of a kind, a flat tensor over `state_range`."""
        kinds = (kind,) if changes else ()
        for visit in self.parallel.store.stream((kind,), [self.bucket], changes=kinds):
            flat = visit[0].flats[kind]
            yield flat
            if changes and kind == WEIGHT:
                weights = self.parallel.store.open_weights(self.bucket)
                if weights is not None:
                    weights.copy_(flat)
                self.bucket.publish(weights).wait()

    def whole(self, kind: str) -> Tensor:
        """A whole fp32 copy of the parameter's state of a kind."""
        with self.loaded(kind) as flat:
            start, stop = self.span
            whole = on_device(whole_state(self.bucket, flat)[start:stop], self.bucket.full.device)
            return whole.to(torch.float32, copy=True).view(self.bucket.layout.members[self.number].shape)

    def set_whole(self, kind: str, value: Tensor) -> None:
        """Set this rank's elements from a whole value."""
        shape = self.bucket.layout.members[self.number].shape
        if tuple(value.shape) != tuple(shape):
            raise ConfigError(
                f"`value` must have the parameter's shape {list(shape)}, but has {list(value.shape)}"
            )
        first = max(0, self.bucket.layout.state_range.start - self.span[0])
        with self.loaded(kind, changes=True) as flat:
            own = flat[self.local_slice]
            own.copy_(value.detach().reshape(-1)[first : first + own.numel()])

    def local(self, kind: str) -> Tensor:
        """An fp32 copy of this rank's elements."""
        with self.loaded(kind) as flat:
            return on_device(flat[self.local_slice], self.bucket.full.device).to(torch.float32, copy=True)

    def set_local(self, kind: str, value: Tensor) -> None:
        """Set this rank's elements."""
        with self.loaded(kind, changes=True) as flat:
            own = flat[self.local_slice]
            if value.numel() != own.numel():
                raise ConfigError(
                    f"`value` must have the elements that this rank keeps ({own.numel()}), but has "
                    f"{value.numel()}; take its size from the getter"
                )
            own.copy_(value.detach().reshape(-1))


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """A parameter's whole fp32 weights; None without an engine, and for a frozen parameter."""
    partition = partition_of(param)
    if partition is not None:
        return partition.whole().float()
    fragment = _trained(param)
    return None if fragment is None else fragment.whole(WEIGHT)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set a parameter's fp32 weights, and the weights that forward reads."""
    _must_have_engine(param).set_whole(WEIGHT, value)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """A parameter's whole optimizer state, such as ``exp_avg``.

    It is None without an engine, and for a frozen parameter.

    Raises:
        ConfigError: the optimizer has no such state.
    """
    fragment = _trained(param)
    return None if fragment is None else fragment.whole(_state_of(fragment, optim_state_key))


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set a parameter's optimizer state.

    Raises:
        ConfigError: the optimizer has no such state.
    """
    fragment = _must_have_engine(param)
    fragment.set_whole(_state_of(fragment, optim_state_key), value)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """A parameter's whole mean gradient; None before a backward and after the step.

    With fp16 it is multiplied by the loss scale, as in DeepSpeed.
    """
    fragment = _with_gradients(param)
    return None if fragment is None else fragment.whole(GRADIENT) * fragment.factor


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set a parameter's mean gradient between the last backward and the step.

    Raises:
        ConfigError: there are no gradients now.
    """
    fragment = _must_have_gradients(param)
    fragment.set_whole(GRADIENT, value / fragment.factor)


def safe_update_full_grad_vectorized(param_list: Sequence[nn.Parameter], update_func: GradUpdate) -> None:
    """Apply a function to the gradients of several parameters; frozen parameters are skipped."""
    for param in param_list:
        if param.requires_grad:
            grad = safe_get_full_grad(param)
            if grad is not None:
                safe_set_full_grad(param, update_func(grad, param))


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """This rank's elements of a parameter's fp32 weights, flat; None if the parameter is frozen."""
    fragment = _at_stage_3(param)
    return fragment.local(WEIGHT) if fragment.bucket.key.trainable else None


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's elements of a parameter's fp32 weights; every rank calls this."""
    _at_stage_3(param).set_local(WEIGHT, value)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """This rank's elements of an optimizer state, flat; None if the parameter is frozen."""
    fragment = _at_stage_3(param)
    if not fragment.bucket.key.trainable:
        return None
    return fragment.local(_state_of(fragment, optim_state_key))


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set this rank's elements of an optimizer state."""
    fragment = _at_stage_3(param)
    fragment.set_local(_state_of(fragment, optim_state_key), value)


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """This rank's elements of a parameter's mean gradient, flat; None without a backward.

    The first call after a backward waits for the other ranks.
    """
    _at_stage_3(param)
    fragment = _with_gradients(param)
    return None if fragment is None else fragment.local(GRADIENT) * fragment.factor


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's elements of a parameter's mean gradient."""
    _at_stage_3(param)
    fragment = _must_have_gradients(param)
    fragment.set_local(GRADIENT, value / fragment.factor)


def _fragment(param: nn.Parameter) -> _Fragment | None:
    """The parameter's fragment; None without an engine."""
    holder = getattr(param, "shard_holder", None)
    parallel = holder.parallel if isinstance(holder, ExpertShards) else holder
    return _Fragment(parallel, *parallel.place(param)) if isinstance(parallel, UserParallel) else None


def _trained(param: nn.Parameter) -> _Fragment | None:
    """The parameter's fragment; None without an engine, and for a frozen parameter."""
    fragment = _fragment(param)
    return None if fragment is None or not fragment.bucket.key.trainable else fragment


def _must_have_engine(param: nn.Parameter) -> _Fragment:
    fragment = _fragment(param)
    if fragment is None:
        raise ConfigError("`param` must be a parameter of an engine, but is not; call `initialize` first")
    return fragment


def _at_stage_3(param: nn.Parameter) -> _Fragment:
    fragment = _must_have_engine(param)
    if "ds_id" not in param.__dict__:
        raise ConfigError(
            "`param` must be sharded by ZeRO stage 3 here, but the stage is lower; call the function that "
            "says `full` instead of `local`"
        )
    return fragment


def _with_gradients(param: nn.Parameter) -> _Fragment | None:
    fragment = _trained(param)
    if fragment is None or not fragment.parallel.has_gradients:
        return None
    fragment.parallel.settle()
    return fragment


def _must_have_gradients(param: nn.Parameter) -> _Fragment:
    fragment = _with_gradients(param)
    if fragment is None:
        raise ConfigError(
            "`param` must have a gradient to set, but has none now; call this between the backward and the "
            "step, for a parameter that is trained"
        )
    return fragment


def _state_of(fragment: _Fragment, key: str) -> str:
    """Check the name of an optimizer's state; returns it."""
    kinds = fragment.parallel.store.at_rest(fragment.bucket).keys()
    if key == WEIGHT or key not in kinds:
        states = sorted(kinds - {WEIGHT, GRADIENT})
        raise ConfigError(
            f"`optim_state_key` must be one of {', '.join(states) or 'no states: it is frozen or stateless'}"
            f", but is {key}"
        )
    return key
