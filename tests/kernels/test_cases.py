"""Every case's kernels move what they must, in whole sectors, without conflicts of shared memory's banks."""

import pytest

from megazero.report.kernels.cases import CASES
from tests.kernels.harness import assert_faultless, watched


@pytest.mark.parametrize("case", CASES, ids=lambda each: each.name)
def test_a_case_moves_what_it_must(case):
    library = watched()
    case.run(library)
    assert_faultless(library)
    counts = library.report().kernels
    assert set(counts) == set(case.must_move)
    for name, must_move in case.must_move.items():
        seen = counts[name]
        assert must_move <= seen.bytes_moved <= 1.05 * must_move, name
        assert seen.bank_conflicts == 0, name
        assert name in case.scattered or seen.sectors <= 1.1 * seen.ideal_sectors, name
