"""The kernels of mamba-ssm are called as their package says, and where it is installed alone."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from torch import Tensor

from megazero.config.tree.model import ModelConfig
from megazero.layers.state_space import library
from megazero.layers.state_space.library import cuda_scan, library_scan, scan_remarks
from megazero.layers.state_space.scan import selective_scan
from megazero.spec.resolve import model_spec
from tests.layers.state_space.test_scan import G, R, inputs, segments

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def stand_in(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    *,
    dt_softplus: bool = False,
    return_final_states: bool = False,
):
    """The package's function by its own documentation: [batch, length, heads, ...], and the recurrence."""
    batch, length, heads, _ = x.shape
    assert dt.shape == (batch, length, heads)
    assert A.shape == (heads,)
    assert B.shape == C.shape
    assert B.shape[:2] == (batch, length)
    assert all(t.is_contiguous() for t in (x, dt, B, C))
    assert seq_idx is None or (seq_idx.dtype == torch.int32 and seq_idx.shape == (batch, length))
    assert (D, z, dt_bias, dt_softplus, return_final_states) == (None, None, None, False, True)
    groups, n = B.shape[2:]
    b, c = (t.repeat_interleave(heads // groups, 2) for t in (B, C))
    state = x.new_zeros(batch, heads, x.shape[3], n) if initial_states is None else initial_states
    rows = []
    for t in range(length):
        if seq_idx is not None and t > 0:
            state = state * (seq_idx[:, t] == seq_idx[:, t - 1])[:, None, None, None]
        decay, write = (dt[:, t] * A).exp(), dt[:, t, :, None] * x[:, t]
        state = state * decay[..., None, None] + write[..., None] * b[:, t, :, None]
        rows.append((state * c[:, t, :, None]).sum(-1))
    return torch.stack(rows, 1), state


@pytest.fixture
def installed(monkeypatch):
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton", "mamba_ssm.ops.triton.ssd_combined"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    module.mamba_chunk_scan_combined = stand_in


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "documents"])
def test_it_computes_what_ours_does(installed, cut):
    *given, state = inputs(29)
    assert tuple(given[0].shape[2:4]) == (G, R)
    ends = segments(29) if cut else None
    for before in (None, state):
        found, wanted = library_scan(*given, before, ends), selective_scan(*given, before, ends)
        for got, expected in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_it_is_chosen_on_a_gpu_where_it_is_installed(installed, monkeypatch):
    assert cuda_scan() is library_scan
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: None)
    assert cuda_scan() is selective_scan


def test_the_choice_is_shown(installed):
    shape = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 16}
    hybrid = ModelConfig(**shape, is_hybrid_model=True, mamba_head_dim=16)
    assert list(scan_remarks(model_spec(hybrid), CUDA)) == ["state-space scan: mamba-ssm on cuda"]
    assert list(scan_remarks(model_spec(hybrid), CPU)) == ["state-space scan: products of matrices on cpu"]
    assert list(scan_remarks(model_spec(ModelConfig(**shape)), CPU)) == []
