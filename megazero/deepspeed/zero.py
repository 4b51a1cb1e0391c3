"""`Init`: shards a model over the ranks while it is being built, so that no rank ever holds all of it.

The names and their meaning are DeepSpeed's (`deepspeed.zero.Init`, `GatheredParameters`,
`register_external_parameter`), so that a script needs no change; the method is that of Rajbhandari et al.
2021, "ZeRO-Infinity", section 7.2.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from megazero.config.deepspeed.read import read_deepspeed
from megazero.deepspeed.adopt import find_context
from megazero.errors import ConfigError
from megazero.mpu.context import ParallelContext
from megazero.mpu.group import Group


class Home(Protocol):
    """The holder of a parameter's shards: a `Partition` while the model is built, later an engine.

    A parameter's `zero_home` attribute is its home; a parameter without one is whole.
    """

    group: Group

    def gathered(self, params: Iterable[nn.Parameter], *, write_back: bool) -> AbstractContextManager[None]:
        """A context manager within which `params` are whole; see `DataParallel.gathered`."""


class Partition(Home):
    """This rank's slice of one parameter.

    Args:
        param: a whole parameter; from now on it reads as NaN and takes no memory. All ranks take the values
            of the group's first rank.
        context: its `replica` group shards the parameter, and its device holds the slice.
        dtype: the dtype of the slice; None keeps the parameter's.
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
        """Assemble the parameter's values from every rank's slice; every rank calls this."""
        flat = self.shard.new_empty(self.shard.numel() * self.group.size)
        self.group.all_gather(flat, self.shard).wait()
        return flat[: self.shape.numel()].view(self.shape)

    def store(self, value: Tensor) -> None:
        """Keep this rank's slice of a value that is the same on every rank."""
        start = self.group.rank * self.shard.numel()
        mine = value.reshape(-1)[start : start + self.shard.numel()]
        self.shard[: mine.numel()].copy_(mine)

    def move(self, group: Group) -> None:
        """Shard the parameter over `group`, a part of the present group; all ranks of that one call this."""
        value = self.whole()
        self.group = group
        self.shard = value.new_zeros(max(1, -(-value.numel() // group.size)))
        self.store(value)

    @contextmanager
    def gathered(self, params: Iterable[nn.Parameter], *, write_back: bool) -> Iterator[None]:
        """Context in which the parameter is whole; with `write_back`, changes to it are kept."""
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
        # Some models copy layers while they are built (torch's TransformerEncoder does); copy the slice too.
        param.__dict__.update(zero_home=self, __deepcopy__=MethodType(_copy, param))


def _copy(param: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    """A copy of a sharded parameter, sharded in the same way."""
    home = partition_of(param)
    assert home is not None, "only sharded parameters are copied here"
    twin = nn.Parameter(param.data, param.requires_grad)
    memo[id(param)] = twin
    other = object.__new__(Partition)
    other.__dict__.update(home.__dict__, shard=home.shard.clone())
    other._attach(twin)
    return twin


def partition_of(param: nn.Parameter) -> Partition | None:
    """The slice of a parameter that `Init` has sharded, until an engine takes it over; None for others."""
    home = getattr(param, "zero_home", None)
    return home if isinstance(home, Partition) else None


def is_partitioned(param: nn.Parameter) -> bool:
    """Whether `Init` has sharded the parameter and no engine has taken it over yet."""
    return partition_of(param) is not None


class Init:
    """Context in which the parameters of each submodule are sharded as soon as the submodule has been built.

    A submodule counts as built when it becomes part of a larger module; the outermost module's own parameters
    are sharded at the end. `Module.apply` works inside the context. Other code that reads or writes a
    submodule's weights after it was built must do so within `GatheredParameters`.

    Args:
        module: a finished module, which is sharded at once.
        config_dict_or_path: path or content of a DeepSpeed JSON, which determines the dtype of the weights.
        config: another name for `config_dict_or_path`.
        enabled: if False, nothing happens.
        dtype: dtype of the weights; takes precedence over the configuration.
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
            # Hooks belong to the process, but ranks may be its threads: each rank reacts only to its own
            # thread, and none adds or removes a hook while another is building.
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
            for part in module.modules():
                part.__dict__.pop("apply", None)
        self._outermost = {}
        if kind is None:
            self.context.world.barrier()

    def _registered(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        """Shard a module that has become part of another."""
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
    """`Module.apply` for sharded weights: each module's own weights are whole while `fn` runs on it."""
    for child in module.children():
        child.apply(fn)
    with GatheredParameters(module.parameters(recurse=False), modifier_rank=0):
        fn(module)
    return module


def _dtype(config: str | Path | Mapping[str, Any] | None) -> torch.dtype | None:
    """The dtype that a DeepSpeed JSON gives the weights; None keeps the one they have."""
    if config is None:
        return None
    read = read_deepspeed(config)
    if read.problems:
        raise ConfigError(read.problems)
    dtypes: dict[str | None, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return dtypes.get(read.values.get("precision.dtype"))


class GatheredParameters:
    """Context in which sharded parameters are whole and can be read, without autograd. Every rank enters it.

    Args:
        params: one parameter or several; those that are not sharded are left alone.
        modifier_rank: the world rank whose changes every rank takes over at the end; None means that the
            parameters are only read.
        fwd_module: a module whose forward is going to read them, see `register_external_parameter`.
        enabled: if False, nothing happens.

    Raises:
        ConfigError: `modifier_rank` does not hold the same parameters.
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
    if not isinstance(parameter, nn.Parameter):
        raise ConfigError(
            f"`parameter` must be a torch.nn.Parameter, but is a {type(parameter).__name__}; "
            "register the parameters that the module's forward reads"
        )
    module.__dict__["external_parameters"] = (*external_parameters(module), parameter)


def external_parameters(module: nn.Module) -> tuple[nn.Parameter, ...]:
    """The parameters that `register_external_parameter` recorded for the module."""
    recorded: tuple[nn.Parameter, ...] = module.__dict__.get("external_parameters", ())
    return recorded
