"""Scaled softmax: scores and probabilities forward; probabilities and both gradients backward.

Under a causal mask half of what is read is hidden, and need not be read, as what lies in other documents; all
of what is written is. Packs that lie partly in what is hidden are read whole.
"""

from __future__ import annotations

import torch

from megazero.commands.kernels.case import KernelCase
from megazero.kernels import KernelLibrary
from megazero.ops.scaled_softmax.cuda import scaled_softmax_cuda

HEADS, LENGTH = 2, 256
DOCUMENTS = (61, 1, 103, 91)  # lengths, of which none fills packs


def _case(dtype: torch.dtype, name: str, causal: bool) -> KernelCase:
    shape = (1, HEADS, LENGTH, LENGTH)

    def run(kernels: KernelLibrary) -> None:
        scores = torch.randn(shape).to(dtype).requires_grad_()
        mask = None if causal else torch.rand(shape) < 0.9
        scaled_softmax_cuda(scores, 0.125, causal, mask, kernels).backward(torch.randn(shape).to(dtype))

    whole = HEADS * LENGTH * LENGTH
    seen = HEADS * LENGTH * (LENGTH + 1) // 2 if causal else whole
    return KernelCase(
        f"scaled_softmax {'causal' if causal else 'masked'} {name}",
        run,
        {
            "scaled_softmax_forward": (seen + whole) * dtype.itemsize + (0 if causal else whole),
            "scaled_softmax_backward": (2 * seen + whole) * dtype.itemsize,
        },
    )


def _documents_case(dtype: torch.dtype, name: str, causal: bool) -> KernelCase:
    shape = (1, HEADS, LENGTH, LENGTH)

    def run(kernels: KernelLibrary) -> None:
        scores = torch.randn(shape).to(dtype).requires_grad_()
        lengths = torch.tensor(DOCUMENTS)
        ids = torch.arange(len(DOCUMENTS), dtype=torch.int32).repeat_interleave(lengths).view(1, LENGTH)
        probs = scaled_softmax_cuda(scores, 0.125, causal, None, kernels, document_ids=ids)
        probs.backward(torch.randn(shape).to(dtype))

    seen = HEADS * sum(length * (length + 1) // 2 if causal else length**2 for length in DOCUMENTS)
    whole, ids = HEADS * LENGTH * LENGTH, 4 * LENGTH
    return KernelCase(
        f"scaled_softmax documents{' causal' if causal else ''} {name}",
        run,
        {
            "scaled_softmax_forward": (seen + whole) * dtype.itemsize + ids,
            "scaled_softmax_backward": (2 * seen + whole) * dtype.itemsize + ids,
        },
    )


_DTYPES = ((torch.float32, "fp32"), (torch.bfloat16, "bf16"))
CASES = (
    *(_case(dtype, name, causal) for causal in (True, False) for dtype, name in _DTYPES),
    *(_documents_case(dtype, name, causal) for causal in (True, False) for dtype, name in _DTYPES),
)
