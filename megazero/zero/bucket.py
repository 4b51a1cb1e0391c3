"""`Bucket`: parameters in one flat buffer, so that one call gathers, reduces or updates many of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor, nn

from megazero.errors import CommunicationError, ConfigError
from megazero.mpu.group import DONE, Work
from megazero.mpu.host import on_device
from megazero.mpu.param_spec import spec_of
from megazero.zero.comm_hooks.comm_hook import CommHook
from megazero.zero.layout import BucketLayout
from megazero.zero.plan import BucketKey

Fill = Callable[[Sequence[nn.Parameter]], None]
"""Writes initial values to parameters."""


class ShardedState(Enum):
    """Whether a bucket's whole weights are on this rank."""

    SHARD = "shard"
    ARRIVING = "arriving"
    WHOLE = "whole"


class Keeper(Protocol):
    """The calls that a bucket makes to the store that keeps its state."""

    def admit(self, bucket: Bucket) -> None:
        """Add a new bucket, whose whole weights are present, and keep this rank's slice of them."""

    def shard(self, bucket: Bucket) -> Tensor:
        """This rank's slice of the weights, [shard_size] on the device, as a gather needs it."""

    def open_weights(self, bucket: Bucket) -> Tensor | None:
        """A flat tensor over `state_range` to write all new weights to, in the same memory as their masters.

        None if the masters are the weights. Call `close_weights` during the same visit of the masters.
        """

    def close_weights(self, bucket: Bucket, weights: Tensor) -> None:
        """Keep the weights that were written to the tensor from `open_weights`."""

    def adopt(self, bucket: Bucket) -> None:
        """Copy the whole weights into the slice and the master."""


class Bucket:
    """Parameters whose data are views of one flat buffer, which may or may not be on this rank.

    Where weights are sharded, the buffer's storage is emptied between uses. The tensor itself stays, so
    whatever autograd has saved of it (views included) is valid again once the storage has been refilled;
    meanwhile the parameters read as NaN and cannot be written.

    Attributes:
        full: flat weights of all parameters, [padded].
        storage: the storage of `full`.
        sums_scale: the factor by which its gradient sums are still to be multiplied, if the update that used
            them did not.
        late: whether users of the weights wait for the gather that `publish` starts; a `Gatherer` sets it.

    Args:
        key: the properties that the parameters have in common.
        params: the parameters in buffer order, on the real or the meta device.
        layout: where each parameter lies in the buffer.
        comm_hook: the connection between the replicas.
        store: holds the rest of the bucket's state; the bucket registers itself there.
        device: the device of the weights.
        fill: initializes the parameters that are on the meta device.

    Raises:
        ConfigError: parameters are on the meta device, `device` is real, and `fill` is None.
    """

    def __init__(
        self,
        key: BucketKey,
        params: Sequence[nn.Parameter],
        layout: BucketLayout,
        comm_hook: CommHook,
        store: Keeper,
        device: torch.device,
        fill: Fill | None,
    ):
        self.key = key
        self.params = list(params)
        self.layout = layout
        self.comm_hook = comm_hook
        self.store = store
        self.presence = ShardedState.WHOLE
        self.sums_scale = 1.0
        self.late = False
        self._work: Work = DONE
        self.full = torch.zeros(layout.padded, dtype=key.dtype, device=device)
        self.storage = self.full.untyped_storage()
        self._views = layout.views(self.full)
        # Expanded, they take no memory, and writes in place fail.
        self._placeholders = [
            torch.full((), float("nan"), dtype=key.dtype, device=device).expand(p.shape)
            for p in self.params
            if layout.row.shard_params
        ]
        _move_in(self.params, self._views, fill)
        store.admit(self)
        self.reshard()
        if self.presence is ShardedState.WHOLE:
            comm_hook.round_weights(self.full)

    def unshard(self) -> None:
        """Start gathering the whole weights, unless they are here already."""
        if self.presence is not ShardedState.SHARD:
            return
        self._allocate(self.layout.padded)
        self._work = self.comm_hook.gather(self.full, self.store.shard(self))
        self.presence = ShardedState.ARRIVING

    def wait(self) -> None:
        """Wait until the whole weights that are being gathered have arrived, or raise an error."""
        if self.presence is not ShardedState.ARRIVING:
            return
        try:
            self._work.wait()
        except RuntimeError as error:
            layer = self.layout.specs[0].name
            raise CommunicationError(f"the layer of `{layer}` could not be gathered: {error}") from error
        self._work = DONE
        if self.layout.row.shard_params:
            for param, view in zip(self.params, self._views, strict=True):
                param.data = view
        self.presence = ShardedState.WHOLE

    def reshard(self) -> None:
        """Keep only the shard, if the stage's row shards parameters."""
        if not self.layout.row.shard_params or self.presence is ShardedState.SHARD:
            return
        self.wait()
        for param, nothing in zip(self.params, self._placeholders, strict=True):
            param.data = nothing
        self._allocate(0)
        self.presence = ShardedState.SHARD

    def publish(self, weights: Tensor | None) -> Work:
        """Adopt new weights; where replicas update shards, start to gather them.

        Args:
            weights: the tensor from the store's `open_weights`, with the new weights in it.

        Returns:
            The gather, unless it is waited for where the weights are used.
        """
        if weights is not None:
            self.store.close_weights(self, weights)
        self._gather_again()
        return DONE if self.late else self

    def show_masters(self, master: Tensor) -> None:
        """Gather the whole weights exactly as the masters are, even if the hook rounds.

        Args:
            master: the master weights over the layout's `state_range`.
        """
        assert self.presence is ShardedState.WHOLE
        weights = self.store.open_weights(self)
        if weights is not None:
            self.store.close_weights(self, weights.copy_(master))
        self.comm_hook.group.all_gather(self.full, self.store.shard(self)).wait()

    def frozen(self) -> tuple[int, ...]:
        """Numbers of the parameters that currently require no gradient, which updates leave as they are."""
        return tuple(number for number, param in enumerate(self.params) if not param.requires_grad)

    def weights_in_use(self) -> Tensor:
        """The weights that forward reads, over `state_range`; they must not be offloaded."""
        self.wait()
        return self.store.shard(self) if self.layout.row.shard_params else self.full[self.layout.state_range]

    def show_in_use(self) -> None:
        """Gather the weights again, because `weights_in_use` has been written to."""
        self._gather_again()
        self.wait()

    def adopt_full(self) -> None:
        """Copy the changes to the whole weights into the shard and the master."""
        assert self.presence is ShardedState.WHOLE
        self.store.adopt(self)
        self.comm_hook.round_weights(self.full)
        self.comm_hook.weights_changed()

    def _gather_again(self) -> None:
        """Start to gather weights of which this rank's slice has changed, if they are whole between uses."""
        self.comm_hook.weights_changed()
        if self.layout.row.shard_state and self.presence is ShardedState.WHOLE:
            self._work = self.comm_hook.gather(self.full, self.store.shard(self))
            self.presence = ShardedState.ARRIVING

    def _allocate(self, numel: int) -> None:
        """Give the whole buffer room for `numel` elements; meta tensors have no memory."""
        if not self.full.is_meta:
            self.storage.resize_(numel * self.full.element_size())


def whole_state(bucket: Bucket, flat: Tensor) -> Tensor:
    """A whole flat tensor [padded] from each replica's `state_range`; all replicas call this."""
    if not bucket.layout.row.shard_state:
        return flat
    mine = on_device(flat, bucket.full.device).contiguous()
    whole = mine.new_empty(bucket.layout.padded)
    bucket.comm_hook.group.all_gather(whole, mine).wait()
    return whole


@torch.no_grad()
def _move_in(params: Sequence[nn.Parameter], views: Sequence[Tensor], fill: Fill | None) -> None:
    """Make each parameter a view of the bucket, with its own values or those that `fill` writes."""
    unmade = []
    for param, view in zip(params, views, strict=True):
        if param.is_meta and not view.is_meta:
            unmade.append(param)
            # Empty at first: a parameter made from the view would share its version counter, so autograd
            # would take every gather for a change to a tensor that it has saved.
            real = nn.Parameter(view.new_empty(0), requires_grad=param.requires_grad)
            real.__dict__.update(param.__dict__)
            torch.utils.swap_tensors(param, real)
        else:
            view.copy_(param.data)
        param.data = view
    if not unmade:
        return
    if fill is None:
        raise ConfigError(
            f"`fill` must be given for the {len(unmade)} parameters on the meta device, such as "
            f"{spec_of(unmade[0]).name}, but is None; pass a function that writes initial values"
        )
    fill(unmade)
