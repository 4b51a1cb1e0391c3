"""The scan by mamba-ssm's kernels, where this package is installed and there is a GPU."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megazero.layers.state_space.scan import selective_scan
from megazero.spec.model import ModelSpec

_MODULE = "mamba_ssm.ops.triton.ssd_combined"
_CHUNK = 128


def cuda_scan() -> Callable[..., tuple[Tensor, Tensor]]:
    """The scan that computes on a GPU, with the arguments of `selective_scan`."""
    return selective_scan if importlib.util.find_spec("mamba_ssm") is None else library_scan


def scan_remarks(model: ModelSpec, device: torch.device) -> Iterator[str]:
    """A sentence that names the implementation of the scan, for a model that has one."""
    if any(layer.mixer is not None for layer in model.layers):
        library = device.type == "cuda" and cuda_scan() is library_scan
        name = "mamba-ssm" if library else "products of matrices"
        yield f"state-space scan: {name} on {device.type}"


def library_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`selective_scan` by the library, whose tensors are [b, s, heads, ...]."""
    scan = importlib.import_module(_MODULE).mamba_chunk_scan_combined
    groups = x.shape[2:4]

    def theirs(rows: Tensor) -> Tensor:
        return rows.transpose(0, 1).contiguous()

    y, last = scan(
        theirs(x).flatten(2, 3),
        theirs(dt).flatten(2, 3),
        a.flatten(),
        theirs(b),
        theirs(c),
        _CHUNK,
        initial_states=None if state is None else state.flatten(1, 2),
        seq_idx=None if segments is None else segments.to(torch.int32).contiguous(),
        return_final_states=True,
    )
    return y.unflatten(2, groups).transpose(0, 1), last.unflatten(1, groups)
