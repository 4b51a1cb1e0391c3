"""The faults that are planted in kernels: each has its place in today's sources, and is found."""

import pytest

from proofs.kernel_mutants import FAULTS, ROOT, KernelFault, found_by, planted
from tests.kernels.sweep import TRIALS
from tests.tables import over_table

ids = [fault.story for fault in FAULTS]


@over_table("fault", FAULTS, ids=ids)
def test_a_fault_has_its_place(fault):
    text = (ROOT / fault.path).read_text(encoding="utf-8")
    assert planted(fault, text) != text
    assert fault.op in TRIALS or (ROOT / f"tests/kernels/test_{fault.op}.py").is_file()


def test_a_fault_whose_place_is_gone_is_told():
    with pytest.raises(ValueError, match="must hold 'nothing' 1 times, but does 0"):
        planted(KernelFault("story", "rms_norm", "csrc/rms_norm/cuda.cu", "nothing", ""), "something")


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=ids)
def test_a_fault_is_found(fault):
    assert found_by(fault) in ("counts", "sweep")
