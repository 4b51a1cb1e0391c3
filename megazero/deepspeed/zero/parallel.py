"""ZeRO around a module that knows nothing of it: its parameters, and reads out of order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from megazero.deepspeed.zero.leaf_modules import chooses, get_z3_leaf_modules
from megazero.deepspeed.zero.order import GatherOrder
from megazero.deepspeed.zero.parameter import Home, ZeroParamStatus, mark
from megazero.mpu.context import ParallelContext
from megazero.mpu.group import Group
from megazero.mpu.param_spec import spec_of
from megazero.ops.product_sum import Product
from megazero.zero.bucket import Bucket, ShardedState
from megazero.zero.parallel import DataParallel
from megazero.zero.policy import ZeroPolicy
from megazero.zero.store.store import Store
from megazero.zero.unit import Unit

_STATUS: Mapping[ShardedState, ZeroParamStatus] = MappingProxyType(
    {
        ShardedState.SHARD: ZeroParamStatus.NOT_AVAILABLE,
        ShardedState.ARRIVING: ZeroParamStatus.INFLIGHT,
        ShardedState.WHOLE: ZeroParamStatus.AVAILABLE,
    }
)


class UserParallel(DataParallel, Home):
    """`DataParallel` of a module whose forward may read parameters of other modules.

    If weights are sharded, each read of a module's parameter is noticed. A read outside of the forward of the
    parameter's unit gathers it then and there, and from then on at the start of each backward (DeepSpeed's
    "external parameters").

    Attributes:
        uninvited: called when a gradient arrives that no `begin_backward` announced, to call it.
        factor: each gradient that arrives is multiplied by it.
        in_backward: whether a backward has begun and has not ended.
        arrived: the parameters with a gradient since `arrived` was last emptied, by ``id``.
        optimizer: the optimizer over the gradients, which knows how they are scaled.
        has_gradients: whether there has been a backward since the last step.
        module: the model.
        stage: the stage of ZeRO.
        away: what `offload_states` has moved; None if nothing is.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        store: Store,
        policy: ZeroPolicy,
        context: ParallelContext,
    ):
        super().__init__(units, store, policy, context)
        self.context, self.group, self.module = context, context.replica, model
        self.stage = policy.stage
        self.away: Any = None
        self._place = {
            id(param): (bucket, number)
            for bucket in store.buckets
            for number, param in enumerate(bucket.params)
        }
        self.order = GatherOrder({bucket: n for n, bucket in enumerate(store.buckets)}, context)
        self._settled = True
        self.has_gradients = False
        self.optimizer: Any = None
        self._running: Counter[int] = Counter()
        self._forwards = 0
        self.uninvited: Callable[[], None] | None = None
        self.factor = 1.0
        self.arrived: dict[int, nn.Parameter] = {}
        self.in_backward = False
        self._external: dict[int, nn.Parameter] = {}
        experts = ExpertHome(self, context.groups["expert_replica"])
        for param in model.parameters():
            home = experts if spec_of(param).expert else self
            param.__dict__["zero_home"] = home
            if policy.stage == 3 and id(param) in self._place:
                mark(param, home.group, persist=param.numel() < policy.gathers.persistence_threshold)
        leaves = get_z3_leaf_modules(model)
        # Reductions during a backward begin when gradients are there, which depends on the parts that a rank
        # has chosen; among gathers, all ranks must make them in the same order.
        self._routes = bool(self._gatherer.buckets) and any(map(chooses, leaves))
        self._late = False
        for leaf in leaves:
            for param in leaf.parameters():
                param.__dict__["ds_z3_leaf_module"] = leaf
        if any(bucket.layout.row.shard_params for bucket in store.buckets):
            self._watch(model, units)

    def start(self, step: int = 0) -> None:
        super().start(step)
        self._settled = False

    def begin_backward(self, chunk: int, *, reduce: bool, ends: bool = True) -> None:
        if self._gatherer.buckets:
            self.order.check()  # in backward, ranks that differ would wait for each other's calls
        self._late = reduce and self._routes
        super().begin_backward(chunk, reduce=reduce and not self._routes, ends=ends)
        self.in_backward, self._settled, self.has_gradients = True, False, True
        self.need(self._external.values())

    def approach(self) -> None:
        """Gather what the very first step of a backward may read, which begins when a gradient arrives."""
        self.need(self._external.values())

    def end_backward(self) -> None:
        super().end_backward()
        self.in_backward = False
        if self._late:
            self.reduce(0)

    def settle(self) -> None:
        """Wait until the sums of the gradients so far are complete; every rank calls this."""
        if not self._settled:
            self._reducer.finish()
            self._settled = True

    def finish(self) -> None:
        """See `DataParallel.finish`.

        Raises:
            CommunicationError: on all ranks: they have run different layers since the last step.
        """
        self.settle()  # once: a script may have written to the sums since
        self.has_gradients = False
        self._gatherer.finish()
        if self._gatherer.buckets:
            self.order.check()

    def free(self) -> None:
        """Free all gathered weights."""
        self._gatherer.finish()

    def place(self, param: nn.Parameter) -> tuple[Bucket, int]:
        """The bucket of a parameter, and its number there."""
        return self._place[id(param)]

    def status(self, param: nn.Parameter) -> ZeroParamStatus:
        return _STATUS[self.place(param)[0].presence]

    def piece(self, param: nn.Parameter) -> torch.Tensor:
        bucket, number = self.place(param)
        if not bucket.layout.row.shard_params:
            return param.data.reshape(-1)
        return self.store.shard(bucket)[bucket.layout.overlap(*bucket.layout.spans[number])]

    def interrupted(self) -> None:
        """Note that the backward has failed: `start` will drop what it has brought."""
        self.in_backward = False

    def collect(self, param: nn.Parameter, product: Product | None = None) -> None:
        """Take `param.grad`."""
        assert product is None, "a user's layers hand no products over"
        if not self.in_backward and self.uninvited is not None:
            self.uninvited()
        if self.factor != 1.0 and param.grad is not None:
            with torch.no_grad():
                param.grad.mul_(self.factor)
        super().collect(param)
        self.arrived[id(param)] = param

    def _watch(self, model: nn.Module, units: Sequence[Unit]) -> None:
        def enter(module: nn.Module, args: Any) -> None:
            self._forwards += 1

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._forwards = max(0, self._forwards - 1)  # `enter` has not run if a hook before it failed
            if not torch.is_grad_enabled() and not self._forwards:
                self.release(0)
                if output is not None:  # None after an error
                    self.order.check()

        self._gatherer.observer = self.order.note
        model.register_forward_pre_hook(enter)
        model.register_forward_hook(leave, always_call=True)
        for unit in units:
            self._count_running(unit)
        for module in model.modules():
            if module._parameters:
                module._parameters = WatchedParameters(module._parameters, self._read)

    def _count_running(self, unit: Unit) -> None:
        keys = [id(param) for param in unit.params]

        def enter(module: nn.Module, args: Any) -> None:
            self._running.update(keys)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._running.subtract(key for key in keys if self._running[key] > 0)

        unit.module.register_forward_pre_hook(enter)
        unit.module.register_forward_hook(leave, always_call=True)

    def _read(self, param: nn.Parameter) -> None:
        """Note that a module's parameter is being looked up."""
        if self._running[id(param)] == 0 and (self._forwards or self.in_backward):
            if torch.is_grad_enabled():  # otherwise no backward will need it
                self._external[id(param)] = param
            self.need([param])


@dataclass(frozen=True)
class ExpertHome(Home):
    """The home of experts' parameters, which have other replicas than dense ones."""

    parallel: UserParallel
    group: Group

    def gathered(self, params: Iterable[nn.Parameter], *, write_back: bool) -> AbstractContextManager[None]:
        """See `DataParallel.gathered`."""
        return self.parallel.gathered(params, write_back=write_back)

    def status(self, param: nn.Parameter) -> ZeroParamStatus:
        return self.parallel.status(param)

    def piece(self, param: nn.Parameter) -> torch.Tensor:
        return self.parallel.piece(param)


class WatchedParameters(dict[str, nn.Parameter | None]):
    """A module's parameters by name; reports each one that is looked up as an attribute.

    Args:
        params: the dict in which torch keeps them.
        read: called with each parameter that is looked up.
    """

    def __init__(self, params: Mapping[str, nn.Parameter | None], read: Callable[[nn.Parameter], None]):
        super().__init__(params)
        self._read = read

    def __getitem__(self, name: str) -> nn.Parameter | None:
        param = super().__getitem__(name)
        if param is not None:
            self._read(param)
        return param
