"""The accelerator of a CUDA machine, by a stand-in for torch.cuda, and the choice of one."""

from __future__ import annotations

import pytest
import torch

from megazero.deepspeed.accelerator import choose
from megazero.deepspeed.accelerator.cpu import Accelerator
from megazero.deepspeed.accelerator.cuda import CudaAccelerator
from megazero.deepspeed.accelerator.op_builder import BUILDERS, COMPATIBLE, builder_class
from megazero.errors import ConfigError


@pytest.fixture
def fresh(monkeypatch):
    """As in a process that has not asked yet."""
    monkeypatch.setattr(choose._CURRENT, "accelerator", None)


@pytest.mark.parametrize(("wanted", "kind"), [("cpu", Accelerator), ("cuda", CudaAccelerator)])
def test_the_environment_chooses(monkeypatch, fresh, wanted, kind):
    monkeypatch.setenv("DS_ACCELERATOR", wanted)
    assert type(choose.get_accelerator()) is kind
    assert choose.get_accelerator() is choose.get_accelerator()


def test_another_device_is_refused(monkeypatch, fresh):
    monkeypatch.setenv("DS_ACCELERATOR", "xpu")
    with pytest.raises(ConfigError, match="`DS_ACCELERATOR` must be cpu or cuda, but is 'xpu'"):
        choose.get_accelerator()


def test_cuda_is_asked_by_device(monkeypatch):
    asked = []
    for name in (
        "memory_allocated",
        "set_device",
        "synchronize",
        "current_stream",
        "reset_peak_memory_stats",
    ):
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name: asked.append((name, device)) or 5)
    device = CudaAccelerator()
    assert device.memory_allocated() == 5
    assert device.memory_allocated(device_index=1) == 5
    device.set_device(2)
    device.synchronize()
    device.current_stream(3)
    device.reset_max_memory_allocated()
    assert asked == [
        ("memory_allocated", None),
        ("memory_allocated", 1),
        ("set_device", 2),
        ("synchronize", None),
        ("current_stream", 3),
        ("reset_peak_memory_stats", None),
    ]


def test_cuda_says_its_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    device = CudaAccelerator()
    assert [device.device_name(), device.device_name(2), device.current_device_name()] == [
        "cuda",
        "cuda:2",
        "cuda:1",
    ]
    assert device.device(1) == torch.device("cuda", 1)
    assert device.communication_backend_name() == "nccl"
    assert not device.is_synchronized_device()
    assert not device.on_accelerator(torch.ones(1))


def test_no_class_lacks_a_call_of_the_other():
    public = {name for name in dir(Accelerator) if not name.startswith("_")}
    assert {name for name in dir(CudaAccelerator) if not name.startswith("_")} == public


def test_the_number_of_the_device_is_a_number(monkeypatch):
    """DeepSpeed gives a text under a launcher."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert Accelerator().current_device() == 3


def test_each_builder_loads_or_says_why_not(capsys):
    for name, (home, reason) in BUILDERS.items():
        builder = builder_class(name)()
        assert builder.is_compatible(verbose=True) is bool(home) is COMPATIBLE[builder.NAME]
        if home:
            assert builder.load().__name__ == home == builder.absolute_name()
        else:
            assert reason in capsys.readouterr().out
            with pytest.raises(ConfigError, match="must not be loaded here; megazero has no such kernel"):
                builder.load()
