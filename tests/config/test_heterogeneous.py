"""Layers of sizes of their own: what a file says of them, and what is refused."""

from __future__ import annotations

import json

import pytest

from megazero.checkpoint.described import check_described
from megazero.config.derive import model_differences
from megazero.config.heterogeneous.shapes import LayerShape, text_of
from megazero.config.resolve import parse_config
from megazero.config.tree.model import ModelConfig
from megazero.errors import CheckpointError, ConfigError
from tests.tables import over_table

PATH, TEXT = "--heterogeneous-layers-config-path", "--heterogeneous-layers-config-encoded-json"
SHAPE = {"hidden_size": 64, "num_attention_heads": 4, "seq_length": 32}
ARGV = [
    *("--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32", "--num-query-groups", "2"),
    *("--micro-batch-size", "1", "--lr", "1e-3", "--train-iters", "3", "--mock-data", "--vocab-size", "61"),
]
ENTRY = {"no_op": False, "replace_with_linear": False, "sparsify": None, "window_length": None}
NEMOTRON = {
    "model_type": "nemotron-nas",
    "num_hidden_layers": 5,
    "hidden_size": 64,
    "block_configs": [
        {"attention": {"n_heads_in_group": 4, **ENTRY}, "ffn": {"ffn_mult": 2.625, **ENTRY}},
        {
            "attention": {"n_heads_in_group": None, **ENTRY, "no_op": True},
            "ffn": {"ffn_mult": 6.1, **ENTRY},
        },
        {
            "attention": {"num_query_groups": 4},
            "ffn": {"ffn_mult": None, "no_op": True},
        },
        {"attention": {"num_key_value_heads": None}, "mlp": {"intermediate_size": 40}},
        {"attention": {"no_op": True}, "ffn": {"no_op": True}},
    ],
}
SIZES = (LayerShape(1, 256), LayerShape(0, 512), LayerShape(4, 0), LayerShape(2, 40), LayerShape(0, 0))


def resolved(*argv: str, world_size: int = 1):
    return parse_config([*ARGV, *argv], world_size=world_size).config.model


def of(attention, ffn, **whole) -> str:
    return json.dumps({**whole, "block_configs": [{"attention": attention, "ffn": ffn}]})


def test_a_file_gives_the_depth_and_each_layers_sizes(tmp_path):
    (tmp_path / "layers.json").write_text(json.dumps(NEMOTRON))
    model = resolved(PATH, str(tmp_path / "layers.json"))
    assert (model.num_layers, model.layer_shapes) == (5, SIZES)
    assert model.layer_parts == ("*-", "-", "*", "*-", "")
    assert (model.layers_of("*"), model.layers_of("-E")) == (3, 3)
    # The file may go: the text is in the configuration, and in checkpoints.
    (tmp_path / "layers.json").unlink()
    assert model.heterogeneous_layers_config_path is None
    assert ModelConfig(**model.model_dump()).layer_shapes == SIZES


def test_two_ways_to_say_the_same_are_the_same_model():
    field = "heterogeneous_layers_config_encoded_json"
    said = resolved(TEXT, json.dumps(NEMOTRON))
    other = resolved(TEXT, text_of(SIZES))
    assert said.heterogeneous_layers_config_encoded_json != other.heterogeneous_layers_config_encoded_json
    assert model_differences(said, other, [field]) == []
    wider = text_of((LayerShape(1, 264), *SIZES[1:]))
    assert [field for field, *_ in model_differences(said, resolved(TEXT, wider), [field])] == [field]
    alike = ModelConfig(**SHAPE, num_layers=5)
    assert (alike.layer_shapes, alike.layer_parts, alike.layers_of("*")) == (
        None,
        None,
        5,
    )


FIRST = "(`block_configs` [0]"
NO_OBJECT = "must be a JSON object with `block_configs`"


@over_table(
    ("text", "says"),
    [
        ("[1", f"`{TEXT}` {NO_OBJECT} (Expecting ',' delimiter: line 1 column 3 (char 2)), but is `[1`."),
        ("[]", f"{NO_OBJECT}, a list with an object for each layer, but is `[]`."),
        ('{"block_configs": []}', f"{NO_OBJECT}, a list with an object for each layer"),
        (
            '{"block_configs": [3]}',
            f"must give each layer `attention` and `ffn` as objects {FIRST} has no `attention`)",
        ),
        ('{"block_configs": [{"attention": {}}]}', "(`block_configs` [0] has no `ffn`), but is"),
        (of({"n_heads_in_group": 0}, {}), "(`block_configs` [0], `attention`: `n_heads_in_group` is 0)"),
        (
            of({"n_heads_in_group": 1.5}, {}),
            f"{FIRST}, `attention`: `n_heads_in_group` is 1.5)",
        ),
        (
            of({}, {"ffn_mult": True}),
            f"{FIRST}, `ffn`: `ffn_mult` is true)",
        ),
        (of({}, {"ffn_mult": float("nan")}), f"{NO_OBJECT} (NaN is no number)"),
        (
            of({}, {"ffn_mult": 2, "no_op": True}),
            f"must give one size or `no_op` {FIRST}, `ffn` has",
        ),
        (of({}, {"no_op": "yes"}), 'must have sizes above 0 (`block_configs` [0], `ffn`: `no_op` is "yes")'),
        (
            of({"window_length": 8}, {}),
            f"must give sizes and `no_op` alone {FIRST}, `attention` has",
        ),
        (
            json.dumps({"block_configs": [{"attention": {}, "ffn": {}, "mlp": {"ffn_hidden_size": 24}}]}),
            "must give each layer `attention` and `ffn` as objects (`block_configs` [0] has both)",
        ),
        (
            json.dumps({"block_configs": [{"attention": {}, "ffn": {}, "residual_scale": 2}]}),
            "must give each layer `attention` and `ffn` alone (`block_configs` [0] has `residual_scale`)",
        ),
        (of({"num_query_groups": False}, {}), "`attention`: `num_query_groups` is false)"),
        (of({}, {}, sliding_window=8), "must have no `sliding_window`: windows are given by `--window-size`"),
        (
            of({"replace_with_linear": True}, {}),
            "must have no `replace_with_linear`, which is not built here (`block_configs` [0], `attention`)",
        ),
    ],
)
def test_what_is_no_description_of_layers_is_refused(text, says):
    with pytest.raises(ConfigError) as error:
        resolved(TEXT, text)
    assert says in str(error.value)


@over_table(
    ("flags", "says"),
    [
        ((TEXT, text_of(SIZES), "--num-layers", "4"), "but are 5 entries for 4 layers; change one"),
        ((TEXT, of({"n_heads_in_group": 3}, {})), "but layer 0 does not divide 4 heads so; change"),
        ((TEXT, text_of(SIZES), "--num-experts", "4"), "but `num_experts` is 4; leave one of the two out"),
        ((TEXT, text_of(SIZES), "--use-parallel-residual"), "but `use_parallel_residual` is on; leave"),
        (
            (TEXT, of({}, {}, hidden_size=32, hidden_act="silu", rope_theta=5e5)),
            "but `hidden_size` is 32 there and 64 here; `rope_theta` is 500000.0 there and 10000.0 here; "
            "`hidden_act` is silu there and gelu here; give the flags that the file asks for",
        ),
        ((TEXT, of({}, {}, rope_scaling={"factor": 8})), "`rope_scaling` is 8 there and 1.0 here"),
        ((TEXT, of({}, {}, rms_norm_eps=0.1)), "`rms_norm_eps` is 0.1 there and 1e-05 here"),
        ((TEXT, of({}, {}, head_dim=99)), "`head_dim` is 99 there and 16 here"),
        ((TEXT, of({}, {}, attention_bias=False)), "`attention_bias` is False there and True here"),
        ((TEXT, of({}, {}, hidden_act="gelu")), "`hidden_act` is gelu there and gelu here; give"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(flags, says):
    with pytest.raises(ConfigError) as error:
        resolved(*flags)
    assert says in str(error.value)


@over_table(
    ("word", "flags"),
    [
        ("silu", "--swiglu"),
        ("relu2", "--squared-relu"),
        ("gelu_pytorch_tanh", ""),
        ("gelu", "--activation gelu_exact"),
    ],
)
def test_activations_have_the_names_of_hugging_face(word, flags):
    text = of({}, {}, hidden_act=word, rope_scaling=None, rms_norm_eps=1e-5, attention_bias=True)
    assert resolved(TEXT, text, *flags.split()).num_layers == 1


def test_a_small_multiple_is_no_layer_without_an_mlp():
    assert resolved(TEXT, of({}, {"ffn_mult": 0.0001})).layer_shapes == (LayerShape(2, 256),)


def test_each_layer_is_cut_over_tensor_ranks():
    argv = (TEXT, text_of((LayerShape(2, 64), LayerShape(4, 63))), "--tensor-model-parallel-size", "2")
    with pytest.raises(ConfigError, match="but layer 1 has 4 key/value heads and an inner width of 63 for 2"):
        resolved(*argv, world_size=2)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError) as error:
        resolved(PATH, str(tmp_path / "none.json"), "--num-layers", "2")
    assert error.value.violations == [
        f"`{PATH}` must be a JSON file that can be read (No such file or directory), but is "
        f"`{tmp_path / 'none.json'}`."
    ]
    (tmp_path / "half.json").write_bytes(b'{"block_configs": "\xff"}')
    with pytest.raises(ConfigError, match="that can be read \\(invalid start byte\\)"):
        resolved(PATH, str(tmp_path / "half.json"), "--num-layers", "2")


def test_a_description_of_more_than_its_tensors_hold_is_refused():
    model = ModelConfig(**SHAPE, heterogeneous_layers_config_encoded_json=text_of(SIZES[:2] + SIZES[4:]))
    layers = 2 * 64 * 16 * (4 + 1) + 2 * 64 * (256 + 512)  # all but one key/value head of the first
    shapes = [(64, 61), (32, 64), (layers,)]
    check_described(model, 61, shapes, 2, "here")
    with pytest.raises(CheckpointError, match="it makes at least"):
        check_described(model, 61, [*shapes[:2], (layers - 1,)], 2, "here")
    with pytest.raises(CheckpointError, match="`num_layers` makes 2, and they are of at most 1"):
        check_described(model, 61, shapes, 1, "here")
