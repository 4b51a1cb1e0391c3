"""Batch invariance: a row's result has the same bits whatever other rows there are.

Libraries of matrix products choose kernels by the number of rows, so that a request among others gets other
last bits than alone (He, "Defeating Nondeterminism in LLM Inference", 2025). Here every element of a product
is summed in order of depth (csrc/linear), and sums over ranks are added in order of rank. Attention
(csrc/attention), norms and activations compute each row by itself anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from megazero.errors import ConfigError
from megazero.inference.staged import StagedModel
from megazero.layers.attention import SelfAttention
from megazero.layers.coded import CodedProduct
from megazero.layers.fp8 import Fp8Scaling
from megazero.layers.latent import LatentAttention
from megazero.layers.linear import RowParallelLinear, column_linear
from megazero.layers.mlp import MLP
from megazero.moe.experts import Experts
from megazero.moe.mlp import MoEMLP, TokenLinear
from megazero.moe.router import Router
from megazero.mpu.group import DONE, Group, Work
from megazero.mpu.wrapping_group import GroupCall, WrappingGroup
from megazero.ops.autograd import Context, Gradients, apply
from megazero.ops.chunks import compute_dtype
from megazero.ops.grouped_linear import Groups
from megazero.ops.native import NATIVE, NATIVE_DTYPES, address, available
from megazero.spec.parts import ActivationSpec

_PANEL = 16


def make_invariant(model: StagedModel[Any]) -> None:
    """Make the model's forward batch-invariant, in fp32 and bf16; backward is as it was.

    Packed copies of weights, in fp32, are made in each pass, but kept between passes in inference mode, until
    torch knows that a weight has changed. Whoever writes weights by their addresses, as the optimizers of
    this package do, calls this again.

    Raises:
        ConfigError: the device, the dtype, 8-bit products or a softcap of attention does not allow it.
    """
    if why := hindrance(model):
        raise ConfigError(why)
    multiply = OrderedProduct()
    for module in [module for chunk in model.chunks.values() for module in chunk.modules()]:
        if isinstance(module, Experts):
            module.product = multiply.grouped
        elif "product" in vars(module) and not isinstance(module.product, CodedProduct):  # which is invariant
            vars(module)["product"] = partial(column_linear, multiply=multiply)
        if isinstance(module, RowParallelLinear):
            module.tp = _ordered(module.tp)
        if isinstance(module, (Router, TokenLinear)):
            module.multiply = multiply
        if isinstance(module, LatentAttention):
            module.by_heads = True
        if isinstance(module, MoEMLP):
            groups = module.placement.groups
            groups = {**groups, "expert": _ordered(groups["expert"])}
            module.placement = replace(module.placement, groups=groups)
        if _unsteady(module) and "forward" not in vars(module):
            vars(module)["forward"] = partial(_steadily, module.forward)


def _unsteady(module: nn.Module) -> bool:
    """Whether torch computes activations or gates of a module, and no kernel that does all rows alike."""
    if isinstance(module, (MLP, Experts)):
        return module.kind not in (ActivationSpec("gelu"), ActivationSpec("swiglu"))
    if isinstance(module, SelfAttention):
        return len(module.heads) == 4
    return isinstance(module, Router) or (isinstance(module, MoEMLP) and module.shared_gate is not None)


class _OrderedGroup(WrappingGroup):
    """Adds in order of rank: in a ring, the order depends on where in the tensor an element is."""

    def _collective(self, call: GroupCall) -> Work:
        if call.detail != "sum":
            return super()._collective(call)
        given, output = call.given.flatten(), call.arguments[0]
        parts = given.new_empty(self.size * output.numel())
        move = self.inner.all_gather if call.operation == "all_reduce" else self.inner.all_to_all
        move(parts, given).wait()
        parts = parts.view(self.size, *output.shape)
        total = parts[0].to(compute_dtype(given.dtype))
        for part in parts[1:]:
            total = total + part
        output.copy_(total)
        return DONE


def _ordered(group: Group) -> Group:
    """The group, with sums in order of rank; two numbers have the same sum in any order."""
    return group if group.size <= 2 or isinstance(group, _OrderedGroup) else _OrderedGroup(group)


def hindrance(model: StagedModel[Any]) -> str:
    """Why the model's forward cannot be batch-invariant, in a sentence; "" if it can."""
    placement, device = model.placement, model.device.type
    if device != "cpu" or placement.dtype not in NATIVE_DTYPES or not available():
        return (
            "a batch-invariant model must be in fp32 or bf16 on a CPU with megazero's compiled kernels, but "
            f"is in {str(placement.dtype).removeprefix('torch.')} on {device}"
            f"{'' if available() else ', and they are not built'}; leave batch invariance out"
        )
    for module in (module for chunk in model.chunks.values() for module in chunk.modules()):
        if isinstance(getattr(module, "product", None), Fp8Scaling):
            return "`fp8` must be off in a batch-invariant model, but is on; leave one of them out"
        if getattr(module, "softcap", None) is not None:
            return (
                "`softcap` of attention must be unset in a batch-invariant model, but is set; leave batch "
                "invariance out"
            )
    return ""


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "none":
        return x * (0.5 * (1 + torch.erf(x * math.sqrt(0.5))))
    return x * (0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))))


_STEADY = MappingProxyType({torch.sigmoid: _sigmoid, Tensor.sigmoid: _sigmoid, F.gelu: _gelu})


class _Steady(TorchFunctionMode):
    """Makes some functions of others: torch computes a tensor's last elements by other code than the rest.

    exp, tanh and erf have one code for all, and sums and products have but one result.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _STEADY.get(func, func)(*args, **(kwargs or {}))  # type: ignore[no-untyped-call]


def _steadily(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _Steady():
        return forward(*args, **kwargs)


class _OrderedLinear(Function):
    @staticmethod
    def forward(
        ctx: Context[None], x: Tensor, weight: Tensor, bias: Tensor | None, product: OrderedProduct
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product.plain(x, weight, bias)

    @staticmethod
    def backward(ctx: Context[None], grad: Tensor) -> Gradients:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        grad_weight = rows.t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, rows.sum(0) if ctx.needs_input_grad[2] else None, None


@dataclass(frozen=True, eq=False)
class _Packed:
    """A weight's copy. source: its storage; version: torch's count of changes; panels: [n / 16, h, 16]."""

    source: StorageWeakRef
    version: int
    panels: Tensor


class OrderedProduct:
    """x weight^T + bias with every sum in order of depth, in fp32; keeps packed copies of weights."""

    def __init__(self) -> None:
        self._packed: dict[tuple[object, ...], _Packed] = {}

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., h] by weight [n, h] and bias [n] -> [..., n] in x's dtype; its backward is F.linear's."""
        if not torch.is_grad_enabled():
            return self.plain(x, weight, bias)
        return apply(_OrderedLinear, x, weight, bias, self)

    def grouped(self, x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        """`grouped_linear`: rows of group e of x [R, K] by weight[e] of [E, n, K]; it has no backward."""
        rows = x.split(groups.read())
        return torch.cat([self.plain(part, one, None) for part, one in zip(rows, weight, strict=True)])

    def plain(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The product without autograd."""
        rows = x.reshape(-1, x.shape[-1]).float().contiguous()
        y = torch.empty(len(rows), len(weight))
        panels = self._panels(weight)
        bias = None if bias is None else bias.float().contiguous()
        sizes = len(rows), len(weight), rows.shape[1], torch.get_num_threads()
        addresses = (address(x) for x in (rows, panels, bias, y))
        NATIVE.ordered_linear(*sizes, *addresses, NATIVE.InstructionSet.AVX512)
        return y.view(*x.shape[:-1], len(weight)).to(x.dtype)

    def _panels(self, weight: Tensor) -> Tensor:
        weight = weight.detach()
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        (n, depth), storage = weight.shape, weight.untyped_storage()
        version = 0 if weight.is_inference() else weight._version
        key = storage._cdata, weight.storage_offset(), n, depth, weight.stride(0), weight.dtype
        kept = self._packed.get(key)
        if kept is not None and kept.version == version and torch.is_inference_mode_enabled():
            return kept.panels
        if kept is None:
            self._packed = {k: one for k, one in self._packed.items() if not one.source.expired()}
            panels = torch.empty(-(-n // _PANEL), depth, _PANEL)
        else:
            panels = kept.panels
        narrow = weight.dtype == torch.bfloat16
        NATIVE.pack_weight(n, depth, weight.stride(0), narrow, address(weight), address(panels))
        self._packed[key] = _Packed(StorageWeakRef(storage), version, panels)
        return panels
