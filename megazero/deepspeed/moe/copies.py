"""`ExpertCopies`: experts that are copies of any module, each with initial values of its own."""

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
    """Copies of one module by expert number.

    Each copy draws its own initial values: `reset_parameters` of its submodules is called under a seed that
    depends on torch's random state and the expert's number, so values do not depend on `ep_size`. Submodules
    without that method keep the values of the original.

    Args:
        expert: the module to copy; its forward maps rows [n, h] to [n, h], or to [n, h] and a bias for its
            caller to add.
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
            duplicate = copy.deepcopy(expert)
            with _seeded(derive_key(base, "expert", number), expert):
                duplicate.apply(_reset)
            self.add_module(str(number), duplicate)
        can_reset = any(_reset_of(module) is not None for module in expert.modules())
        if total > 1 and any(True for _ in expert.parameters()) and not can_reset:
            warnings.warn(
                f"all {total} experts start with the same values, because no submodule of "
                f"{type(expert).__name__} has `reset_parameters`; add this method to it",
                stacklevel=3,
            )

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the experts on this rank, in order."""
        return tuple(map(int, self._modules))

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return self.children()

    def __getitem__(self, which: int | str) -> nn.Module:
        """Return an expert by its number in the layer, a str, or by its index on this rank, an int."""
        return self.get_submodule(which) if isinstance(which, str) else [*self][which]

    def forward(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """Map rows [R, h] to [R, h].

        Args:
            rows: the rows of this rank's experts, concatenated in their order.
            sizes: the number of rows of each expert.
        """
        parts = rows.split(list(sizes))
        return torch.cat([_apply(expert, part) for expert, part in zip(self, parts, strict=True)])

    def keep(self, first: int, count: int) -> list[nn.Parameter]:
        """Keep `count` experts from `first` on; return the parameters of the removed ones."""
        removed = [number for number in self.numbers if not first <= number < first + count]
        params = [param for number in removed for param in self[str(number)].parameters()]
        for number in removed:
            del self._modules[str(number)]
        return params

    def name_parameters(self, path: str) -> None:
        """Set the spec of each parameter, with its global name; `path` is this module's path in the model."""
        for name, param in self.named_parameters():
            whole = tuple(param.shape)
            spec = ParamSpec(f"{path}.{name}", whole, InitialValues("zeros"), expert=True)
            param.__dict__["spec"] = spec


def plain_output(result: Tensor | tuple[Tensor, Tensor | None]) -> Tensor:
    """Return a module's output, with the bias added that Megatron's layers return separately."""
    if isinstance(result, Tensor):
        return result
    out, bias = result
    return out if bias is None else out + bias


def _apply(expert: nn.Module, rows: Tensor) -> Tensor:
    """Call one expert with rows [n, h].

    Without rows, the expert is called with a row of zeros and the result is dropped: all ranks must call it,
    because they gather its weights together, and not every module accepts an empty tensor. Padding keeps the
    row in the graph of `rows`, so that backward is the same on all ranks.
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
    """Call a module's `reset_parameters`, if it has that method."""
    reset = _reset_of(module)
    if reset is not None:
        with torch.no_grad():
            reset()


def _reset_of(module: nn.Module) -> Callable[[], object] | None:
    reset: Callable[[], object] | None = getattr(module, "reset_parameters", None)
    return reset or getattr(module, "_reset_parameters", None)


@contextmanager
def _seeded(seed: int, module: nn.Module) -> Iterator[None]:
    """Seed torch within this context, on the CPU and the module's devices."""
    devices = sorted({param.device.index for param in module.parameters() if param.is_cuda})
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        yield
