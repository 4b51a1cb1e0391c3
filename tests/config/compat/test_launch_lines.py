"""The launch lines of both Megatrons: each is accepted, or refused for a feature that is not built."""

from __future__ import annotations

import os
from collections import Counter
from functools import cache

import pytest

from tests.config.compat.launch_lines import (
    FAMILIES,
    PAGE,
    TITLES,
    LaunchLine,
    Outcome,
    judge,
    page,
    read_lines,
)

OTHERS = {
    "chunks_within_layers": "six layers in eight chunks, with the embedding and the loss counted as layers",
    "experts_over_expert_ranks": "fewer experts than ranks for them, at which Megatron-DeepSpeed fails too",
    "pyramid_has_all_layers": "a pyramid whose interval is left to Megatron-DeepSpeed's default",
    "data_source_given": "the data of fine-tuning on conversations",
    "fp8_needs_dense_layers": "experts whose products are of 8-bit floats",
    "--fp8-recipe mxfp8": "scales of blocks of 32 elements",
    "--fp8-recipe blockwise": "scales of blocks",
    "flags contradict the JSON": "two batch sizes or learning rates or types in one script",
}
"""Other reasons for a refusal, with what the script does."""


@cache
def judged() -> tuple[tuple[LaunchLine, Outcome], ...]:
    return tuple((line, judge(line)) for line in read_lines())


def test_the_corpora_are_whole() -> None:
    lines = read_lines()
    assert Counter(line.corpus for line in lines) == {
        "megatron_deepspeed": 62,
        "megatron_lm_examples": 18,
        "megatron_lm_tests": 151,
    }
    assert len({line.origin for line in lines}) == len(lines)
    assert sum(line.corpus == "megatron_deepspeed" and line.program in FAMILIES for line in lines) == 53


def test_no_line_holds_an_unknown_flag() -> None:
    assert [(line.origin, outcome.unknown) for line, outcome in judged() if outcome.unknown] == []


def test_a_line_is_refused_only_for_a_feature_or_a_reason_that_is_listed() -> None:
    listed = OTHERS.keys()
    unlisted = [
        (line.origin, outcome.others - listed) for line, outcome in judged() if outcome.others - listed
    ]
    assert unlisted == []


def test_a_flag_that_is_said_another_way_is_rare() -> None:
    """Alone it stops only two lines that place layers on stages by hand, two that shard otherwise, and
    one that has index files of another program.
    """
    alone = [line.origin for line, outcome in judged() if outcome.rewrites and not outcome.features]
    assert alone.pop(0).endswith("1.3B_dense_base_script.sh (curriculum and random-LTD)")
    assert [origin.split("_mcore_")[1].split("/")[0] for origin in alone] == [
        "te_tp1_pp4_vp1_uneven_pipeline",
        "te_tp1_pp4_vp2_account_for_embedding_loss_in_pipeline_split",
        "te_tp2_zp_z3_resume_torch_dist_te_8experts2parallel_top2router",
        "tp4_cp2_current_scaling_native_fp8_tp_fsdp",
    ]


def test_the_page_is_current() -> None:
    text = page(judged())
    if os.environ.get("MEGAZERO_UPDATE_SNAPSHOTS"):
        PAGE.write_text(text, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        (Outcome(), "passes"),
        (Outcome(rewrites=frozenset({"--x"})), "rewrite"),
        (Outcome(rewrites=frozenset({"--x"}), others=frozenset({"rule"})), "other"),
        (Outcome(unknown=frozenset({"--x"})), "other"),
        (Outcome(features=frozenset({"upcycling"}), others=frozenset({"rule"})), "feature"),
    ],
)
def test_the_first_reason_counts(outcome: Outcome, kind: str) -> None:
    assert outcome.kind == kind


def test_each_corpus_has_a_title() -> None:
    assert {line.corpus for line in read_lines()} == set(TITLES)
