"""`GatheredParameters`, in which sharded parameters are whole, and external parameters of modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import TracebackType

import torch
from torch import Tensor, nn

from megazero.deepspeed.zero.parameter import ShardHolder, ZeroParamStatus
from megazero.errors import ConfigError, MegazeroError
from megazero.mpu.group import Group
from megazero.mpu.host import read_values
from megazero.zero.fingerprint import Fingerprints


class GatheredParameters:
    """Context in which sharded parameters are whole; every rank enters it.

    If a context around it has gathered a parameter already, this one leaves the parameter alone; it must then
    only read or have the same `modifier_rank`.

    Args:
        params: one or several parameters; tensors that are not sharded, and None, are ignored.
        modifier_rank: the rank whose changes are broadcast at the end: a rank of the world, or else a rank
            within the group that holds the same parameters. None allows no changes. With a rank, autograd is
            off in the context.
        fwd_module: a module whose forward reads the parameters, see `register_external_parameter`.
        enabled: False makes the context do nothing.

    Raises:
        ConfigError: `params` are no parameters, such as a module or an exhausted generator, or
            `modifier_rank` does not hold the parameters.
        MegazeroError: at the end, on all ranks, if a parameter was changed without a `modifier_rank`.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter | None],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ):
        self.params = _tensors(params) if enabled else []
        self.modifier_rank = modifier_rank
        if enabled and (isinstance(modifier_rank, bool) or not isinstance(modifier_rank, int | None)):
            raise ConfigError(
                f"`modifier_rank` must be a rank or None, but is {modifier_rank!r}; 0 takes over what the "
                "first rank writes"
            )
        self._stack = ExitStack()
        if fwd_module is not None:
            for param in self.params:
                register_external_parameter(fwd_module, param)

    def __enter__(self) -> None:
        by_holder: dict[int, tuple[ShardHolder, list[nn.Parameter]]] = {}
        for param in dict.fromkeys(self.params):
            holder = getattr(param, "shard_holder", None)
            if holder is not None and not self._is_gathered(param):
                by_holder.setdefault(id(holder), (holder, []))[1].append(param)
        modified, grad = self.modifier_rank is not None, torch.is_grad_enabled()
        read_only: dict[int, tuple[Group, list[nn.Parameter]]] = {}
        with ExitStack() as stack:
            for holder, params in by_holder.values():
                absent = [p for p in params if holder.status(p) is not ZeroParamStatus.AVAILABLE]
                read_only.setdefault(id(holder.group), (holder.group, []))[1].extend(absent)
                stack.enter_context(holder.gathered(params, write_back=modified))
                stack.enter_context(self._marked(params))
                if modified:
                    stack.push(partial(_broadcast, params, holder.group, self._source(holder.group)))
            if not modified:
                # A forward may run within the context, see `fwd_module`.
                stack.enter_context(torch.set_grad_enabled(grad))
                for group, params in read_only.values():
                    stack.enter_context(_unchanged(group, params))
            self._stack = stack.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._stack.__exit__(kind, error, trace)

    def _is_gathered(self, param: nn.Parameter) -> bool:
        """Whether a context around this one has gathered the parameter."""
        outer = param.__dict__.get("zero_open")
        if outer is None:
            return False
        modifier = getattr(outer, "modifier_rank", None)
        if self.modifier_rank not in (None, modifier):
            raise MegazeroError(
                f"`modifier_rank` must be that of the context around this one ({modifier}) where both gather "
                f"a parameter of shape {list(param.shape)}, but is {self.modifier_rank}; leave the outer one "
                "first, or give both the same rank"
            )
        return True

    @contextmanager
    def _marked(self, params: Sequence[nn.Parameter]) -> Iterator[None]:
        for param in params:
            param.__dict__["zero_open"] = self
        try:
            yield
        finally:
            for param in params:
                del param.__dict__["zero_open"]

    def _source(self, group: Group) -> int:
        rank = self.modifier_rank
        assert rank is not None, "only a context with a modifier has a source"
        if rank in group.ranks:
            return group.ranks.index(rank)
        if 0 <= rank < group.size:  # as in DeepSpeed, if the group is not the world
            return rank
        raise ConfigError(
            f"`modifier_rank` must be one of the ranks that hold the same parameters "
            f"({list(group.ranks)}), but is {rank}"
        )


@contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """Context in which all weights of an engine or a module are whole, so that generation gathers nothing."""
    with GatheredParameters(list(model.parameters())):
        yield model


def _tensors(params: object) -> list[nn.Parameter]:
    """Check the argument of `GatheredParameters`; returns the tensors in it."""
    if isinstance(params, Tensor):
        return [params]  # type: ignore[list-item]  # buffers are ignored later
    exhausted = inspect.isgenerator(params) and inspect.getgeneratorstate(params) == inspect.GEN_CLOSED
    if isinstance(params, (nn.Module, str, Mapping)) or not isinstance(params, Iterable) or exhausted:
        kind = "a generator that has been used up" if exhausted else f"a {type(params).__name__}"
        raise ConfigError(
            f"`params` must be a parameter or several, but is {kind}; pass `list(module.parameters())`"
        )
    items = list(params)
    for item in items:
        if not isinstance(item, Tensor | None):
            raise ConfigError(
                f"`params` must hold parameters, but holds a {type(item).__name__}; pass "
                "`list(module.parameters())`"
            )
    return [item for item in items if item is not None]


@contextmanager
def _unchanged(group: Group, params: Sequence[nn.Parameter]) -> Iterator[None]:
    """Context that raises if parameters were changed in it; each rank fingerprints its slice of them."""
    if not params:
        yield
        return
    prints = Fingerprints(params[0].device)

    def state() -> Tensor:
        current = []
        for param in params:
            size = -(-param.numel() // group.size)
            own = param.data.reshape(-1)[group.rank * size : (group.rank + 1) * size]
            current.append(prints.of(own.to(params[0].device)))
        return torch.stack(current)

    with torch.no_grad():
        before = state()
    yield
    with torch.no_grad():
        changed = (state() != before).any().reshape(1).long()
        group.all_reduce(changed, "max").wait()
        if (read_values(changed) or [0.0])[0]:
            raise MegazeroError(
                "`modifier_rank` must be given where a sharded parameter is changed, but is None, so the "
                "changes are lost; pass modifier_rank=0 to keep those of the first rank"
            )


def _broadcast(params: list[nn.Parameter], group: Group, source: int, kind: object, *error: object) -> None:
    """Broadcast one rank's values at the end of a context; not after an error of type `kind`."""
    for param in params if kind is None else ():
        value = param.data.contiguous()
        group.broadcast(value, source).wait()
        param.data.copy_(value)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Declare that the forward of `module` reads a parameter of another module.

    Before `initialize`, it makes the engine gather the parameter with `module`'s own; later it has no effect.
    An engine also detects such reads itself: it gathers the parameter at the read, and in later steps at the
    start of backward too.

    Raises:
        ConfigError: `parameter` is not a parameter.
    """
    _check_parameter(parameter)
    if all(parameter is not other for other in external_parameters(module)):
        module.__dict__["external_parameters"] = (*external_parameters(module), parameter)
    parameter.__dict__["is_external_param"] = True


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo `register_external_parameter`; after `initialize` this has no effect.

    Raises:
        ConfigError: `parameter` is not a parameter, or was not registered.
    """
    _check_parameter(parameter)
    left = tuple(other for other in external_parameters(module) if other is not parameter)
    if len(left) == len(external_parameters(module)):
        raise ConfigError(
            f"`parameter` must have been registered with this {type(module).__name__}, but was not; call "
            "`register_external_parameter` first"
        )
    module.__dict__["external_parameters"] = left


def _check_parameter(parameter: object) -> None:
    if not isinstance(parameter, nn.Parameter):
        raise ConfigError(
            f"`parameter` must be a torch.nn.Parameter, but is a {type(parameter).__name__}; "
            "register the parameters that the module's forward reads"
        )


def external_parameters(module: nn.Module) -> tuple[nn.Parameter, ...]:
    """The parameters that `register_external_parameter` has recorded for a module."""
    recorded: tuple[nn.Parameter, ...] = module.__dict__.get("external_parameters", ())
    return recorded


EXTERNAL = "ds_external_parameters"
"""The method of a stage-3 module that lists its external parameters."""


class DeepSpeedZeRoOffload:
    """DeepSpeed's object with the hooks of stage 3, which libraries remove to generate, and put back.

    Our hooks need not be removed: they do nothing while weights are whole, as within `GatheredParameters`. So
    the lists of hooks are empty.

    Attributes:
        module: the model.
        forward_hooks, backward_hooks: empty; a library may replace them.

    Args:
        module: the model.
        free: frees gathered weights.
    """

    def __init__(self, module: nn.Module, free: Callable[[], None]):
        self.module, self._free = module, free
        self.forward_hooks: list[object] = []
        self.backward_hooks: list[object] = []
        module.__dict__[EXTERNAL] = partial(_external, module)

    def _register_deepspeed_module(self, module: nn.Module, count: object = None) -> None:
        """Do nothing: the hooks have not been removed."""

    def partition_all_parameters(self) -> None:
        """Free the weights that stage 3 keeps gathered for their next use."""
        self._free()

    empty_partition_cache = partition_all_parameters


def _external(module: nn.Module) -> Iterator[tuple[int, nn.Parameter]]:
    return enumerate(external_parameters(module))
