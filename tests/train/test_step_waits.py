"""`--check-host-waits`: a step that waits for the device where it must not is reported, or ends the run."""

from __future__ import annotations

import warnings

import pytest
import torch

from megazero.errors import HostWaitError
from megazero.mpu.host import on_device, read_values
from megazero.mpu.host_waits import host_waits
from megazero.train.observe.meters import StepWaits

CPU = torch.device("cpu")


def steps(mode, works):
    """Run one step after the other; returns what was reported."""
    told = []
    watch = StepWaits(mode, CPU, told.append)
    for work in works:
        with watch.step():
            work()
    return told


def reads():
    """As the package would, so that the place is one of the package."""
    place = on_device.__code__.co_filename.replace("mpu/host.py", "zero/x.py")
    names: dict = {}
    exec(compile("def _total(x):\n    return x.item()", place, "exec"), names)
    names["_total"](torch.ones(()))


def test_each_place_is_reported_once_and_the_first_step_may_wait():
    line = "host waits | zero/x.py:_total, line 2 reads a number"
    assert steps("warn", [reads]) == []
    assert steps("warn", [reads, reads, reads]) == [line]
    assert steps("off", [reads, reads]) == []


def test_a_wait_ends_the_run_and_names_the_call():
    with pytest.raises(HostWaitError) as error:
        steps("error", [reads, reads])
    assert str(error.value) == (
        "a step must read from the device by `read_values` alone, but zero/x.py:_total, line 2 reads a "
        "number; keep the value on the device, or set --check-host-waits warn to see all such calls"
    )


def test_what_a_step_reads_on_purpose_is_allowed():
    def work():
        assert read_values(torch.tensor([1.0, 2.0])) == [1.0, 2.0]

    assert steps("error", [work, work]) == []


class FakeMode:
    """torch's switch, which on this machine has no device to look at."""

    def __init__(self, monkeypatch):
        self.mode, self.modes = 0, []
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: self.mode)
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", self.set)

    def set(self, mode):
        self.mode = {"default": 0, "warn": 1}.get(mode, mode)
        self.modes.append(self.mode)

    def synchronize(self):
        if self.mode:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)


def test_on_cuda_torch_tells_the_line_and_its_mode_comes_back(monkeypatch, recwarn):
    fake = FakeMode(monkeypatch)
    with host_waits(torch.device("cuda"), refuses=False) as found:
        fake.synchronize()
        warnings.warn("something else", stacklevel=1)
    ((where, what),) = found
    assert (where.rpartition(", line ")[0], what) == (__file__, "waits for the device")
    assert fake.modes == [1, 0]
    assert [str(each.message) for each in recwarn] == ["something else"]
    refused = pytest.raises(HostWaitError, match=r"test_step_waits.py, line \d+ waits for the device")
    with refused, host_waits(torch.device("cuda"), refuses=True):
        fake.synchronize()


def test_the_mode_comes_back_after_an_error(monkeypatch):
    fake = FakeMode(monkeypatch)
    with pytest.raises(ZeroDivisionError), host_waits(torch.device("cuda"), refuses=True):
        fake.synchronize() or 1 / 0
    assert fake.mode == 0


@pytest.mark.gpu
def test_a_gpu_tells_reads_from_allowed_ones():
    device = torch.device("cuda")
    x = torch.ones(2, device=device)
    with host_waits(device, refuses=True):
        read_values(x)
        on_device(x, torch.device("cpu"))
    with pytest.raises(HostWaitError, match="waits for the device"), host_waits(device, refuses=True):
        x.sum().item()
