"""The launch lines of both Megatrons: each is accepted, or refused for a feature that is not built."""

from __future__ import annotations

import os
from collections import Counter
from functools import cache
from itertools import takewhile

import pytest

from megazero.config.resolve import parse_config
from tests.config.compat.launch_lines import (
    FAMILIES,
    JSON_NAME,
    PAGE,
    TITLES,
    LaunchLine,
    Outcome,
    first_sight,
    judge,
    page,
    read_lines,
)

OTHERS = {
    "layers over stages": "a stage without a layer, or ends that are counted as layers of several chunks",
    "the model is not given": "a model that a checkpoint describes",
    "--optimizer adafactor": "an optimizer that looks at whole matrices",
    "chunks_within_layers": "six layers in eight chunks, with the embedding and the loss counted as layers",
    "data_source_given": "the data of fine-tuning on conversations, or a script that names none",
    "needs_of_fp8_format": "experts whose products are of 8-bit floats",
    "--fp8-recipe mxfp8": "scales of blocks of 32 elements",
    "--fp8-recipe blockwise": "scales of blocks",
    "flags contradict the JSON": "two types in one script",
    **dict.fromkeys(
        ("needs_of_q_lora_rank", "needs_of_rope_type"),
        "sizes of latent attention for layers that are not built",
    ),
    "needs_of_lr_warmup_fraction": "two lengths of warmup, which Megatron-LM refuses too",
    "unknown key fp16.autocast": "a key that DeepSpeed does not have, and does not read",
    "unknown key profiling": "a key that DeepSpeed does not have, and does not read",
    "unknown key veloc_config": "a key of a fork of DeepSpeed's",
    "needs_of_main_params_dtype": "weights of the optimizer in another half precision than the model's",
    "--optimizer onebitadam": "an optimizer of DeepSpeed's JSON, among the flags",
    "`--verify-checkpoint` must be followed by a value (full | size).": "a fork's switch of this name",
    "needs_of_tokenizer_type": "merges that are not given, which Megatron-LM needs too",
    "--lr-wsd-decay-iters 0": "a final decay without a step",
    "--moe-router-load-balancing-type global_batch_loss": "a fork's loss of balance",
    "--tokenizer-type TikTokenizer": "a tokenizer's file of another kind",
    "hybrid_pattern_length": "a pattern of 13 letters for 12 layers, which Megatron-LM refuses too",
}
"""Other reasons for a refusal, with what the script does."""


@cache
def judged() -> tuple[tuple[LaunchLine, Outcome], ...]:
    return tuple((line, judge(line)) for line in read_lines())


def test_the_corpora_are_whole() -> None:
    lines = read_lines()
    assert Counter(line.corpus for line in lines) == {
        "megatron_deepspeed": 76,
        "megatron_lm_examples": 28,
        "megatron_lm_tests": 151,
        "forks": 49,
        "forks_held_out": 73,
    }
    assert len({line.origin for line in lines}) == len(lines)
    assert sum(line.corpus == "megatron_deepspeed" and line.program in FAMILIES for line in lines) == 65


def test_no_line_by_which_tables_are_written_holds_an_unknown_flag() -> None:
    unknown = [(line.origin, outcome.unknown) for line, outcome in judged() if outcome.unknown]
    held_out = {line.origin for line in read_lines() if line.corpus == "forks_held_out"}
    assert [(origin, flags) for origin, flags in unknown if origin not in held_out] == []


def test_lines_that_were_accepted_at_first_sight_still_are() -> None:
    kinds = {line.origin: outcome.kind for line, outcome in judged() if line.corpus.startswith("forks")}
    readings = first_sight()
    counts = {reading: (len(verdicts), sum(verdicts.values())) for reading, verdicts in readings.items()}
    assert counts == {"1": (42, 21), "2": (35, 16), "3": (16, 11)}
    verdicts = {origin: accepted for reading in readings.values() for origin, accepted in reading.items()}
    assert len(verdicts) == sum(map(len, readings.values()))
    assert [origin for origin, accepted in verdicts.items() if accepted and kinds[origin] != "passes"] == []
    assert verdicts.keys() <= kinds.keys()


def test_a_line_is_refused_only_for_a_feature_or_a_reason_that_is_listed() -> None:
    listed = OTHERS.keys()
    unlisted = [
        (line.origin, outcome.others - listed) for line, outcome in judged() if outcome.others - listed
    ]
    assert unlisted == []


def _experts_of_megatron_deepspeed(layers: int, counts: list[int]) -> tuple[int, ...]:
    """Experts of each layer at its interval of 2: layers 2, 4 and so on, counted from 1, have some."""
    places = iter(counts * (layers if len(counts) == 1 else 1))
    return tuple(next(places) if number % 2 == 0 else 0 for number in range(1, layers + 1))


def test_lines_with_experts_give_megatron_deepspeeds_model() -> None:
    """Experts in every second layer, pyramids included, one of them for each token, and its capacities.

    Where a layer has fewer experts than ranks for them, all layers' experts are over as many ranks as it has.
    """
    lines = [line for line in read_lines() if "--num-experts" in line.argv and line.program in FAMILIES]
    shapes = {}
    for line in lines:
        argv = [token for token in line.argv if token not in ("--deepspeed", "--deepspeed_config", JSON_NAME)]
        start = argv.index("--num-experts") + 1
        counts = [int(token) for token in takewhile(str.isdigit, argv[start:])]
        if counts == [1] or line.corpus != "megatron_deepspeed":
            continue
        ranks = argv.index("--moe-expert-parallel-size") + 1
        config = parse_config(argv, world_size=line.world_size).config
        model = config.model
        assert config.parallel.expert_model_parallel_size == min(int(argv[ranks]), *counts)
        assert model.experts_by_layer == _experts_of_megatron_deepspeed(model.num_layers, counts)
        assert (model.moe_router_topk, model.moe_router_pre_softmax) == (1, True)
        assert (model.moe_expert_capacity_factor, model.moe_eval_capacity_factor) == (1.0, 1.0)
        assert (model.moe_min_capacity, model.moe_aux_loss_coeff) == (4, (0.01,))
        assert (model.moe_token_drop_policy, model.moe_capacity_scope) == ("random", "micro_batch")
        shapes[line.origin.rpartition("ds_pretrain_gpt_")[2]] = model.experts_by_layer
    assert len(shapes) == 7
    assert shapes["350M_PR-MoE32or64.sh"] == (0, 32) * 10 + (0, 64) * 2
    assert shapes["1.3B_PR-MoE64or128_MoS.sh"] == (0, 64) * 8 + (0, 128) * 2 + (0,)


def test_no_line_is_refused_for_a_flag_that_is_said_another_way() -> None:
    assert [line.origin for line, outcome in judged() if outcome.rewrites and not outcome.features] == []


@pytest.mark.parametrize(("corpus", "least"), [("forks", 26), ("forks_held_out", 59)])
def test_lines_of_forks_are_accepted(corpus: str, least: int) -> None:
    kinds = Counter(outcome.kind for line, outcome in judged() if line.corpus == corpus)
    assert kinds["passes"] >= least


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
