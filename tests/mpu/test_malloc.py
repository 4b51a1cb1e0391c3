from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from megazero.mpu import malloc

# Page faults of allocating, filling and freeing 160 MiB four times, after a first round.
COUNT_FAULTS = """
import resource, sys
from megazero.mpu.malloc import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory() and keep_freed_memory()
def churn(rounds):
    for _ in range(rounds):
        block = bytearray(b"x") * (160 << 20)
        del block
churn(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
churn(4)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode):
    result = subprocess.run(
        [sys.executable, "-c", COUNT_FAULTS, mode],
        cwd=Path(malloc.__file__).parents[2],  # where the package is found without being installed
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return int(result.stdout)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_blocks_come_back_without_page_faults():
    kept, returned = faults("keep"), faults("leave")
    assert kept < 100
    assert returned > 10 * max(kept, 1)  # hundreds with huge pages, 160,000 without


@pytest.mark.parametrize(
    ("names", "answer"),
    [({}, None), ({"CS_GNU_LIBC_VERSION": 2}, None), ({"CS_GNU_LIBC_VERSION": 2}, "musl 1")],
)
def test_other_c_libraries_are_left_alone(monkeypatch, names, answer):
    monkeypatch.setattr(malloc.os, "confstr_names", names)
    monkeypatch.setattr(malloc.os, "confstr", lambda name: answer)
    monkeypatch.setattr(malloc.ctypes, "CDLL", lambda name: pytest.fail("touched the C library"))
    assert malloc.keep_freed_memory() is False
