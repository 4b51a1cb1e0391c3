"""The quick part of the matrix of faults; `python -m proofs.fault_matrix` runs all of it."""

from __future__ import annotations

import pytest

from proofs.fault_matrix.cases import FaultCase, all_cases
from tests.docs.pages import says

CASES = all_cases()
QUICK = [case for case in CASES if case.quick]


def test_the_matrix_is_as_large_as_it_says() -> None:
    assert len(CASES) >= 60
    assert says("docs/features.md", f"`proofs/fault_matrix`: {len(CASES)} faults")
    assert sum(case.quick for case in CASES) >= 20
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[pytest.mark.fast] * (case is QUICK[0])) for case in QUICK],
)
def test_the_fault_is_caught(case: FaultCase, tmp_path) -> None:
    assert case.complaints(tmp_path / "run") == []
