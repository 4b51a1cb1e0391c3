"""`UserParallel`: data parallelism and ZeRO for a user's module, which knows nothing of them."""

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
from megazero.deepspeed.zero.parameter import ShardHolder, ZeroParamStatus, mark
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


class UserParallel(DataParallel, ShardHolder):
    """`DataParallel` of a module whose forward may read parameters of other modules.

    If weights are sharded, each access to a module's parameter is detected. An access outside of the forward
    of the parameter's unit gathers it at once, and from then on at the start of each backward too: these are
    DeepSpeed's "external parameters".

    Attributes:
        unannounced: called at a gradient that no `begin_backward` preceded; it must call `begin_backward`.
        factor: multiplies each gradient when it is collected.
        in_backward: whether a backward is in progress.
        arrived: the parameters that have got a gradient since it was last cleared, by ``id``.
        optimizer: the optimizer over the gradients, which knows their scale.
        has_gradients: whether there has been a backward since the last step.
        module: the model.
        stage: the ZeRO stage.
        offloaded: the state that `offload_states` has moved; None if there is none.
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
        self.offloaded: Any = None
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
        self.unannounced: Callable[[], None] | None = None
        self.factor = 1.0
        self.arrived: dict[int, nn.Parameter] = {}
        self.in_backward = False
        self._external: dict[int, nn.Parameter] = {}
        experts = ExpertShards(self, context.groups["expert_replica"])
        for param in model.parameters():
            holder = experts if spec_of(param).expert else self
            param.__dict__["shard_holder"] = holder
            if policy.stage == 3 and id(param) in self._place:
                mark(param, holder.group, persist=param.numel() < policy.gathers.persistence_threshold)
        leaves = get_z3_leaf_modules(model)
        # A reduction during backward starts when its gradients are there. If ranks have chosen different
        # submodules, its place among the gathers would differ between them.
        self._routes = bool(self._gatherer.buckets) and any(map(chooses, leaves))
        self._reduces_at_end = False
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
            self.order.check()  # ranks whose backwards gather different layers would wait for each other
        self._reduces_at_end = reduce and self._routes
        super().begin_backward(chunk, reduce=reduce and not self._routes, ends=ends)
        self.in_backward, self._settled, self.has_gradients = True, False, True
        self.need(self._external.values())

    def approach(self) -> None:
        """Gather external parameters for a backward that a script has started."""
        self.need(self._external.values())

    def end_backward(self) -> None:
        super().end_backward()
        self.in_backward = False
        if self._reduces_at_end:
            self.reduce(0)

    def settle(self) -> None:
        """Wait until the gradient sums so far are complete; every rank calls this."""
        if not self._settled:
            self._reducer.finish()
            self._settled = True

    def finish(self) -> None:
        """See `DataParallel.finish`.

        Raises:
            CommunicationError: on all ranks, if they have run different layers since the last step.
        """
        self.settle()  # unlike `super().finish()` not twice, because a script may have changed the sums since
        self.has_gradients = False
        self._gatherer.finish()
        if self._gatherer.buckets:
            self.order.check()

    def free(self) -> None:
        """Free all gathered weights."""
        self._gatherer.finish()

    def place(self, param: nn.Parameter) -> tuple[Bucket, int]:
        """The bucket of a parameter, and its number in the bucket."""
        return self._place[id(param)]

    def status(self, param: nn.Parameter) -> ZeroParamStatus:
        return _STATUS[self.place(param)[0].presence]

    def piece(self, param: nn.Parameter) -> torch.Tensor:
        bucket, number = self.place(param)
        if not bucket.layout.row.shard_params:
            return param.data.reshape(-1)
        return self.store.shard(bucket)[bucket.layout.overlap(*bucket.layout.spans[number])]

    def interrupted(self) -> None:
        """End a backward that has failed; `start` will drop its gradients."""
        self.in_backward = False

    def collect(self, param: nn.Parameter, product: Product | None = None) -> None:
        """Take `param.grad`."""
        assert product is None, "a user's layers defer no weight gradients"
        if not self.in_backward and self.unannounced is not None:
            self.unannounced()
        if self.factor != 1.0 and param.grad is not None:
            with torch.no_grad():
                param.grad.mul_(self.factor)
        super().collect(param)
        self.arrived[id(param)] = param

    def _watch(self, model: nn.Module, units: Sequence[Unit]) -> None:
        def enter(module: nn.Module, args: object) -> None:
            self._forwards += 1

        def leave(module: nn.Module, args: object, output: object) -> None:
            self._forwards = max(0, self._forwards - 1)  # `enter` did not run if an earlier hook failed
            if not torch.is_grad_enabled() and not self._forwards:
                self.release(0)
                if output is not None:  # it is None after an error
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

        def enter(module: nn.Module, args: object) -> None:
            self._running.update(keys)

        def leave(module: nn.Module, args: object, output: object) -> None:
            self._running.subtract(key for key in keys if self._running[key] > 0)

        unit.module.register_forward_pre_hook(enter)
        unit.module.register_forward_hook(leave, always_call=True)

    def _read(self, param: nn.Parameter) -> None:
        """Gather a parameter that is accessed outside of the forward of its unit."""
        if self._running[id(param)] == 0 and (self._forwards or self.in_backward):
            if torch.is_grad_enabled():  # otherwise no backward follows
                self._external[id(param)] = param
            self.need([param])


@dataclass(frozen=True)
class ExpertShards(ShardHolder):
    """The `ShardHolder` of experts' parameters, which are sharded over another group than dense ones."""

    parallel: UserParallel
    group: Group

    def gathered(self, params: Iterable[nn.Parameter], *, write_back: bool) -> AbstractContextManager[None]:
        return self.parallel.gathered(params, write_back=write_back)

    def status(self, param: nn.Parameter) -> ZeroParamStatus:
        return self.parallel.status(param)

    def piece(self, param: nn.Parameter) -> torch.Tensor:
        return self.parallel.piece(param)


class WatchedParameters(dict[str, nn.Parameter | None]):
    """A module's parameters by name; detects each access to a parameter.

    Args:
        params: the module's own dict.
        read: called with each parameter that is accessed.
    """

    def __init__(self, params: Mapping[str, nn.Parameter | None], read: Callable[[nn.Parameter], None]):
        super().__init__(params)
        self._read = read

    def __getitem__(self, name: str) -> nn.Parameter | None:
        param = super().__getitem__(name)
        if param is not None:
            self._read(param)
        return param
