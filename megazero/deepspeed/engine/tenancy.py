"""An engine's stay on a model: its hooks and buckets are taken off before another engine moves in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from megazero.deepspeed.engine.script_backward import ScriptBackward
from megazero.deepspeed.moe.experts import expert_layers
from megazero.deepspeed.zero.gathered import EXTERNAL
from megazero.deepspeed.zero.parallel import UserParallel
from megazero.deepspeed.zero.partition import Partition, Shelf
from megazero.errors import ConfigError
from megazero.mpu.context import ParallelContext
from megazero.zero.bucket import ShardedState

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


class Tenancy:
    """An engine's stay on a model. Made before the model is moved into buckets, to know what came with it.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._hooks = [
            (hooks, set(hooks))
            for module in model.modules()
            for hooks in (getattr(module, n) for n in _HOOKS)
        ]
        self._params = [
            (param, param.requires_grad, param.__dict__.get("spec"), set(_hooks_of(param)))
            for param in model.parameters()
        ]
        self._parallel: UserParallel | None = None
        self._context: ParallelContext | None = None
        self._script: ScriptBackward | None = None

    def freeze(self) -> None:
        """Let the model be moved into buckets that nothing trains, until `thaw`."""
        for param, *_ in self._params:
            param.requires_grad_(False)

    def thaw(self) -> None:
        """Let each parameter require gradients as it did before."""
        for param, trained, *_ in self._params:
            param.requires_grad_(trained)

    def begin(self, parallel: UserParallel, context: ParallelContext) -> None:
        """Note what holds the model now, and on which ranks."""
        self._parallel, self._context = parallel, context
        parallel.__dict__["tenancy"] = self

    def serve(self, script: ScriptBackward) -> None:
        """Note whose backwards end with the stay."""
        self._script = script

    @torch.no_grad()
    def end(self, *, whole: bool) -> None:
        """Take everything off the model; every rank calls this. The engine can no longer train.

        Args:
            whole: leave sharded weights whole on each rank; otherwise they stay sharded, as in `zero.Init`,
                if the model has no experts.
        """
        parallel, context, self._parallel = self._parallel, self._context, None
        if parallel is None or context is None:
            return
        whole = whole or bool(expert_layers(self._model))
        parallel.start()
        if self._script is not None:
            self._script.gone = True
        for bucket in parallel.store.buckets:
            if not bucket.layout.row.shard_params:
                continue
            with parallel.gathered(bucket.params):
                values = [param.detach().clone() for param in bucket.params]
            for param, value in zip(bucket.params, values, strict=True):
                param.data = value
            bucket.presence = ShardedState.WHOLE  # so that hooks of graphs from before gather nothing
        for hooks, before in self._hooks:
            for key in [key for key in hooks if key not in before]:
                del hooks[key]
        for module in self._model.modules():
            module._parameters = dict(module._parameters)
            module.__dict__.pop(EXTERNAL, None)
        sharded = {id(p) for b in parallel.store.buckets if b.layout.row.shard_params for p in b.params}
        for param, trained, spec, before in self._params:
            for key in [key for key in _hooks_of(param) if key not in before]:
                del _hooks_of(param)[key]
            param.grad = None
            param.requires_grad_(trained)
            param.__dict__.pop("zero_home", None)
            param.__dict__.pop("spec", None)
            if spec is not None:
                param.__dict__["spec"] = spec
            if id(param) in sharded and not whole:
                Partition(param, Shelf(context.replica, context.device, context.device))


def _hooks_of(param: nn.Parameter) -> Any:
    return param._post_accumulate_grad_hooks or {}


def end_tenancies(model: nn.Module) -> None:
    """Let every earlier engine go from the parameters of a model; every rank calls this.

    Raises:
        ConfigError: the model has experts, which an engine gives to the ranks for good.
    """
    tenancies = list(_tenancies(model.parameters()))
    if tenancies and expert_layers(model):
        raise ConfigError(
            "`model` must not have had an engine before if it has layers of experts, which that one spread "
            "over the ranks, but has; build the model anew"
        )
    for tenancy in tenancies:
        tenancy.end(whole=True)


def _tenancies(params: Iterable[nn.Parameter]) -> Iterable[Tenancy]:
    tenancies: dict[int, Tenancy] = {}
    for param in params:
        home: Any = getattr(param, "zero_home", None)
        tenancy = getattr(getattr(home, "parallel", home), "tenancy", None)
        if tenancy is not None:
            tenancies[id(tenancy)] = tenancy
    return tenancies.values()
