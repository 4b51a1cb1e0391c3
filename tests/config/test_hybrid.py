"""Patterns of hybrid models: letters, ratios, and what either of them implies."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from megazero.config.derive import filled_model, model_differences
from megazero.config.resolve import parse_config
from megazero.config.tree.model import ModelConfig
from megazero.errors import ConfigError
from tests.tables import over_table

SHAPE = {"hidden_size": 1024, "num_attention_heads": 16, "seq_length": 4096}
ARGV = [
    *("--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32", "--mamba-head-dim", "16"),
    *("--micro-batch-size", "1", "--lr", "1e-3", "--train-iters", "3", "--mock-data", "--vocab-size", "61"),
]
SPEC = ("--spec", "megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec")


def model(**settings):
    return ModelConfig(**{**SHAPE, **settings})


def resolved(*argv: str):
    return parse_config([*ARGV, *argv], world_size=1)


@over_table(
    ("layers", "attention", "mlps", "letters"),
    [
        # The 56 layers of Waleffe et al. 2024, and the 48 of Megatron-LM's example.
        (56, 0.08, 0.5, "M-M-M--M-M*-M-M-M-M--M*-M-M-M-M-M*--M-M-M-M-M*-M--M-M-M-"),
        (48, 0.08, 0.5, "M-M-M--M-*M-M-M-M--*M-M-M-M-*M--M-M-M-*M-M--M-M-"),
        (4, 0.0, 0.0, "MMMM"),
        (8, 0.5, 0.5, "-*-**-*-"),
        (9, 0.333, 0.0, "MM*M*MM*M"),
        (4, 1.0, 0.0, "****"),
        (4, 0.0, 1.0, "----"),
    ],
)
def test_ratios_are_spread_as_upstream(layers, attention, mlps, letters):
    shape = model(
        num_layers=layers, hybrid_attention_ratio=attention, hybrid_mlp_ratio=mlps, is_hybrid_model=True
    )
    assert shape.layer_kinds == letters


def test_a_pattern_has_the_depth_and_makes_a_model_hybrid():
    shape = model(hybrid_layer_pattern="M-*E", num_experts=4)
    assert (shape.num_layers, shape.is_hybrid_model, shape.layer_kinds) == (4, True, "M-*E")
    assert shape.experts_by_layer == (0, 0, 0, 4)
    assert shape.expert_places == 1
    assert (shape.layers_of("*"), shape.layers_of("-E")) == (1, 2)
    assert (shape.mamba_heads, shape.mamba_width) == (32, 2048)


def test_a_transformer_has_no_pattern():
    shape = model(num_layers=3)
    assert (shape.layer_kinds, shape.mamba_heads, shape.layers_of("M")) == (None, None, 3)
    assert filled_model(shape).hybrid_layer_pattern is None


@over_table(
    ("pattern", "says"),
    [
        ("", "must be made of M"),
        ("MG", "must be made of M"),
        ("M*/M", "predict several tokens at once"),
        ("M-|M*", "cut by `--pipeline-partition`"),
    ],
)
def test_other_letters_are_refused(pattern, says):
    with pytest.raises(ValidationError, match=says):
        model(num_layers=2, hybrid_layer_pattern=pattern)
    if pattern:
        with pytest.raises(ConfigError) as error:
            resolved("--hybrid-layer-pattern", pattern)
        assert len(error.value.violations) == 1
        assert says in error.value.violations[0]


def test_how_a_pattern_is_said_makes_no_difference():
    ratios = model(num_layers=8, hybrid_attention_ratio=0.5, hybrid_mlp_ratio=0.5)
    letters = model(hybrid_layer_pattern="-*-**-*-")
    fields = tuple(ModelConfig.model_fields)
    assert model_differences(ratios, letters, fields) == []
    other = model(hybrid_layer_pattern="*-*-*--*")
    assert model_differences(letters, other, fields) == [
        ("hybrid_layer_pattern", "-*-**-*-", "*-*-*--*"),
    ]
    assert model_differences(letters, model(num_layers=8), ["hybrid_layer_pattern"]) == [
        ("hybrid_layer_pattern", "-*-**-*-", None)
    ]


@over_table(
    ("argv", "kinds"),
    [
        ("--hybrid-layer-pattern MM*-", "MM*-"),
        ("--hybrid-override-pattern MM*- --num-layers 4 --is-hybrid-model", "MM*-"),
        ("--num-layers 4 --hybrid-attention-ratio 0.25", "MM*M"),
        ("--num-layers 2 --is-hybrid-model", "MM"),
    ],
)
def test_megatrons_ways_to_say_it(argv, kinds):
    assert resolved(*argv.split()).config.model.layer_kinds == kinds
    assert resolved(*argv.split(), *SPEC).config.model.layer_kinds == kinds


def test_the_spec_of_a_hybrid_model_is_for_hybrid_models():
    transformer = [each for each in ARGV if each not in ("--mamba-head-dim", "16")]
    with pytest.raises(ConfigError, match="say with `--is-hybrid-model` or a pattern"):
        parse_config([*transformer, "--num-layers", "2", *SPEC], world_size=1)
    parse_config([*transformer, "--num-layers", "2", "--spec", "local"], world_size=1)
