"""`ExpertCopies`: experts that are modules of any kind, copies of one that start with values of their own."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.errors import ConfigError
from megazero.mpu.param_spec import InitialValues, ParamSpec
from megazero.mpu.rng import derive_key


class ExpertCopies(nn.Module):
    """Experts by number, each of them a copy of one module.

    Every copy draws its initial values anew: `reset_parameters` of its submodules is called under a seed that
    is a function of torch's random state and of the expert's number. So experts differ, and are the same for
    any `ep_size`. Submodules without that function keep the values of the original.

    Args:
        expert: the module to copy; its forward maps rows [n, h] to [n, h], or to such rows and a bias that is
            to be added to them.
        total: E, the number of experts.

    Raises:
        ConfigError: `expert` has buffers, or holds slices of tensor-parallel weights.
    """

    def __init__(self, expert: nn.Module, total: int):
        _check(expert)
        super().__init__()
        self.total = total
        base = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
        for number in range(total):
            twin = copy.deepcopy(expert)
            with _seeded(derive_key(base, "expert", number), expert):
                twin.apply(_reset)
            self.add_module(str(number), twin)
        if total > 1 and any(True for _ in expert.parameters()) and not _can_reset(expert):
            warnings.warn(
                f"all {total} experts start with the same values, because no submodule of "
                f"{type(expert).__name__} has `reset_parameters`; add this method to it",
                stacklevel=3,
            )

    @property
    def numbers(self) -> tuple[int, ...]:
        """The experts that are on this rank, in order."""
        return tuple(map(int, self._modules))

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return self.children()

    def __getitem__(self, which: int | str) -> nn.Module:
        """An expert by its number in the whole layer, as a word, or by its place on this rank."""
        return self.get_submodule(which) if isinstance(which, str) else [*self][which]

    def forward(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """Compute rows [R, h] -> [R, h].

        Args:
            rows: the rows of each expert here, one expert's after the other's.
            sizes: how many rows each has.
        """
        parts = rows.split(list(sizes))
        return torch.cat([_apply(expert, part) for expert, part in zip(self, parts, strict=True)])

    def keep(self, first: int, count: int) -> list[nn.Parameter]:
        """Remove all experts but `count` from `first` on; return the parameters of those removed."""
        gone = [number for number in self.numbers if not first <= number < first + count]
        params = [param for number in gone for param in self[str(number)].parameters()]
        for number in gone:
            del self._modules[str(number)]
        return params

    def name_parameters(self, path: str) -> None:
        """Give every parameter a spec with its global name; `path` is this module's name in the model."""
        for name, param in self.named_parameters():
            whole = tuple(param.shape)
            spec = ParamSpec(f"{path}.{name}", whole, InitialValues("zeros"), expert=True)
            param.__dict__["spec"] = spec


def plain_output(result: Tensor | tuple[Tensor, Tensor | None]) -> Tensor:
    """The output of a module, plus the bias if it left one for its caller to add, as Megatron's do."""
    if isinstance(result, Tensor):
        return result
    out, bias = result
    return out if bias is None else out + bias


def _apply(expert: nn.Module, rows: Tensor) -> Tensor:
    """The output of one expert for rows [n, h].

    Without any rows it gets one of zeros, whose result is not used: all ranks gather its weights together,
    and not every module takes an empty tensor. That row depends on `rows`, so that backward takes the same
    path everywhere.
    """
    count = len(rows)
    return plain_output(expert(rows if count else F.pad(rows, (0, 0, 0, 1))))[:count]


def _check(expert: nn.Module) -> None:
    if not isinstance(expert, nn.Module):
        raise ConfigError(f"`expert` must be a torch.nn.Module, but is a {type(expert).__name__}; pass one")
    if any(isinstance(module, ExpertCopies) for module in expert.modules()):
        raise ConfigError("`expert` must not have experts in it, but has a `MoE` layer; use a dense module")
    buffers = [name for name, _ in expert.named_buffers()]
    if buffers:
        raise ConfigError(
            f"`expert` must have no buffers, since experts are on different ranks, but has "
            f"{', '.join(buffers[:5])}; keep them in the module around the layer, or make them parameters "
            "without gradients"
        )
    sliced = [
        name
        for name, param in expert.named_parameters()
        if getattr(param, "tensor_model_parallel", False) or getattr(param, "model_parallel", False)
    ]
    if sliced:
        raise ConfigError(
            f"`expert` must have whole weights, but {', '.join(sliced[:5])} are sliced over tensor-parallel "
            "ranks; build it from plain layers"
        )


def _reset(module: nn.Module) -> None:
    """Let a module draw the values of its own parameters again, if it can."""
    reset = _reset_of(module)
    if reset is not None:
        with torch.no_grad():
            reset()


def _reset_of(module: nn.Module) -> Callable[[], object] | None:
    reset: Callable[[], object] | None = getattr(module, "reset_parameters", None)
    return reset or getattr(module, "_reset_parameters", None)


def _can_reset(expert: nn.Module) -> bool:
    return any(_reset_of(module) is not None for module in expert.modules())


@contextmanager
def _seeded(seed: int, module: nn.Module) -> Iterator[None]:
    """Context in which torch draws from `seed` on the module's devices; afterwards it continues as before."""
    devices = sorted({param.device.index for param in module.parameters() if param.is_cuda})
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        yield
