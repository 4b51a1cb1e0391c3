"""The study of experts: what its members cost, as its base says."""

from __future__ import annotations

import pytest

from megazero.ablate.sizes import size_of
from megazero.ablate.study import Wishes, read_study
from tests.source_tree import ROOT


def test_a_token_costs_the_same_in_every_member():
    """So a difference in the loss is one of the parameters that there are to choose from.

    But for the student, which is to be smaller than its teacher.
    """
    members = read_study(ROOT / "examples_3d/moe", Wishes(flags=("--mock-data",))).members
    sizes = {member.name: size_of(member.config) for member in members}
    dense, student = sizes.pop("dense"), sizes.pop("mos-student")
    assert student.active_parameters < sizes["pr-moe"].active_parameters
    assert len(sizes) >= 6
    for name, size in sizes.items():
        assert size.flops_per_token == pytest.approx(dense.flops_per_token, rel=0.03), name
        assert size.active_parameters == pytest.approx(dense.active_parameters, rel=0.03), name


def test_the_student_learns_from_the_member_of_that_name():
    members = read_study(ROOT / "examples_3d/moe", Wishes(flags=("--mock-data",), steps=90)).members
    (student,) = (member for member in members if member.teacher is not None)
    assert (student.name, student.teacher) == ("mos-student", "pr-moe")
    assert student.config.distillation.kd_train_iters == 63
