"""``config.json`` and our model settings say the same, or one is refused by the field's name."""

from __future__ import annotations

import json
import os

import pytest

from megazero.errors import CheckpointError
from megazero.formats.hf.config_json import (
    Description,
    TokenIds,
    architecture_of,
    config_of,
    differences,
    find_architecture,
    model_of,
)
from megazero.layers.rotary import rotary_scaling
from megazero.spec.resolve import model_spec
from tests.formats.hf.samples import GPT2, LLAMA, MISTRAL, MODELS, QWEN2, VOCAB, config_for
from tests.models.hf_weights import decoder_model
from tests.tables import over_table


@over_table("name", MODELS)
def test_a_model_comes_back_from_its_config(name):
    model = MODELS[name]
    found = model_of(architecture_of(model), config_for(model))
    assert differences(found, model) == []
    assert (found.positions, found.attention_dropout) == (model.positions, model.attention_dropout)
    assert config_of(architecture_of(found), found, VOCAB, TokenIds(1, 2), "float32") == config_for(model)


@over_table("name", MODELS)
def test_the_config_is_what_transformers_makes_of_the_same_model(name):
    pytest.importorskip("transformers")
    theirs = decoder_model(MODELS[name], VOCAB).config.to_dict()
    ours = config_for(MODELS[name])
    told_otherwise = {"bos_token_id", "eos_token_id", "torch_dtype", "architectures", "initializer_range"}
    told_otherwise |= {"resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout", "rope_theta"}
    told_otherwise |= {"hidden_dropout"}
    shared = (ours.keys() - told_otherwise) & theirs.keys()
    assert {key: ours[key] for key in shared} == {key: theirs[key] for key in shared}
    assert len(shared) >= 9


def test_a_config_of_transformers_describes_the_same_model():
    """The files are those of `save_pretrained` in versions 4 and 5, without defaults."""
    five = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "pretraining_tp": 1,
        "dtype": "bfloat16",
    }
    four = {**five, "rope_theta": 500000.0, "rope_scaling": None}
    del four["rope_parameters"]
    both = {**five, "rope_theta": 500000}
    families = {find_architecture(config).model_type for config in (four, five, both)}
    models = [model_of(find_architecture(config), config) for config in (four, five, both)]
    assert families == {"llama"}
    assert models[0] == models[1] == models[2]
    assert models[0].model_dump(exclude_defaults=True) == {
        "num_layers": 32,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "seq_length": 2048,
        "max_position_embeddings": 2048,
        "ffn_hidden_size": 11008,
        "position_embedding_type": "rope",
        "rotary_base": 500000.0,
        "normalization": "RMSNorm",
        "norm_epsilon": 1e-6,
        "activation": "swiglu",
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def test_an_empty_config_of_gpt2_is_the_small_one():
    model = model_of(find_architecture({"model_type": "gpt2"}), {"model_type": "gpt2"})
    assert (model.num_layers, model.hidden_size, model.ffn_size, model.positions) == (12, 768, 3072, 1024)
    assert not model.untie_embeddings_and_output_weights


ROPE = {"rope_type": "default", "rope_theta": 500.0}
REFUSED = [
    (GPT2, {"architectures": ["CTRLLMHeadModel"]}, "`architectures` must be one of GPT2LMHeadModel, BloomF"),
    (GPT2, {"architectures": ["JambaForCausalLM"]}, "but is ['JambaForCausalLM'], whose mixers are Mamba's"),
    (GPT2, {"architectures": ["GPT2LMHeadModel", "X"]}, "`architectures` must be one of"),
    (GPT2, {"architectures": None, "model_type": "ctrl"}, "`architectures` must be one of"),
    (GPT2, {"scale_attn_weights": False}, "`scale_attn_weights` must be True"),
    (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "`scale_attn_by_inverse_layer_idx` must be False"),
    (GPT2, {"reorder_and_upcast_attn": True}, "`reorder_and_upcast_attn` must be False"),
    (GPT2, {"add_cross_attention": True}, "`add_cross_attention` must be absent"),
    (GPT2, {"pruned_heads": {"0": [1]}}, "`pruned_heads` must be absent"),
    (GPT2, {"quantization_config": {"bits": 4}}, "`quantization_config` must be of compressed-tensors"),
    (GPT2, {"activation_function": "relu"}, "`activation_function` must be one of gelu_new, "),
    (GPT2, {"n_inner": 74.5}, "`n_inner` must be a int"),
    (GPT2, {"n_inner": 0}, "`n_inner` is 0"),
    (GPT2, {"n_head": 5}, "the hidden size must be a multiple of the number of heads"),
    (GPT2, {"n_layer": "2"}, "`n_layer` must be a int"),
    (GPT2, {"n_layer": True}, "`n_layer` must be a int"),
    (GPT2, {"n_layer": None}, "`n_layer` must be a int"),
    (GPT2, {"layer_norm_epsilon": float("nan")}, "`layer_norm_epsilon` is nan"),
    (GPT2, {"layer_norm_epsilon": 10**400}, "`layer_norm_epsilon` is 1000"),
    (GPT2, {"embd_pdrop": 0.25}, "`resid_pdrop` and `embd_pdrop` must agree"),
    (GPT2, {"tie_word_embeddings": 1}, "`tie_word_embeddings` must be a bool"),
    (GPT2, {"vocab_size": 0}, "`vocab_size` must be a positive number"),
    (GPT2, {"vocab_size": None}, "`vocab_size` must be a positive number"),
    (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "but is dynamic, whose base "),
    (
        LLAMA,
        {"rope_scaling": None, "rope_parameters": {**ROPE, "rope_type": "dynamic", "factor": 2.0}},
        "`rope_parameters` must be a rotation of the kinds default, linear, llama3, yarn, but is dynamic",
    ),
    (LLAMA, {"rope_scaling": {"type": "longrope"}}, "`rope_scaling` must be a rotation of the kinds def"),
    (MISTRAL, {"sliding_window": 0}, "`sliding_window` must be at least 1, a token that sees itself, but is"),
    (MISTRAL, {"sliding_window": 2.5}, "`sliding_window` must be a int"),
    (QWEN2, {"use_sliding_window": False}, "`layer_types` must be full_attention for all layers where `us"),
    (QWEN2, {"layer_types": ["full_attention"]}, "or full_attention for each of 2 layers, but is ['full"),
    (QWEN2, {"layer_types": "sliding_attention"}, "`layer_types` must be sliding_attention or full_attent"),
    (QWEN2, {"layer_types": ["chunked_attention"] * 2}, "or full_attention for each of 2 layers, but is ["),
    (QWEN2, {"layer_types": None, "max_window_layers": None}, "`max_window_layers` must be a number"),
    (QWEN2, {"layer_types": None, "num_hidden_layers": 10**9}, "`num_hidden_layers` must be 1 to 10000"),
    (LLAMA, {"rope_scaling": {"type": ["linear"]}}, "`rope_scaling` must be a rotation of the kinds default"),
    (LLAMA, {"rope_scaling": {"type": "linear"}}, "`rope_scaling` of the kind linear must have `factor`"),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": 0}}, "of the kind linear must have `factor`"),
    (
        LLAMA,
        {"rope_scaling": {"type": "linear", "factor": "2"}, "rope_parameters": None, "rope_theta": 500.0},
        "`linear rope_scaling.factor` must be a float",
    ),
    (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "must have `high_freq_factor`"),
    (LLAMA, {"rope_scaling": {"type": "default", "factor": 8.0}}, "must not have `factor`"),
    (
        LLAMA,
        {"rope_scaling": {"type": "yarn", "factor": 1, "attention_factor": 2.0}},
        "`attention_factor` mus",
    ),
    (
        LLAMA,
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {**ROPE, "factor": 4.0}},
        "must not have `factor`",
    ),
    (
        LLAMA,
        {
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "rope_parameters": {**ROPE, "rope_type": "linear", "factor": 4.0},
        },
        "`rope_scaling` and `rope_parameters` must describe one rotation",
    ),
    (
        LLAMA,
        {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
        "`rope_parameters` must rotate whol",
    ),
    (LLAMA, {"rope_parameters": [1]}, "`rope_parameters` must be an object"),
    (LLAMA, {"rope_theta": 10000.0}, "`rope_theta` must be given once"),
    (LLAMA, {"partial_rotary_factor": 0.5}, "`partial_rotary_factor` must be 1"),
    (LLAMA, {"sliding_window": 4096}, "`sliding_window` must be absent"),
    (LLAMA, {"auto_map": {"AutoModel": "x.Y"}}, "`auto_map` must be absent"),
    (LLAMA, {"attention_bias": True}, "`attention_bias` and `mlp_bias` must agree"),
    (LLAMA, {"mlp_bias": True}, "`attention_bias` and `mlp_bias` must agree"),
    (LLAMA, {"hidden_act": "gelu"}, "`hidden_act` must be one of silu, swish"),
    (LLAMA, {"num_key_value_heads": 4}, "the number of key/value heads must divide"),
    (LLAMA, {"num_attention_heads": 8}, "the hidden size must be a multiple of the number of heads"),
    (LLAMA, {"head_dim": 7}, "the width of a head must be even"),
    (LLAMA, {"head_dim": -2}, "`head_dim` is -2"),
]


SCALED = [
    ({"type": "linear", "factor": 2}, {"rotary_seq_len_interpolation_factor": 2.0}),
    (
        {
            "rope_type": "llama3",
            **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0},
            "original_max_position_embeddings": 4096,
        },
        {
            **{"use_rope_scaling": True, "rope_high_freq_factor": 3.0},
            "rope_original_max_position_embeddings": 4096,
        },
    ),
    (
        {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 2048, "truncate": False},
        {
            **{"position_embedding_type": "yarn", "rotary_scaling_factor": 16.0},
            **{"yarn_original_max_position_embeddings": 2048, "yarn_correction_range_round_to_int": False},
        },
    ),
    # Factor and length that are not given follow from the model's positions.
    (
        {"rope_type": "yarn", "original_max_position_embeddings": 8, "beta_fast": 16, "beta_slow": 2.0},
        {
            **{"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0, "yarn_beta_slow": 2.0},
            **{"yarn_original_max_position_embeddings": 8, "yarn_beta_fast": 16.0},
        },
    ),
    (
        {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.3},
        {
            **{"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0, "mscale": 0.7},
            **{"yarn_original_max_position_embeddings": 32, "mscale_all_dim": 0.3},
        },
    ),
    # One of the two alone is not read by transformers.
    (
        {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7},
        {
            **{"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0},
            "yarn_original_max_position_embeddings": 32,
        },
    ),
]


@over_table("field", ["rope_scaling", "rope_parameters"])
@over_table(("scaling", "expected"), SCALED, ids=lambda value: "-".join(map(str, value)))
def test_scaled_rotations_are_read_and_written(scaling, expected, field):
    plain = {**config_for(LLAMA), "max_position_embeddings": 32}
    del plain["rope_parameters"]
    config = {**plain, field: scaling}
    model = model_of(find_architecture(config), config)
    changed = model_of(find_architecture(plain), plain).model_copy(update=expected)
    assert model == changed
    written = config_of(architecture_of(model), model, 101, TokenIds(), "float32")
    assert written["rope_parameters"]["rope_type"] == written["rope_scaling"]["rope_type"]
    again = model_of(find_architecture(written), written)
    assert again == model


def test_a_given_sharpening_is_yarns():
    scaling = {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5}
    config = {**config_for(LLAMA), "rope_parameters": scaling}
    model = model_of(find_architecture(config), config)
    assert rotary_scaling(model_spec(model).rotary[0].scaling).magnitude == pytest.approx(1.5)
    written = config_of(architecture_of(model), model, 101, TokenIds(), "float32")
    assert written["rope_scaling"]["attention_factor"] == pytest.approx(1.5)


@over_table(("model", "changed", "message"), REFUSED, ids=[str(row[1])[:60] for row in REFUSED])
def test_what_ours_has_not_is_refused_by_file_and_field(model, changed, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_for(model, **changed)))
    with pytest.raises(CheckpointError) as refusal:
        Description.read(tmp_path)
    assert str(refusal.value).startswith(f"`{tmp_path / 'config.json'}`: ")
    assert message in str(refusal.value)


@over_table(
    ("content", "message"),
    [
        (None, "must be readable, but is not (No such file or directory)"),
        (b"{", "must hold JSON"),
        (b"\xff", "must hold JSON"),
        (b"[" * 100_000, "must hold JSON"),
        (b"[]", "must hold an object, but holds a list"),
    ],
)
def test_a_config_that_is_none_is_refused(content, message, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="config.json") as refusal:
        Description.read(tmp_path)
    assert message in str(refusal.value)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="must be a JSON file, but is not a plain file"):
        Description.read(tmp_path)


@over_table(
    ("model", "changed", "reasons"),
    [
        (
            GPT2,
            {"position_embedding_type": "none"},
            "`position_embedding_type` must be learned_absolute, but is",
        ),
        (
            GPT2,
            {"activation": "swiglu"},
            "`activation` must be gelu or gelu_exact or squared_relu, but is swiglu",
        ),
        (GPT2, {"num_query_groups": 2}, "the number of key/value heads must equal the number of query heads"),
        (GPT2, {"kv_channels": 10}, "the width of a head must be hidden size / heads"),
        (LLAMA, {"rotary_percent": 0.8}, "`rotary_percent` must be 1.0, but is 0.8"),
        (LLAMA, {"normalization": "LayerNorm"}, "`normalization` must be RMSNorm, but is LayerNorm"),
        (LLAMA, {"activation": "gelu"}, "`activation` must be swiglu, but is gelu"),
    ],
)
def test_a_model_that_no_family_has_is_refused_with_all_reasons(model, changed, reasons):
    with pytest.raises(CheckpointError, match="GPT2LMHeadModel: (.|\n)*LlamaForCausalLM: ") as refusal:
        architecture_of(model.model_copy(update=changed))
    assert reasons in str(refusal.value)


def test_reasons_that_another_architecture_has_too_are_left_out():
    with pytest.raises(CheckpointError) as refusal:
        architecture_of(GPT2.model_copy(update={"apply_residual_connection_post_layernorm": True}))
    assert str(refusal.value) == (
        "the model must be one that transformers supports, but is not: GPT2LMHeadModel: "
        "`apply_residual_connection_post_layernorm` must be False, but is True\n"
        "  BloomForCausalLM: `position_embedding_type` must be alibi, but is learned_absolute; "
        "`embed_layernorm` must be True, but is False; the MLP must be four times as wide as the model"
    )


def test_the_sizes_of_many_layers_are_cut_short_in_a_refusal():
    sizes = {"attention": {"num_query_groups": 4}, "mlp": {"ffn_hidden_size": 48}}
    text = json.dumps({"block_configs": [sizes] * 80})
    changed = {"num_layers": 80, "heterogeneous_layers_config_encoded_json": text}
    with pytest.raises(CheckpointError) as refusal:
        architecture_of(LLAMA.model_copy(update=changed))
    said = str(refusal.value)
    assert "`heterogeneous_layers_config_encoded_json` must be None, but is {" in said
    assert len(said) < 2000


def test_what_training_may_change_is_no_difference():
    free = {"seq_length": 7, "hidden_dropout": 0.5, "vocab_size": 9, "ffn_hidden_size": 74, "kv_channels": 7}
    assert differences(GPT2, GPT2.model_copy(update={**free, "max_position_embeddings": 31})) == []
    assert differences(LLAMA, LLAMA.model_copy(update={"max_position_embeddings": 99})) == []
    trained = {"apply_wd_to_qk_layernorm": True, "fp32_residual_connection": True}
    assert differences(LLAMA, LLAMA.model_copy(update=trained)) == []
    other = {"activation": "gelu_exact", "seq_length": 30, "norm_epsilon": 1e-5}
    assert differences(GPT2, GPT2.model_copy(update=other)) == [
        "`norm_epsilon` is 0.0003, not 1e-05",
        "`activation` is gelu, not gelu_exact",
        "`max_position_embeddings` is 31, not 30",
    ]


def test_settings_of_another_family_are_no_difference():
    """`--openai-gelu` sets the form of GELU in a BERT's head too, and once kept a GPT from being loaded."""
    assert differences(GPT2, GPT2.model_copy(update={"bert_head_activation": "gelu"})) == []
    bert = GPT2.model_copy(update={"family": "bert"})
    assert differences(bert, bert.model_copy(update={"bert_head_activation": "gelu"})) == [
        "`bert_head_activation` is gelu_exact, not gelu"
    ]
    assert "`family` is gpt, not bert" in differences(GPT2, bert)


@over_table(
    ("config", "tokens"),
    [
        ({}, TokenIds()),
        ({"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0}, TokenIds(1, (2, 3), 0)),
        ({"bos_token_id": None, "eos_token_id": 0, "pad_token_id": -1}, TokenIds(None, 0, None)),
        ({"bos_token_id": "1", "eos_token_id": [], "pad_token_id": True}, TokenIds()),
    ],
)
def test_special_tokens_come_from_the_config(config, tokens):
    assert TokenIds.of_json(config) == tokens
    assert TokenIds.of_json(tokens.as_json()) == tokens


@over_table("field", ["rope_scaling", "rope_parameters"])
@over_table("model", [MISTRAL, QWEN2], ids=["mistral", "qwen2"])
def test_windows_and_scaled_rotations_go_together(model, field):
    config = config_for(model)
    del config["rope_parameters"]
    config |= {field: {"rope_type": "linear", "factor": 2.0}, "rope_theta": 500.0}
    found = model_of(find_architecture(config), config)
    assert differences(found, model.model_copy(update={"rotary_seq_len_interpolation_factor": 2.0})) == []
    written = config_of(architecture_of(found), found, 101, TokenIds(), "float32")
    assert (written["rope_scaling"]["factor"], written["rope_parameters"]["factor"]) == (2.0, 2.0)
    assert differences(model_of(find_architecture(written), written), found) == []


def test_a_window_that_is_left_out_is_the_one_that_transformers_assumes():
    config = config_for(MISTRAL)
    assert (MISTRAL.window_size, config["sliding_window"]) == ((3, 0), 4)
    del config["sliding_window"]
    longer = {**config, "max_position_embeddings": 32768}
    assert model_of(find_architecture(config), longer).window_size == (4095, 0)
    assert model_of(find_architecture(config), config).windows == ()  # of 31 positions
    none = model_of(find_architecture(config), {**config, "sliding_window": None})
    assert none.windows == ()
    assert architecture_of(none).name == "LlamaForCausalLM"


def test_layers_from_max_window_layers_on_have_a_window():
    config = config_for(QWEN2)
    assert (config["layer_types"], config["max_window_layers"]) == (
        ["full_attention", "sliding_attention"],
        1,
    )
    del config["layer_types"]
    assert model_of(find_architecture(config), config).windows == (None, (4, 0))
    del config["max_window_layers"]  # 28, and there are 2
    assert model_of(find_architecture(config), config).windows == ()
    config["use_sliding_window"] = False
    assert model_of(find_architecture(config), config).windows == ()


@over_table(
    ("model", "changed", "reason"),
    [
        (MISTRAL, {"window_sink_tokens": 2}, "a window must hide the first tokens too"),
        (MISTRAL, {"window_attn_skip_freq": (0, 1)}, "all layers must have the same window"),
        (GPT2, {"window_size": (3, 0)}, "all tokens must see all earlier ones"),
        (LLAMA, {"softmax_type": "learnable"}, "`softmax_type` must be vanilla"),
        (LLAMA, {"position_embedding_type": "alibi"}, "`position_embedding_type` must be rope or yarn"),
        (LLAMA, {"embed_layernorm": True}, "there must be no norm of the embedding"),
        (GPT2, {"qk_layernorm": True}, "`qk_layernorm` must be False, but is True"),
        (LLAMA, {"norm_position": "both"}, "`norm_position` must be input, but is both"),
        (GPT2, {"final_logit_softcapping": 30.0}, "`final_logit_softcapping` must be None, but is 30.0"),
        (MISTRAL, {"window_rotary_base": 50.0}, "`window_rotary_base` must be None, but is 50.0"),
    ],
)
def test_variants_of_attention_that_an_architecture_lacks_are_refused(model, changed, reason):
    with pytest.raises(CheckpointError) as refusal:
        architecture_of(model.model_copy(update=changed))
    assert reason in str(refusal.value)
