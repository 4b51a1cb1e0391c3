"""The sort of choices by the kernels of csrc/sort_by_expert/cuda.cu."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.kernels import KernelLibrary
from megazero.ops.cuda import CUDA_KERNELS

# Beyond it, the counts of a block's warps do not fit in shared memory.
MOST_EXPERTS = 1024
# Choices that a block sorts.
BLOCK = 1024


def sort_by_expert_cuda(
    chosen: Tensor, kept: Tensor | None, experts: int, room: int | None, kernels: KernelLibrary = CUDA_KERNELS
) -> tuple[Tensor, Tensor, Tensor]:
    """The sort for at most 1,024 experts on a GPU, in three launches and without a wait."""
    chosen, kept = chosen.contiguous(), None if kept is None else kept.contiguous()
    count = chosen.numel()
    blocks = max(1, -(-count // BLOCK))
    workspace = chosen.new_empty(2 * blocks + 1, experts + 1, dtype=torch.int32)
    choice = chosen.new_empty(count if room is None else experts * room)
    slots, counts = torch.empty_like(chosen), chosen.new_empty(experts)
    sizes = (count, blocks, experts, -1 if room is None else room)
    kernels.launch("sort_by_expert", *sizes, chosen, kept, workspace, choice, slots, counts)
    return choice, slots, counts
