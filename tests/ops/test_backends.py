"""Compiled kernels are looked for at the first call for their device, and an import asks for nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megazero.kernels.on_cpu import WatchedLibrary
from megazero.ops import cuda, operators
from megazero.ops.dispatch import CallFacts
from megazero.ops.swiglu import SWIGLU, swiglu_cuda
from tests.kernels.harness import library_path

ROOT = Path(__file__).resolve().parents[2]
REFUSING = """
import subprocess, sys, torch
def refuse(*args, **kwargs):
    raise AssertionError("an import asked the driver or started a program")
for name in ("is_available", "device_count", "get_device_capability", "get_device_properties", "init"):
    setattr(torch.cuda, name, refuse)
torch._C._cuda_getDeviceCount = subprocess.run = subprocess.Popen = refuse
"""


def run(code: str) -> str:
    command = [sys.executable, "-c", REFUSING + code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def test_an_import_looks_for_no_kernels() -> None:
    """It once asked the driver, ran nvcc twice, and compiled for minutes if a library was not there yet."""
    code = "import megazero, megazero.ops, megazero.layers; print('megazero.ops._native' in sys.modules)"
    assert run(code) == "False"


def test_a_call_on_the_cpu_asks_no_driver() -> None:
    code = "from megazero.ops.swiglu import swiglu; print(swiglu(torch.ones(3, 2, 4)).sum().item() > 8)"
    assert run(code) == "True"


def test_the_choice_for_a_gpu_looks_for_its_library_once(monkeypatch) -> None:
    looks = []
    monkeypatch.setattr(cuda, "_BACKEND", cuda._Backend())
    monkeypatch.setattr(cuda, "load_cuda_kernels", lambda: looks.append(1))
    for operator in operators():
        for call in operator.calls:
            operator.choose(call)
    assert looks == [1]
    assert SWIGLU.choose(CallFacts("cuda", torch.float32)).name == "chunked"
    with pytest.raises(RuntimeError, match="the CUDA kernels must be built to be launched"):
        swiglu_cuda(torch.zeros(2, 2, 3))


def test_a_row_for_gpus_takes_the_library_of_the_process(monkeypatch) -> None:
    library = WatchedLibrary(library_path())
    library.reset()
    monkeypatch.setattr(cuda, "_BACKEND", SimpleNamespace(library=library))
    row = SWIGLU.choose(CallFacts("cuda", torch.float32))
    assert row.name == "cuda"
    row.fn(torch.ones(3, 2, 4))
    assert set(library.report().kernels) == {"swiglu_forward"}
