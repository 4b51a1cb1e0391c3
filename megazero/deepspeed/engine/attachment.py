"""`Attachment`: what an engine has put on a model, to take off again before another engine is built on it."""

from __future__ import annotations

import torch
from torch import nn

from megazero.deepspeed.engine.script_backward import ScriptBackward
from megazero.deepspeed.moe.experts import expert_layers
from megazero.deepspeed.zero.gathered import EXTERNAL
from megazero.deepspeed.zero.parallel import UserParallel
from megazero.deepspeed.zero.partition import Partition, SliceStorage
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


class Attachment:
    """An engine's hooks and buckets on a model.

    Make it before the model is moved into buckets: it records the hooks and specs that `detach` must leave.

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
            (param, param.requires_grad, param.__dict__.get("spec"), set(_grad_hooks(param)))
            for param in model.parameters()
        ]
        self._parallel: UserParallel | None = None
        self._context: ParallelContext | None = None
        self._script: ScriptBackward | None = None

    def freeze(self) -> None:
        """Turn `requires_grad` off for all parameters, until `thaw`."""
        for param, *_ in self._params:
            param.requires_grad_(False)

    def thaw(self) -> None:
        """Restore each parameter's `requires_grad`."""
        for param, trained, *_ in self._params:
            param.requires_grad_(trained)

    def begin(self, parallel: UserParallel, context: ParallelContext) -> None:
        """Record the data parallelism that holds the model's parameters from now on, and its ranks."""
        self._parallel, self._context = parallel, context
        parallel.__dict__["attachment"] = self

    def watch(self, script: ScriptBackward) -> None:
        """Record the watch over the script's backwards, which `detach` ends."""
        self._script = script

    @torch.no_grad()
    def detach(self, *, whole: bool) -> None:
        """Take the engine off the model, which it can no longer train; every rank calls this.

        Args:
            whole: leave sharded weights whole on each rank; otherwise they stay sharded, as in `zero.Init`.
                A model with experts is always left whole.
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
            bucket.presence = ShardedState.WHOLE  # so that hooks of older autograd graphs gather nothing
        for hooks, before in self._hooks:
            for key in [key for key in hooks if key not in before]:
                del hooks[key]
        for module in self._model.modules():
            module._parameters = dict(module._parameters)
            module.__dict__.pop(EXTERNAL, None)
        sharded = {id(p) for b in parallel.store.buckets if b.layout.row.shard_params for p in b.params}
        for param, trained, spec, before in self._params:
            grad_hooks = _grad_hooks(param)
            for key in [key for key in grad_hooks if key not in before]:
                del grad_hooks[key]
            param.grad = None
            param.requires_grad_(trained)
            param.__dict__.pop("shard_holder", None)
            param.__dict__.pop("spec", None)
            if spec is not None:
                param.__dict__["spec"] = spec
            if id(param) in sharded and not whole:
                Partition(param, SliceStorage(context.replica, context.device, context.device))


def _grad_hooks(param: nn.Parameter) -> dict[int, object]:
    return param._post_accumulate_grad_hooks or {}


def detach_engines(model: nn.Module) -> None:
    """Detach every earlier engine from the parameters of a model; every rank calls this.

    Raises:
        ConfigError: the model has experts, which an engine distributes over the ranks for good.
    """
    attachments: dict[int, Attachment] = {}
    for param in model.parameters():
        holder = param.__dict__.get("shard_holder")
        attachment = getattr(getattr(holder, "parallel", holder), "attachment", None)
        if attachment is not None:
            attachments[id(attachment)] = attachment
    if attachments and expert_layers(model):
        raise ConfigError(
            "`model` must not have had an engine before if it has layers of experts, which that one spread "
            "over the ranks, but has; build the model anew"
        )
    for attachment in attachments.values():
        attachment.detach(whole=True)
