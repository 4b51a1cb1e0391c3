"""Lists of flat tensors as the kernels of csrc/common/cuda_segments.hpp take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.kernels import DTYPE_CODES, KernelLibrary
from megazero.ops.cuda import cuda_kernels

_NO_WEIGHTS = -1  # as csrc/common/cuda_update.hpp has it


@dataclass(frozen=True)
class DeviceSignals:
    """Inputs of an optimizer's step that only the device knows, so that the host need not wait for them.

    Attributes:
        scale: fp32, one element: a further factor of the gradients, such as clipping's; None for 1.
        overflow: fp32, one element: unless it is 0, the step changes nothing; None for 0.
    """

    scale: Tensor | None = None
    overflow: Tensor | None = None


NO_SIGNALS = DeviceSignals()


def launch_update(
    kernels: KernelLibrary | None,
    name: str,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    moments: Sequence[Sequence[Tensor] | None],
    weights: Sequence[Tensor | None] | None,
    *settings: float,
    scale: float,
    signals: DeviceSignals,
) -> None:
    """Run an optimizer's kernel, once for each combination of the gradients' and the weights' dtypes.

    Args:
        kernels: the library; None for that of this process.
        name: the kernel.
        params: contiguous fp32 masters, changed in place.
        grads: their gradients, of any float type; one that is not contiguous or is fp64 is copied.
        moments: for each kind of moments, a list of contiguous fp32 tensors, changed in place; None if the
            step has none of that kind.
        weights: for each master, the tensor for the new weights (fp32, fp16 or bf16), or None.
        settings: the kernel's numbers.
        scale: the factor of the gradients.
        signals: the inputs of the step that only the device knows.
    """
    outs = [None] * len(params) if weights is None else weights
    grads = [readable(grad) for grad in grads]
    beside: Sequence[Sequence[Tensor | None] | None] = (grads, outs, *moments)
    groups: dict[tuple[torch.dtype, torch.dtype | None], list[int]] = {}
    for index, (grad, out) in enumerate(zip(grads, outs, strict=True)):
        groups.setdefault((grad.dtype, None if out is None else out.dtype), []).append(index)
    for (grad_dtype, weight_dtype), chosen in groups.items():
        masters = [params[i] for i in chosen]
        lists = [None if tensors is None else [tensors[i] for i in chosen] for tensors in beside]
        (kernels or cuda_kernels()).launch(
            name,
            grad_dtype,
            _NO_WEIGHTS if weight_dtype is None else weight_dtype,
            len(chosen),
            lengths_of(masters, *lists),
            masters,
            *lists,
            scale,
            signals.scale,
            signals.overflow,
            *settings,
        )


def readable(tensor: Tensor) -> Tensor:
    """The tensor if a kernel can read it as it is, otherwise a contiguous copy, in fp32 if it is fp64."""
    return (tensor if tensor.dtype in DTYPE_CODES else tensor.float()).contiguous()


def lengths_of(first: Sequence[Tensor], *others: Sequence[Tensor | None] | None) -> list[int]:
    """The number of elements of each tensor, which its counterparts in the other lists share."""
    lengths = [tensor.numel() for tensor in first]
    for other in others:
        if other is not None:
            pairs = zip(other, lengths, strict=True)
            assert all(x is None or x.numel() == length for x, length in pairs), "other sizes"
    return lengths
