"""Which layers have experts, how many, and what a model with experts says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from megazero.config.derive import (
    EXPERT_FIELDS,
    expert_tensor_size,
    filled_model,
    model_differences,
)
from megazero.config.fields import names_with
from megazero.config.resolve import Resolved, parse_config
from megazero.config.rules.table import check
from megazero.config.shown import shown_config
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.roles import Role
from megazero.errors import ConfigError
from megazero.spec.resolve import model_spec
from tests.config.samples import BASE_FLAGS, make_config
from tests.tables import over_table


def model(layers: int = 6, **settings: Any) -> ModelConfig:
    return ModelConfig(num_layers=layers, hidden_size=64, num_attention_heads=4, seq_length=32, **settings)


@over_table(
    ("settings", "experts"),
    [
        ({}, (0, 0, 0, 0, 0, 0)),
        ({"num_experts": 8}, (8, 8, 8, 8, 8, 8)),
        ({"num_experts": (8,), "moe_layer_freq": 2}, (8, 0, 8, 0, 8, 0)),
        ({"num_experts": (8,), "expert_interval": 2}, (0, 8, 0, 8, 0, 8)),
        ({"num_experts": (8,), "moe_layer_freq": 4}, (8, 0, 0, 0, 8, 0)),
        ({"num_experts": (8,), "expert_interval": 4}, (0, 0, 0, 8, 0, 0)),
        ({"num_experts": (8,), "expert_interval": 1}, (8, 8, 8, 8, 8, 8)),
        ({"num_experts": (8,), "moe_layer_freq": (0, 0, 1, 1, 0, 1)}, (0, 0, 8, 8, 0, 8)),
        ({"num_experts": (4, 8), "moe_layer_freq": (3,)}, (4, 0, 0, 8, 0, 0)),
        ({"num_experts": (4, 8, 16), "expert_interval": 2}, (0, 4, 0, 8, 0, 16)),
        ({"num_experts": (4, 8, 16), "moe_layer_freq": (0, 0, 1, 1, 0, 1)}, (0, 0, 4, 8, 0, 16)),
        # One expert is the dense MLP, in a pyramid too.
        ({"num_experts": (4, 1, 16), "expert_interval": 2}, (0, 4, 0, 0, 0, 16)),
        ({"num_experts": 1}, (0, 0, 0, 0, 0, 0)),
        ({"num_experts": (1, 1, 1)}, (0, 0, 0, 0, 0, 0)),
    ],
)
def test_experts_of_six_layers(settings: dict[str, Any], experts: tuple[int, ...]) -> None:
    found = model(**settings)
    assert tuple(found.experts_at(layer) for layer in range(6)) == experts
    assert model_spec(found).expert_layers == tuple(layer for layer, count in enumerate(experts) if count)
    assert found.experts_by_layer == (experts if found.num_experts else ())
    placed = sum(found.expert_place(layer) is not None for layer in range(6))
    assert found.expert_places == placed


def test_an_interval_that_does_not_divide_leaves_the_last_layers_dense() -> None:
    """DeepSpeed-MoE's student of 21 layers has ten with experts, as its list of ten says."""
    student = model(21, num_experts=(64,) * 8 + (128,) * 2, expert_interval=2)
    assert model_spec(student).expert_layers == (1, 3, 5, 7, 9, 11, 13, 15, 17, 19)
    assert student.experts_at(15) == 64
    assert student.experts_at(17) == 128


@over_table(
    "settings",
    [
        {"num_experts": 0},
        {"num_experts": (8, -1)},
        {"num_experts": True},
        {"moe_layer_freq": ()},
        {"moe_layer_freq": (-1,)},
        {"expert_interval": 0},
        {"moe_router_topk": 0},
        {"moe_expert_capacity_factor": 0},
        {"moe_aux_loss_coeff": ()},
        {"moe_aux_loss_coeff": (-0.1,)},
        {"moe_router_load_balancing_type": ()},
        {"moe_router_load_balancing_type": ("quantile_balancing",)},
        {"moe_input_jitter_eps": 1.0},
        {"moe_min_capacity": -1},
    ],
)
def test_values_out_of_range(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        model(**settings)


def test_a_negative_capacity_factor_is_none_as_in_megatron_lm() -> None:
    assert model(moe_expert_capacity_factor=-1.0).moe_expert_capacity_factor is None
    assert model(moe_eval_capacity_factor=-1).moe_eval_capacity_factor is None
    assert model(moe_expert_capacity_factor=1.25).moe_expert_capacity_factor == 1.25
    flags = ["--num-experts", "8", "--moe-expert-capacity-factor", "-1"]
    assert parse_config([*BASE_FLAGS, *flags]).config.model.moe_expert_capacity_factor is None


def test_sizes_that_follow() -> None:
    assert model().expert_ffn_size == 256
    assert model(activation="swiglu", moe_ffn_hidden_size=48).expert_ffn_size == 48
    assert filled_model(model(num_experts=4)).moe_ffn_hidden_size == 256
    assert filled_model(model()).moe_ffn_hidden_size is None
    parallel = {"parallel.tensor_model_parallel_size": 4}
    assert expert_tensor_size(make_config(parallel)) == 4
    assert expert_tensor_size(make_config({**parallel, "parallel.expert_tensor_parallel_size": 1})) == 1


@over_table(
    ("ours", "theirs", "differences"),
    [
        ({"num_experts": 8}, {"num_experts": (8,) * 6}, []),
        (
            {"num_experts": 8, "moe_layer_freq": 6},
            {"num_experts": 8, "moe_layer_freq": (1, 0, 0, 0, 0, 0)},
            [],
        ),
        (
            {"num_experts": 8, "moe_layer_freq": 3},
            {"num_experts": 8, "expert_interval": 3},
            [("num_experts", (8, 0, 0, 8, 0, 0), (0, 0, 8, 0, 0, 8))],
        ),
        ({"num_experts": 8}, {"num_experts": 8, "moe_ffn_hidden_size": 256}, []),
        (
            {"num_experts": 8},
            {"num_experts": 8, "moe_ffn_hidden_size": 64},
            [("moe_ffn_hidden_size", 256, 64)],
        ),
        # Without experts, settings about them say nothing.
        ({"moe_router_topk": 1, "expert_interval": 2}, {"moe_ffn_hidden_size": 8}, []),
        ({"num_experts": 8}, {}, [("num_experts", (8,) * 6, ())]),
    ],
)
def test_models_differ_by_what_their_settings_mean(ours: dict, theirs: dict, differences: list) -> None:
    fields = [name for name in ModelConfig.model_fields if name != "seq_length"]
    found = model_differences(model(**ours), model(**theirs), fields)
    assert found == differences


def test_expert_fields_are_the_new_ones() -> None:
    assert EXPERT_FIELDS[0] == "num_experts"
    assert "num_layers" not in EXPERT_FIELDS
    assert set(EXPERT_FIELDS) > set(names_with(Role.EXPERTS | Role.FREE))


def launched(flags: str, world_size: int = 4) -> tuple[str, ...]:
    return parse_config([*BASE_FLAGS, *flags.split()], world_size=world_size).warnings


@over_table(
    ("flags", "note"),
    [
        (
            "--moe-router-topk 1 --expert-interval 2",
            "`expert_interval` and `moe_router_topk` have no effect without `num_experts`: no layer has "
            "experts.",
        ),
        (
            "--expert-tensor-parallel-size 2",
            "`expert_tensor_parallel_size` has no effect without `num_experts`: no layer has experts.",
        ),
        (
            "--num-experts 8 --moe-router-bias-update-rate 1e-2",
            "`moe_router_bias_update_rate` has no effect without `moe_router_enable_expert_bias`: the choice "
            "has no bias.",
        ),
        (
            "--num-experts 8 --moe-router-score-function sigmoid --moe-router-pre-softmax",
            "`moe_router_pre_softmax` has no effect without `--moe-router-score-function softmax`: sigmoid "
            "scores are taken before the choice anyway.",
        ),
        (
            "--num-experts 8 --moe-router-load-balancing-type none --moe-aux-loss-coeff 0.1",
            "`moe_aux_loss_coeff` has no effect without a `moe_router_load_balancing_type`: no loss balances "
            "the experts.",
        ),
        (
            "--num-experts 8 --moe-min-capacity 4 --moe-token-drop-policy position",
            "`moe_min_capacity` and `moe_token_drop_policy` have no effect without "
            "`moe_expert_capacity_factor`: no token is dropped.",
        ),
        # 32 tokens give each of 8 experts 8 of the choices.
        (
            "--num-experts 8 --moe-expert-capacity-factor 1 --moe-min-capacity 9",
            "`moe_expert_capacity_factor` has no effect without a smaller `moe_min_capacity`: it gives an "
            "expert less than that, and the larger one counts.",
        ),
        # A script for Megatron-DeepSpeed that leaves its defaults unsaid.
        (
            "--num-experts 8 --moe-loss-coeff 0.01 --moe-train-capacity-factor 1.0 --moe-min-capacity 4",
            "`--moe-loss-coeff` is Megatron-DeepSpeed's, so what is left out about experts means what it "
            "means there: `--moe-router-topk 1 --expert-interval 2 --moe-router-pre-softmax "
            "--moe-eval-capacity-factor 1.0 --moe-token-drop-policy random --moe-capacity-scope "
            "micro_batch`; any of these flags changes it.",
        ),
        (
            "--num-experts 8 --topk 2 --expert-interval 2",
            "`--topk` is Megatron-DeepSpeed's, so what is left out about experts means what it means "
            "there: `--moe-router-sampling second --moe-expert-capacity-factor 1.0 "
            "--moe-eval-capacity-factor 1.0 --moe-min-capacity 4 --moe-token-drop-policy position "
            "--moe-capacity-scope micro_batch --moe-aux-loss-coeff 0.1`; any of these flags changes it.",
        ),
    ],
)
def test_what_has_no_effect_is_said(flags: str, note: str) -> None:
    assert launched(flags) == (note,)


@over_table(
    "flags",
    [
        "--num-experts 8",
        "--num-experts 8 --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 1e-3",
        "--num-experts 8 --topk 2 --expert-interval 2 --moe-loss-coeff 0 --moe-train-capacity-factor 2 "
        "--moe-min-capacity 4 --moe-router-sampling second --moe-eval-capacity-factor 2 "
        "--moe-token-drop-policy probs --moe-capacity-scope sequence",
        "--num-experts 8 --moe-expert-capacity-factor 1 --moe-min-capacity 8",
        # Names that Megatron-DeepSpeed shares, beside one of Megatron-LM's.
        "--num-experts 8 --expert-interval 2 --moe-router-topk 2",
        "--num-experts 8 8 --expert-interval 2 --mlp-type residual --moe-router-load-balancing-type none",
        "--num-experts 8 --topk 2 --moe-layer-freq 1 --moe-loss-coeff 0 --disable-moe-token-dropping "
        "--disable-moe-top2-2nd-expert-sampling",
        "--num-experts 8 --topk 3 --moe-layer-freq 1 --moe-loss-coeff 0 --disable-moe-token-dropping",
        "--num-experts 1 --expert-model-parallel-size 1",
    ],
)
def test_what_is_said_whole_is_not_remarked_on(flags: str) -> None:
    assert launched(flags) == ()


MEGATRON_DEEPSPEED = {
    "moe_router_topk": 1,
    "moe_router_pre_softmax": True,
    "moe_router_sampling": "none",
    "expert_interval": 2,
    "moe_layer_freq": None,
    "moe_expert_capacity_factor": 1.0,
    "moe_eval_capacity_factor": 1.0,
    "moe_min_capacity": 4,
    "moe_token_drop_policy": "random",
    "moe_capacity_scope": "micro_batch",
    "moe_aux_loss_coeff": (0.1,),
}
"""The model of `--num-experts` alone in Megatron-DeepSpeed."""

NO_DROPS = {
    "moe_expert_capacity_factor": None,
    "moe_eval_capacity_factor": None,
    "moe_min_capacity": 0,
    "moe_token_drop_policy": "probs",
    "moe_capacity_scope": "sequence",
}
TWO = {"moe_router_topk": 2, "moe_router_pre_softmax": False, "moe_token_drop_policy": "position"}


@over_table(
    ("flags", "differs"),
    [
        ("--num-experts 4 --moe-expert-parallel-size 2", {}),
        ("--num-experts 4 --create-moe-param-group", {}),
        ("--num-experts 4 --use-tutel", {}),
        ("--num-experts 4 --mlp-type residual", {"mlp_type": "residual"}),
        ("--num-experts 4 --expert-interval 1", {"expert_interval": 1}),
        ("--num-experts 4 --enable-expert-tensor-parallelism", {}),
        ("--num-experts 2 4", {"num_experts": (2, 4)}),
        ("--num-experts 4 --moe-min-capacity 0", {"moe_min_capacity": 0}),
        ("--num-experts 4 --moe-eval-capacity-factor 2", {"moe_eval_capacity_factor": 2.0}),
        ("--num-experts 4 --moe-loss-coeff 0.01", {"moe_aux_loss_coeff": (0.01,)}),
        ("--num-experts 4 --topk 2", {**TWO, "moe_router_sampling": "second"}),
        ("--num-experts 4 --topk 2 --disable-moe-top2-2nd-expert-sampling", TWO),
        ("--num-experts 4 --topk 3", {**TWO, "moe_router_topk": 3, "moe_token_drop_policy": "probs"}),
        (
            "--num-experts 4 --disable-moe-token-dropping --moe-train-capacity-factor 1.0 "
            "--moe-eval-capacity-factor 1.0 --moe-min-capacity 4",
            {**NO_DROPS, "moe_min_capacity": 4},
        ),
        # One spelling of Megatron-DeepSpeed alone decides, whatever else is there.
        ("--num-experts 4 --topk 1 --moe-z-loss-coeff 1e-3", {"moe_z_loss_coeff": 1e-3}),
        ("--num-experts 4 --topk 1 --moe-layer-freq 4", {"expert_interval": None, "moe_layer_freq": (4,)}),
    ],
)
def test_a_line_of_megatron_deepspeed_gives_its_model(flags: str, differs: dict[str, Any]) -> None:
    launched = parse_config([*BASE_FLAGS, *flags.split()], world_size=2).config.model
    expected = {**MEGATRON_DEEPSPEED, **differs}
    assert {name: getattr(launched, name) for name in expected} == expected


def test_megatron_deepspeeds_experts_are_on_no_more_ranks_than_a_layer_has() -> None:
    def read(flags: str) -> Resolved:
        return parse_config([*BASE_FLAGS, *flags.split()], world_size=4)

    resolved = read("--num-experts 2 4 --moe-expert-parallel-size 4")
    assert resolved.config.parallel.expert_model_parallel_size == 2
    said = "`--moe-expert-parallel-size 4` is read as 2, as a layer has only 2 experts; the numbers are the "
    assert f"{said}same." in resolved.warnings
    for flags in (
        "--num-experts 3 4 --moe-expert-parallel-size 4",
        "--num-experts 6 --moe-expert-parallel-size 4",
        "--num-experts 2 --expert-model-parallel-size 4",
    ):
        with pytest.raises(ConfigError, match="experts_over_expert_ranks"):
            read(flags)


def test_experts_of_megatron_deepspeed_are_whole_unless_it_is_asked_for_otherwise() -> None:
    flags = [*BASE_FLAGS, "--num-experts", "4", "--topk", "1", "--tensor-model-parallel-size", "2"]
    assert expert_tensor_size(parse_config(flags, world_size=2).config) == 1
    cut = [*flags, "--enable-expert-tensor-parallelism"]
    assert expert_tensor_size(parse_config(cut, world_size=2).config) == 2


def test_experts_in_a_file_are_not_megatron_deepspeeds(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {num_experts: 4, expert_interval: 4, mlp_type: residual}\n")
    launched = parse_config([*BASE_FLAGS, "--config", str(file)])
    assert (launched.config.model.moe_router_topk, launched.warnings) == (2, ())


def test_bad_settings_of_experts_are_refused_together() -> None:
    flags = (
        "--num-experts 6 12 --expert-model-parallel-size 4 --moe-router-topk 7 --moe-router-num-groups 5 "
        "--moe-router-enable-expert-bias --moe-router-load-balancing-type aux_loss none "
        "--moe-pad-expert-input-to-capacity --moe-shared-expert-gate"
    )
    with pytest.raises(ConfigError) as caught:
        launched(flags)
    assert [line.rpartition("[rule ")[2].rstrip("].") for line in caught.value.violations] == [
        "needs_of_moe_shared_expert_gate",
        "needs_of_moe_router_num_groups",
        "needs_of_moe_router_enable_expert_bias",
        "needs_of_moe_pad_expert_input_to_capacity",
        "experts_over_expert_ranks",
        "pyramid_has_all_layers",
        "topk_within_experts",
        "router_groups_divide_experts",
        "balance_is_one",
        "balance_has_coefficients",
    ]


@over_table(
    ("changes", "says"),
    [
        (
            {"model.num_experts": (8, 8, 8)},
            "`num_experts` must be one number, or one for each layer with experts, but `num_experts` is 8 8 "
            "8 and `moe_layer_freq` is not set and `expert_interval` is not set (layers with experts: 4); "
            "name as many",
        ),
        (
            {"model.num_experts": (8,), "model.moe_layer_freq": (1, 2, 1, 1)},
            "a 0 or 1 for each layer, but `moe_layer_freq` is 1 2 1 1 and `model.num_layers` is 4",
        ),
        (
            {
                "model.num_experts": (8,),
                "parallel.tensor_model_parallel_size": 2,
                "parallel.expert_model_parallel_size": 4,
            },
            "(a stage has 4 ranks, and a multiple of 8 is needed)",
        ),
        (
            {
                "model.num_experts": (8,),
                "model.moe_router_num_groups": 4,
                "model.moe_router_group_topk": 2,
                "model.moe_router_topk": 6,
            },
            "(they have 4 experts)",
        ),
        (
            {"model.num_experts": (8,), "model.mlp_type": "residual", "model.moe_ffn_hidden_size": 30}
            | {"parallel.tensor_model_parallel_size": 4, "parallel.expert_tensor_parallel_size": 1},
            "and of the MLP beside residual experts, must be a multiple",
        ),
    ],
)
def test_a_refusal_says_what_is_there(changes: dict[str, Any], says: str) -> None:
    (sentence,) = check(make_config(changes), 4)
    assert says in sentence


def test_a_file_of_the_shown_settings_means_the_same(tmp_path: Any) -> None:
    flags = (
        "--num-experts 4 8 --moe-layer-freq ([0]*2+[1]*2) --moe-router-load-balancing-type aux_loss "
        "seq_aux_loss --moe-aux-loss-coeff 0.1 0.01 --moe-expert-capacity-factor 1.5"
    )
    config = parse_config([*BASE_FLAGS, *flags.split()], world_size=2).config
    file = tmp_path / "run.yaml"
    file.write_text(shown_config(config, 2))
    again = parse_config(["--config", str(file)], world_size=2)
    assert again.warnings == ()
    assert again.config.model == filled_model(config.model)
    assert model_spec(again.config.model).expert_layers == (2, 3)


@pytest.mark.parametrize("ranks", ["0", "-2"])
def test_no_ranks_for_experts_are_refused(ranks):
    flags = [*BASE_FLAGS, "--num-experts", "4", "--moe-expert-parallel-size", ranks]
    with pytest.raises(ConfigError, match="must be greater than 0"):
        parse_config(flags, world_size=1)
