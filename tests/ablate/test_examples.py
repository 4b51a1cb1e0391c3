"""The study of experts: what its members cost, as its base says."""

from __future__ import annotations

import pytest

from megazero.ablate.corpus import Corpus
from megazero.ablate.sizes import size_of
from megazero.ablate.study import StudyOptions, read_study
from megazero.config.training_plan import training_plan_of
from tests.source_tree import ROOT


def test_a_token_costs_the_same_in_every_member():
    """So a difference in the loss is one of the parameters that there are to choose from.

    But for the student, which is to be smaller than its teacher.
    """
    members = read_study(ROOT / "examples_3d/moe", StudyOptions(flags=("--mock-data",))).members
    sizes = {member.name: size_of(member.config) for member in members}
    dense, student = sizes.pop("dense"), sizes.pop("mos-student")
    assert student.active_parameters < sizes["pr-moe"].active_parameters
    assert len(sizes) >= 6
    for name, size in sizes.items():
        assert size.flops_per_token == pytest.approx(dense.flops_per_token, rel=0.03), name
        assert size.active_parameters == pytest.approx(dense.active_parameters, rel=0.03), name


def test_the_student_learns_from_the_member_of_that_name():
    members = read_study(ROOT / "examples_3d/moe", StudyOptions(flags=("--mock-data",), steps=90)).members
    (student,) = (member for member in members if member.teacher is not None)
    assert (student.name, student.teacher) == ("mos-student", "pr-moe")
    assert student.config.distillation.kd_train_iters == 63


@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_members_of_the_data_efficiency_study_differ_in_its_methods_alone(tmp_path, family):
    """At each length, all consume as many tokens, to a step, and get to the end of their ramps."""
    shares = (1.0, 0.67, 0.5)
    corpus = {family: Corpus(tmp_path, family).flags}
    members = read_study(
        ROOT / "examples_3d/data_efficiency" / family, StudyOptions(shares=shares, corpus=corpus)
    ).members
    assert len(members) == 6 * len(shares)
    methods = {"curriculum", "data_sampling", "skipping"}
    plain = {share: next(m for m in members if m.name == name("plain", share)) for share in shares}
    for member in members:
        share = next(s for s in shares if member.name == name(member.file, s))
        config, base = member.config, plain[share].config
        assert {s for s in type(config).model_fields if getattr(config, s) != getattr(base, s)} <= methods
        tokens = base.training.train_tokens
        assert tokens == round(plain[1.0].config.training.train_tokens * share)
        training_plan = training_plan_of(config, 1)
        assert (
            0 <= training_plan.end.tokens - tokens < config.batch.global_batch_size * config.model.seq_length
        )
        last = training_plan.at(training_plan.before(training_plan.end.iteration - 1))
        assert last.sequence_length == config.model.seq_length
        if config.skipping.random_ltd:
            assert last.kept_tokens is None or last.kept_tokens > 0.9 * config.model.seq_length
            halfway = training_plan.at(training_plan.before(2 * training_plan.end.iteration // 3))
            assert halfway.kept_tokens < halfway.sequence_length


def name(file: str, share: float) -> str:
    return file if share == 1 else f"{file}@{share:g}"
