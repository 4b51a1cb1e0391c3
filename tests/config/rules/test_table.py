"""Every rule has an example that breaks it and no other; the base configuration breaks none."""

from __future__ import annotations

from typing import Any

import pytest

from megazero.config.fields import FIELD_BY_PATH, FIELDS
from megazero.config.rules.notes import notes_on
from megazero.config.rules.rule import Case
from megazero.config.rules.table import RULES, broken_rules, check
from tests.config.rules.examples import ACCEPTED, EXAMPLES, WORLD
from tests.config.samples import make_config
from tests.tables import over_table

pytestmark = pytest.mark.fast


def test_the_examples_are_of_all_rules() -> None:
    names = [rule.name for rule in RULES]
    assert sorted(names) == sorted(EXAMPLES)


@over_table("name", EXAMPLES)
def test_the_example_breaks_its_rule_alone(name: str) -> None:
    config = make_config(EXAMPLES[name])
    assert broken_rules(config, WORLD) == [name]
    (sentence,) = check(config, WORLD)
    assert " must " in sentence
    assert ", but " in sentence
    assert sentence.endswith(f"[rule {name}].")


@over_table("changes", ACCEPTED)
def test_accepted(changes: dict[str, Any]) -> None:
    assert check(make_config(changes), WORLD) == []


def test_without_a_world_size_only_its_rules_are_silent() -> None:
    silent = {name for name, changes in EXAMPLES.items() if not check(make_config(changes), None)}
    assert silent == {
        "world_size_factors",
        "global_batch_multiple",
        "ramp_multiples",
        "samples_fill_a_batch",
        "tokens_countable",
        "interleaved_micro_batches",
        "hpz_divides_data_parallel",
        "node_size_divides_data_parallel",
        "expert_ranks_fill_stages",
        "warmup_shorter_than_decay",
        "wsd_decay_fits",
    }


@over_table(
    ("partition", "fault"),
    [
        ("parameter", "it is not one of uniform, parameters, cost, measured, type:REGEX or"),
        ("Uniform", "it is not one of"),
        ("", "it is not one of"),
        ("4,", "it is not one of"),
        ("2,-1,3", "it is not one of"),
        ("type:", "the regular expression is empty"),
        ("type:(", "the regular expression is not valid: missing ), unterminated subpattern at position 0"),
        ("1,3,0", "2 positive numbers that add up to 4 are needed"),
        ("4,0", "2 positive numbers that add up to 4 are needed"),
        ("2,3", "2 positive numbers that add up to 4 are needed"),
        ("4", "2 positive numbers that add up to 4 are needed"),
    ],
)
def test_what_is_wrong_with_a_partition_is_said(partition: str, fault: str) -> None:
    changes = {"parallel.pipeline_model_parallel_size": 2, "parallel.pipeline_partition": partition}
    (sentence,) = check(make_config(changes), 2)
    assert f"({fault}" in sentence


def test_too_many_chunks_are_told_how_many_fit() -> None:
    changes = {"parallel.pipeline_model_parallel_size": 4, "parallel.pipeline_schedule": "zb-v"}
    (sentence,) = check(make_config(changes), 4)
    assert "(that makes 8 chunks; 4 layers suffice for 2 stages of 2)" in sentence


def test_interleaved_micro_batches_are_judged_at_every_rung_of_the_ramp() -> None:
    changes = {
        "parallel.pipeline_model_parallel_size": 2,
        "parallel.num_layers_per_virtual_pipeline_stage": 1,
        "batch.global_batch_size": 16,
        "batch.rampup_batch_size": (8, 4, 100),
    }
    (sentence,) = check(make_config(changes), 4)
    assert "(micro-batches per step: 2, 3, 4)" in sentence
    grouped = {"parallel.microbatch_group_size_per_virtual_pipeline_stage": 3}
    (sentence,) = check(make_config({**changes, **grouped}), 4)
    assert "_group_size_per_virtual_pipeline_stage` is 3" in sentence  # neither 2 nor 4 come out in threes
    steady = {"batch.global_batch_size": 20, "batch.rampup_batch_size": None}  # 5: 3 and 2
    assert check(make_config({**changes, **grouped, **steady}), 4) == []
    assert notes_on(make_config({**changes, **grouped})) == []
    (note,) = notes_on(make_config(grouped))
    assert note.endswith(
        " no effect without the interleaved schedule: micro-batches do not pass through chunks in groups."
    )


def test_rows_longer_than_samples_are_refused() -> None:
    """No sample fills one, and where nothing was counted a rule divided by nothing."""
    changes = {**EXAMPLES["seqlen_within_sequences"], "curriculum.seqlen_kind": "reshape"}
    assert broken_rules(make_config(changes), WORLD) == ["seqlen_within_sequences"]


def test_a_warmup_starts_below_each_peak() -> None:
    """Only `lr` was looked at, and the schedule of the embedding failed once the model was built."""
    changes = {"optimizer.decoupled_lr": 1e-5, "optimizer.lr_warmup_init": 1e-4}
    assert broken_rules(make_config(changes), WORLD) == ["warmup_starts_below_lr"]
    assert check(make_config({**changes, "optimizer.lr_warmup_init": 1e-5}), WORLD) == []


def test_a_prepared_index_is_of_no_file_with_a_blend() -> None:
    changes = {**EXAMPLES["prepared_index_of_one_dataset"], "data.data_path": ("@blend.txt",)}
    assert broken_rules(make_config(changes), WORLD) == ["prepared_index_of_one_dataset"]


def test_violations_are_reported_together() -> None:
    changes = {
        **EXAMPLES["min_lr_below_lr"],
        **EXAMPLES["blend_in_pairs"],
        **EXAMPLES["positions_cover_sequence"],
    }
    assert broken_rules(make_config(changes), WORLD) == [
        "positions_cover_sequence",
        "min_lr_below_lr",
        "blend_in_pairs",
    ]


def test_a_violation_reads_as_a_sentence_with_values_and_what_would_do() -> None:
    changes = {"parallel.tensor_model_parallel_size": 4, "model.num_query_groups": 2}
    assert check(make_config(changes), 6) == [
        "the world size must be a multiple of tensor x pipeline x context parallel size, but "
        "`tensor_model_parallel_size` is 4 and `pipeline_model_parallel_size` is 1 and "
        "`context_parallel_size` is 1 (the world size is 6: tensor x pipeline x data parallel can be "
        "2 x 1 x 3, 1 x 1 x 6, 2 x 3 x 1, 1 x 2 x 3, 1 x 3 x 2); start another number of ranks (torchrun "
        "--nproc-per-node; with --check-config set WORLD_SIZE), or change the layout "
        "[rule world_size_factors].",
        "`num_query_groups` must be a multiple of `tensor_model_parallel_size`, but `num_query_groups` is 2 "
        "and `tensor_model_parallel_size` is 4; use more query groups or fewer tensor-parallel ranks "
        "[rule query_groups_over_tensor_ranks].",
    ]


@over_table("rule", RULES, ids=lambda rule: rule.name)
def test_names_and_fields_are_real(rule: Any) -> None:
    assert rule.fields
    assert all(path in FIELD_BY_PATH for path in rule.fields)
    assert not rule.remedy.endswith(".")


def test_rules_on_unsound_fields_are_left_out() -> None:
    config = make_config(EXAMPLES["min_lr_below_lr"])
    assert check(config, WORLD, {"optimizer.lr"}) == []
    for spec in FIELDS:
        assert check(make_config(), WORLD, {spec.path}) == []


@over_table(
    ("path", "accepted"),
    [
        (("a", "b"), True),  # each in proportion to its size, as in Megatron-Core
        (("a", "b", "c"), True),
        (("0.3", "a", "0.7", "b"), True),
        (("-1", "a", "1", "b"), False),
        (("a", "0.3", "b", "0.7"), False),
        (("0.3", "a", "b", "c"), False),
    ],
)
def test_a_data_path_is_prefixes_or_pairs(path, accepted):
    rule = next(rule for rule in RULES if rule.name == "blend_in_pairs")
    assert rule.holds(Case(make_config({"data.data_path": path}), WORLD)) is accepted


def test_prepared_sentences_are_refused_where_they_would_not_be_read() -> None:
    """A T5 and random text were trained with an index that is built, and said so at most in a note."""
    for changes in ({"model.family": "t5"}, {"model.family": "bert", "data.mock_data": True}):
        sentences = check(make_config({**changes, "data.train_idx_path": "rows.npy"}), 4)
        assert [line for line in sentences if line.endswith("[rule needs_of_train_idx_path].")]
