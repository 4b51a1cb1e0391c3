"""The section `data_efficiency` of a DeepSpeed JSON: lengths, metrics, and what cannot be."""

from __future__ import annotations

from typing import Any

from tests.config.deepspeed.data_efficiency_keys import (
    LEARNING,
    METRICS,
    SAMPLED,
    SAMPLING,
    SWITCHES,
    TO_2048,
    TRUNCATE,
    metric,
)
from tests.config.deepspeed.reading import read
from tests.tables import over_table


@over_table("name", ["seqlen", "seqlen_truncate", "seqlen_reshape"])
def test_a_single_cluster_of_lengths_cuts_and_draws_nothing(name: str) -> None:
    """A published example's; its index paths are placeholders."""
    result = read(metric(name))
    kind = {"curriculum.seqlen_kind": "reshape" if name == "seqlen_reshape" else "truncate"}
    assert result.problems == []
    assert result.values == {**TO_2048, **kind}
    levels = {"difficulty": [80, 2048], "max_step": [9]}
    discrete = read(metric(name, schedule_type="fixed_discrete", schedule_config=levels))
    assert discrete.values == {
        **kind,
        "curriculum.seqlen_schedule": "fixed_discrete",
        "curriculum.seqlen_difficulty": (80, 2048),
        "curriculum.seqlen_max_step": (9,),
    }


def test_by_length_samples_are_drawn_as_by_any_metric() -> None:
    found = read(metric("seqlen", clustering_type="schedule_based")).values
    (by_length,) = found.pop("data_sampling.curriculum_metrics")
    assert (by_length.name, by_length.max_difficulty, found) == ("seqlen", 2048, {})


@over_table(
    ("values", "says"),
    [
        (
            metric("seqlen_reshape", clustering_type="schedule_based"),
            f"`{METRICS}.seqlen_reshape.clustering_type` must be single_cluster, as samples are cut after",
        ),
        (
            metric("vocabularyrarity", clustering_type="single_cluster"),
            f"`{METRICS}.vocabularyrarity.clustering_type` must be schedule_based, as a single_cluster is",
        ),
        (
            metric("seqlen_truncate", clustering_type="schedule_based"),
            f"`{METRICS}.seqlen_truncate.clustering_type` must be single_cluster, as samples are cut after",
        ),
        (
            metric("seqlen_truncate", difficulty_type="percentile"),
            f"`{METRICS}.seqlen_truncate.difficulty_type` must be value for a length, but is percentile.",
        ),
        (
            {**SWITCHES, METRICS: {"seqlen": TRUNCATE, "seqlen_truncate": TRUNCATE}},
            f"`{METRICS}` must have one length at most, but has seqlen and seqlen_truncate; keep one.",
        ),
        (
            metric("vocabularyrarity", min_dificulty=1),
            f"unknown key `{METRICS}.vocabularyrarity.min_dificulty`; did you mean `min_difficulty`?",
        ),
        (
            SWITCHES,
            f"`{METRICS}` must name metrics where `{LEARNING}.enabled` is true, but does not; name one.",
        ),
        (
            {
                **metric("seqlen_truncate"),
                "curriculum_learning.enabled": True,
                "curriculum_learning.schedule_type": "fixed_root",
            },
            "`curriculum.seqlen_schedule` must be set one way",
        ),
        ({"data_efficiency.data_samping": {}}, "did you mean `data_efficiency.data_sampling`?"),
    ],
)
def test_data_efficiency_that_cannot_be(values: dict[str, Any], says: str) -> None:
    (problem,) = read(values).problems
    assert says in problem
    assert problem.endswith((".", "?"))
    assert not problem.endswith("?.")


def test_batches_of_many_sizes_are_for_an_engine_alone() -> None:
    result = read({**SAMPLED, f"{SAMPLING}.dynamic_batching": {"enabled": True, "max_tokens": 9}})
    assert not result.problems
    (problem,) = result.script_problems
    assert "all batches of a step have as many samples" in problem
    assert result.extras.sections["dynamic_batching"] == {"enabled": True, "max_tokens": 9}


def test_every_fault_of_metrics_is_reported() -> None:
    wrong = metric("seqlen_reshape", difficulty_type="percentile")
    both = {**wrong[METRICS], **metric("voc", max_difficulty="all")[METRICS], "x": 3}
    problems = read({**SWITCHES, METRICS: both}).problems
    assert len(problems) == 3
    assert all(METRICS in line for line in problems)


@over_table("off", SWITCHES)
def test_what_a_switch_is_off_for_has_no_effect(off: str) -> None:
    """Megatron-DeepSpeed's scripts write the whole section and turn parts of it off."""
    rest = {"data_efficiency.seed": 1, f"{SAMPLING}.dynamic_batching": {"enabled": True}}
    if off == f"{LEARNING}.enabled":
        del rest[f"{SAMPLING}.dynamic_batching"]
    result = read({**SAMPLED, **rest, off: False})
    assert (result.problems, result.values) == ([], {})
    assert {f"`{off}` is false"} == {each.reason for each in result.ignored}
    assert {METRICS, *rest} <= {each.key for each in result.ignored}
