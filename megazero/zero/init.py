"""`Init`: a model that is cut over the ranks while it is built, so that it is whole on none of them.

The names and their meaning are DeepSpeed's (`deepspeed.zero.Init`, `GatheredParameters`,
`register_external_parameter`), so that a script needs no change; the method is that of Rajbhandari et al.
2021, "ZeRO-Infinity", section 7.2.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from megazero.config.deepspeed import read_deepspeed
from megazero.errors import ConfigError
from megazero.mpu import Group, ParallelContext
from megazero.mpu.adopt import find_context


class Home(Protocol):
    """Who holds the shards of a parameter: a `Partition` while the model is built, an engine later.

    A parameter's attribute `zero_home` is its home; a parameter without one is whole.
    """

    group: Group

    def gathered(self, params: Iterable[nn.Parameter], *, write_back: bool) -> Any:
        """A context manager within which `params` are whole; see `DataParallel.gathered`."""


class Partition:
    """This rank's slice of one parameter.

    Args:
        param: whole; from now on it reads as NaN and takes no memory. The values of the group's first rank
            count.
        context: its `replica` group cuts the parameter, and its device holds the slice.
        dtype: of the slice; None keeps the parameter's.
    """

    def __init__(self, param: nn.Parameter, context: ParallelContext, dtype: torch.dtype | None):
        self.group = context.replica
        self.shape = param.shape
        value = param.data.to(context.device, dtype or param.dtype)
        size = max(1, -(-param.numel() // self.group.size))
        self.shard = value.new_zeros(size)
        self._nothing = torch.full((), float("nan"), dtype=value.dtype, device=value.device)
        value = value.contiguous()
        self.group.broadcast(value, 0).wait()
        self.store(value)
        self._attach(param)

    def whole(self) -> Tensor:
        """The parameter's values from every rank's slice; every rank calls this."""
        flat = self.shard.new_empty(self.shard.numel() * self.group.size)
        self.group.all_gather(flat, self.shard).wait()
        return flat[: self.shape.numel()].view(self.shape)

    def store(self, value: Tensor) -> None:
        """Keep this rank's slice of a value that is the same on every rank."""
        start = self.group.rank * self.shard.numel()
        mine = value.reshape(-1)[start : start + self.shard.numel()]
        self.shard[: mine.numel()].copy_(mine)

    @contextmanager
    def gathered(self, params: Iterable[nn.Parameter], *, write_back: bool) -> Iterator[None]:
        """Within it the parameter is whole; what is then written is kept with `write_back`."""
        (param,) = params
        param.data = self.whole()
        try:
            with torch.no_grad():
                yield
                if write_back:
                    self.store(param.data)
        finally:
            param.data = self._nothing.expand(self.shape)

    def _attach(self, param: nn.Parameter) -> None:
        param.data = self._nothing.expand(self.shape)
        param.zero_home = self
        # Layers are copied while models are built (torch's TransformerEncoder does); the slice goes along.
        param.__deepcopy__ = MethodType(_copy, param)


def _copy(param: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    """A copy of a parameter that is cut, cut like it."""
    home: Partition = param.zero_home
    twin = nn.Parameter(param.data, param.requires_grad)
    memo[id(param)] = twin
    other = object.__new__(Partition)
    other.__dict__.update(home.__dict__, shard=home.shard.clone())
    other._attach(twin)
    return twin


def is_partitioned(param: nn.Parameter) -> bool:
    """Whether `Init` has cut the parameter and no engine has taken it over yet."""
    return isinstance(getattr(param, "zero_home", None), Partition)


class Init:
    """Within it, the parameters of each submodule are cut as soon as the submodule has been built.

    That is when it becomes part of a larger module; what the outermost module owns itself is cut at the end.
    `Module.apply` works within it. Other code that reads or writes a submodule's weights after it was built
    does so within `GatheredParameters`.

    Args:
        module: cut this finished module at once.
        config_dict_or_path: DeepSpeed JSON or its content; says the type of the weights.
        config: another name for it.
        enabled: False does nothing.
        dtype: type of the weights, before what the configuration says.
        mpu: see `find_context`.

    Raises:
        ConfigError: the configuration is refused.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        *,
        config_dict_or_path: str | Path | Mapping[str, Any] | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
    ):
        self.enabled = enabled
        if not enabled:
            return
        self.context = find_context(mpu)
        self.dtype = dtype or _dtype(config if config_dict_or_path is None else config_dict_or_path)
        self._outermost: dict[int, nn.Module] = {}
        self._thread = 0
        self._hook: Any = None
        if module is not None:
            self._cut(module)

    def __enter__(self) -> Init:
        if self.enabled:
            # The hooks are the process's, but ranks may be threads of it: each heeds its own, and none comes
            # or goes while a rank is building.
            self._thread = threading.get_ident()
            self._hook = register_module_module_registration_hook(self._registered)
            self.context.world.barrier()
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if not self.enabled:
            return
        if kind is None:
            self.context.world.barrier()
        self._hook.remove()
        for module in self._outermost.values():
            if kind is None:
                self._cut(module)
            for each in module.modules():
                each.__dict__.pop("apply", None)
        self._outermost = {}
        if kind is None:
            self.context.world.barrier()

    def _registered(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        """A module has become a part of another."""
        if child is None or threading.get_ident() != self._thread:
            return
        self._outermost.pop(id(child), None)
        self._outermost[id(parent)] = parent
        self._cut(child)
        for module in (parent, child):
            if type(module).apply is nn.Module.apply:
                module.__dict__["apply"] = MethodType(_apply, module)

    @torch.no_grad()
    def _cut(self, module: nn.Module) -> None:
        for param in module.parameters():
            if not hasattr(param, "zero_home"):
                Partition(param, self.context, self.dtype if param.is_floating_point() else None)


def _apply(module: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
    """`Module.apply` where weights are cut: each module's own are whole while `fn` has it."""
    for child in module.children():
        child.apply(fn)
    with GatheredParameters(module.parameters(recurse=False), modifier_rank=0):
        fn(module)
    return module


def _dtype(config: str | Path | Mapping[str, Any] | None) -> torch.dtype | None:
    """The type that a DeepSpeed JSON gives the weights; None keeps what they have."""
    if config is None:
        return None
    read = read_deepspeed(config)
    if read.problems:
        raise ConfigError(read.problems)
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(read.values.get("precision.dtype"))


class GatheredParameters:
    """Within it, cut parameters are whole and can be read. Every rank enters. Without autograd.

    Args:
        params: one parameter or several; those that are whole anyway need nothing.
        modifier_rank: the world rank whose changes every rank takes over at the end; None: the parameters
            are only read.
        fwd_module: also a module whose forward is going to read them, see `register_external_parameter`.
        enabled: False does nothing.

    Raises:
        ConfigError: `modifier_rank` holds other parameters.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ):
        self.params = list([params] if isinstance(params, Tensor) else params) if enabled else []
        self.modifier_rank = modifier_rank
        self._stack = ExitStack()
        if fwd_module is not None:
            for param in self.params:
                register_external_parameter(fwd_module, param)

    def __enter__(self) -> None:
        by_home: dict[int, tuple[Home, list[nn.Parameter]]] = {}
        for param in dict.fromkeys(self.params):
            home = getattr(param, "zero_home", None)
            if home is not None:
                by_home.setdefault(id(home), (home, []))[1].append(param)
        modified = self.modifier_rank is not None
        with ExitStack() as stack:
            for home, params in by_home.values():
                stack.enter_context(home.gathered(params, write_back=modified))
                if modified:
                    stack.push(partial(_spread, params, home.group, self._source(home.group)))
            self._stack = stack.pop_all()

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)

    def _source(self, group: Group) -> int:
        if self.modifier_rank not in group.ranks:
            raise ConfigError(
                f"`modifier_rank` must be one of the ranks that hold the same parameters "
                f"({list(group.ranks)}), but is {self.modifier_rank}"
            )
        return group.ranks.index(self.modifier_rank)


def _spread(params: list[nn.Parameter], group: Group, source: int, kind: object, *error: object) -> None:
    """At the end of a block, bring one rank's changes to all; not if the block failed."""
    for param in params if kind is None else ():
        value = param.data.contiguous()
        group.broadcast(value, source).wait()
        param.data.copy_(value)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Say that the forward of `module` reads a parameter of another module.

    An engine also finds such reads by itself, and then keeps the parameter whole from the read, and from the
    start of backward, on. Registered before `initialize`, it is gathered with `module`'s own. Later this
    changes nothing.

    Raises:
        ConfigError: `parameter` is no parameter.
    """
    if not isinstance(parameter, nn.Parameter):
        raise ConfigError(
            f"`parameter` must be a torch.nn.Parameter, but is a {type(parameter).__name__}; "
            "register what the module's forward reads"
        )
    module.external_parameters = (*external_parameters(module), parameter)


def external_parameters(module: nn.Module) -> tuple[nn.Parameter, ...]:
    """What `register_external_parameter` noted of the module."""
    return module.__dict__.get("external_parameters", ())
