"""`GatheredParameters`: sharded parameters made whole for a while, and parameters read by other modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megazero.deepspeed.zero.parameter import Home, ZeroParamStatus
from megazero.errors import ConfigError, MegazeroError
from megazero.mpu.group import Group
from megazero.mpu.host import read_values
from megazero.zero.fingerprint import Fingerprints


class GatheredParameters:
    """Context in which sharded parameters are whole and can be read. Every rank enters it.

    A context within another one over the same parameter does nothing to it if it only reads or has the same
    `modifier_rank`.

    Args:
        params: one parameter or several; tensors that are not sharded, and None, are left alone.
        modifier_rank: the rank whose changes every rank takes over at the end: a rank of the world, or else
            a number among the ranks that hold the same parameters. None means that the parameters are only
            read. With a rank, there is no autograd in the context.
        fwd_module: a module whose forward is going to read them, see `register_external_parameter`.
        enabled: if False, nothing happens.

    Raises:
        ConfigError: `params` is something else, such as a module or a generator that has been used up, or
            `modifier_rank` does not hold the same parameters.
        MegazeroError: on leaving, on all ranks: a parameter has been changed without a `modifier_rank`.
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
        by_home: dict[int, tuple[Home, list[nn.Parameter]]] = {}
        for param in dict.fromkeys(self.params):
            home = getattr(param, "zero_home", None)
            if home is not None and not self._is_open(param):
                by_home.setdefault(id(home), (home, []))[1].append(param)
        modified, grad = self.modifier_rank is not None, torch.is_grad_enabled()
        read: dict[int, tuple[Group, list[nn.Parameter]]] = {}
        with ExitStack() as stack:
            for home, params in by_home.values():
                absent = [p for p in params if home.status(p) is not ZeroParamStatus.AVAILABLE]
                read.setdefault(id(home.group), (home.group, []))[1].extend(absent)
                stack.enter_context(home.gathered(params, write_back=modified))
                stack.enter_context(self._marked(params))
                if modified:
                    stack.push(partial(_spread, params, home.group, self._source(home.group)))
            if not modified:
                # A forward may read them within the context, see `fwd_module`.
                stack.enter_context(torch.set_grad_enabled(grad))
                for group, params in read.values():
                    stack.enter_context(_unchanged(group, params))
            self._stack = stack.pop_all()

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)

    def _is_open(self, param: nn.Parameter) -> bool:
        """Whether a context around this one does all that this one would."""
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
        assert rank is not None, "somebody modifies"
        if rank in group.ranks:
            return group.ranks.index(rank)
        if 0 <= rank < group.size:  # as in DeepSpeed, if the group is not the world
            return rank
        raise ConfigError(
            f"`modifier_rank` must be one of the ranks that hold the same parameters "
            f"({list(group.ranks)}), but is {rank}"
        )


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Context in which all weights of an engine or a module are whole, so that generation gathers nothing."""
    with GatheredParameters(list(model.parameters())):
        yield model


def _tensors(params: Any) -> list[nn.Parameter]:
    """The parameters among what `GatheredParameters` was given."""
    if isinstance(params, Tensor):
        return [params]  # type: ignore[list-item]  # buffers are left alone
    used_up = inspect.isgenerator(params) and inspect.getgeneratorstate(params) == inspect.GEN_CLOSED
    if isinstance(params, (nn.Module, str, Mapping)) or not isinstance(params, Iterable) or used_up:
        given = "a generator that has been used up" if used_up else f"a {type(params).__name__}"
        raise ConfigError(
            f"`params` must be a parameter or several, but is {given}; pass `list(module.parameters())`"
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
    """Context in which nobody may change these whole parameters; each rank looks after a part of them."""
    if not params:
        yield
        return
    prints = Fingerprints(params[0].device)

    def state() -> Tensor:
        prints_now = []
        for param in params:
            size = -(-param.numel() // group.size)
            mine = param.data.reshape(-1)[group.rank * size : (group.rank + 1) * size]
            prints_now.append(prints.of(mine.to(params[0].device)))
        return torch.stack(prints_now)

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


def _spread(params: list[nn.Parameter], group: Group, source: int, kind: object, *error: object) -> None:
    """At the end of a block that did not fail, bring one rank's changes to all ranks."""
    for param in params if kind is None else ():
        value = param.data.contiguous()
        group.broadcast(value, source).wait()
        param.data.copy_(value)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Declare that the forward of `module` reads a parameter of another module.

    An engine also detects such reads by itself; it then keeps the parameter whole from the read on, and from
    the start of backward on. A parameter registered before `initialize` is gathered together with `module`'s
    own parameters. Registering it later has no effect.

    Raises:
        ConfigError: `parameter` is not a parameter.
    """
    _check_parameter(parameter)
    if all(parameter is not other for other in external_parameters(module)):
        module.__dict__["external_parameters"] = (*external_parameters(module), parameter)
    parameter.__dict__["is_external_param"] = True


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Take back `register_external_parameter`; after `initialize` this has no effect.

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


def _check_parameter(parameter: Any) -> None:
    if not isinstance(parameter, nn.Parameter):
        raise ConfigError(
            f"`parameter` must be a torch.nn.Parameter, but is a {type(parameter).__name__}; "
            "register the parameters that the module's forward reads"
        )


def external_parameters(module: nn.Module) -> tuple[nn.Parameter, ...]:
    """The parameters that `register_external_parameter` recorded for the module."""
    recorded: tuple[nn.Parameter, ...] = module.__dict__.get("external_parameters", ())
    return recorded


EXTERNAL = "ds_external_parameters"
"""The method of a stage-3 module that lists what `register_external_parameter` recorded for it."""


class DeepSpeedZeRoOffload:
    """A stage-3 model without an optimizer, or the part of an optimizer that gathers its weights.

    Our hooks are not among `forward_hooks` and `backward_hooks`: where weights are whole, as within
    `GatheredParameters`, they have nothing to do, so that they may stay while a library removes those.

    Attributes:
        module: the model.
        forward_hooks, backward_hooks: empty; a library may replace them.

    Args:
        module: the model.
        free: frees what is gathered.
    """

    def __init__(self, module: nn.Module, free: Callable[[], None]):
        self.module, self._free = module, free
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        module.__dict__[EXTERNAL] = partial(_external, module)

    def _register_deepspeed_module(self, module: nn.Module, count: Any = None) -> None:
        """Do nothing: the hooks are there."""

    def partition_all_parameters(self) -> None:
        """Free the weights that have been gathered and kept for their next use."""
        self._free()

    empty_partition_cache = partition_all_parameters


def _external(module: nn.Module) -> Iterator[tuple[int, nn.Parameter]]:
    return enumerate(external_parameters(module))
