"""OPT, Mamba-2, Nemotron-H and Bamba: what is refused by name, may be left out, or has another form."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from megazero.config.resolve import parse_config
from megazero.config.tree.model import ModelConfig
from megazero.errors import CheckpointError, ConfigError
from megazero.formats.hf.config_json import TokenIds, architecture_of, config_of, differences, model_of
from megazero.formats.hf.convert import convert_from_hf, convert_to_hf
from megazero.formats.hf.reader import HFReader
from megazero.formats.hf.writer import write_hf
from tests.formats.hf.descendants import SAMPLES
from tests.formats.hf.model_flags import model_flags
from tests.formats.hf.samples import VOCAB, logits_of
from tests.formats.hf.test_descendants_refused import config_for, named, weights_of
from tests.formats.hf.test_writer import loaded
from tests.tables import over_table

TOKENS = torch.randint(VOCAB, (2, 17), generator=torch.Generator().manual_seed(5))
MIXER = "backbone.layers.0.mixer"


@over_table(
    ("name", "update", "message"),
    [
        ("opt", {"norm_epsilon": 3e-4}, "`norm_epsilon` must be 1e-05, but is 0.0003"),
        ("opt", {"add_qkv_bias": True, "add_bias_linear": False}, "must have biases where all linear layers"),
        ("opt", {"activation": "swiglu"}, "`activation` must be relu or gelu or gelu_exact or squared_relu"),
        ("mamba2", {"hybrid_layer_pattern": "M*"}, "all layers must be Mamba-2"),
        ("mamba2", {"mamba_num_heads": 6}, "a mixer's channels must be a multiple of the hidden size"),
        ("mamba2", {"normalization": "LayerNorm"}, "`normalization` must be RMSNorm"),
        ("mamba2", {"position_embedding_type": "learned_absolute"}, "`position_embedding_type` must be none"),
        ("mamba2", {"is_hybrid_model": False}, "`is_hybrid_model` must be True, but is False"),
        ("nemotron-h", {"position_embedding_type": "rope"}, "`position_embedding_type` must be none"),
        ("nemotron-h", {"untie_embeddings_and_output_weights": False}, "must be True, but is False"),
        ("nemotron-h", {"activation": "swiglu"}, "`activation` must be relu or gelu or gelu_exact or squar"),
        ("nemotron-h", {"window_size": (3, 0)}, "all tokens must see all earlier ones"),
        ("nemotron-h", {"hybrid_layer_pattern": "*-*-"}, "there must be Mamba-2 layers"),
        ("nemotron-h-experts", {"moe_router_score_function": "softmax"}, "`moe_router_score_function` must"),
        ("nemotron-h-experts", {"moe_shared_expert_intermediate_size": None}, "there must be shared experts"),
        ("nemotron-h-experts", {"moe_shared_expert_gate": True}, "shared experts must have no gate"),
        ("nemotron-h-experts", {"moe_router_topk": 6}, "must be sent to 2 experts of each group"),
        ("nemotron-h-experts", {"moe_eval_capacity_factor": 2.0}, "nothing may limit how many tokens"),
        ("bamba", {"hybrid_layer_pattern": "M-*M--"}, "the pattern must be of M- and "),
        ("bamba", {"rotary_percent": 0.75}, "an even number of rotated channels"),
        ("bamba", {"add_bias_linear": True}, "`add_bias_linear` must be False, but is True"),
    ],
)  # fmt: skip
def test_models_that_it_cannot_express_are_refused(name, update, message):
    with pytest.raises(CheckpointError, match=message):
        architecture_of(SAMPLES[name].ours.model_copy(update=update), named(name).name)


@over_table(
    ("name", "changed", "message"),
    [
        ("opt", {"do_layer_norm_before": False}, "`do_layer_norm_before` must be True, but is False"),
        ("opt", {"word_embed_proj_dim": 20}, "`word_embed_proj_dim` must be the hidden size, 42, but is 20"),
        ("opt", {"layer_norm_elementwise_affine": False}, "`layer_norm_elementwise_affine` must be True"),
        ("opt", {"_remove_final_layer_norm": True}, "`_remove_final_layer_norm` must be False"),
        ("mamba2", {"expand": 3}, "`expand` x `hidden_size` must be `num_heads` x `head_dim`, but are 3 x"),
        ("mamba2", {"head_dim": "9"}, "`head_dim` must be a number, but is '9'"),
        ("mamba2", {"num_heads": 3, "head_dim": 24}, "groups must have equally many heads"),
        ("mamba2", {"use_bias": True}, "`use_bias` must be False"),
        ("mamba2", {"use_conv_bias": False}, "`use_conv_bias` must be True"),
        ("mamba2", {"conv_kernel": 3}, "`conv_kernel` must be 4, but is 3"),
        ("mamba2", {"time_step_limit": [0.0, 0.1]}, "`time_step_limit` must be a shortest step and Infinity"),
        ("mamba2", {"time_step_limit": 3}, "`time_step_limit` must be a shortest step and Infinity, but"),
        ("mamba2", {"time_step_limit": [True, float("inf")]}, "`time_step_limit` must be a shortest step"),
        ("mamba2", {"num_hidden_layers": 10**9}, "`num_hidden_layers` must be 1 to 10000"),
        ("nemotron-h", {"layers_block_type": None}, "`layers_block_type` must list the layers, each one of"),
        ("nemotron-h", {"layers_block_type": ["conv"] * 4}, "`layers_block_type` must list the layers"),
        ("nemotron-h", {"num_hidden_layers": 5}, "`num_hidden_layers` must be the 4 of `layers_block_type`"),
        ("nemotron-h", {"time_step_limit": [0.1, float("inf")]}, "reads `time_step_min` instead"),
        ("nemotron-h", {"tie_word_embeddings": True}, "`tie_word_embeddings` must be False"),
        ("nemotron-h", {"mamba_conv_bias": False}, "`use_conv_bias` must be True, but is False"),
        ("nemotron-h", {"sliding_window": 4}, "`sliding_window` must be absent, but is 4"),
        ("nemotron-h-experts", {"moe_latent_size": 8}, "`moe_latent_size` must be None, but is 8"),
        ("nemotron-h-experts", {"norm_topk_prob": False}, "`norm_topk_prob` must be True"),
        ("nemotron-h-experts", {"num_nextn_predict_layers": 1}, "`num_nextn_predict_layers` must be 0"),
        ("nemotron-h-experts", {"n_routed_experts": "8"}, "`n_routed_experts` must be a number, but is '8'"),
        ("bamba", {"attn_layer_indices": [3]}, "`attn_layer_indices` must list layers from 0 to 2, but is"),
        ("bamba", {"partial_rotary_factor": 0.25}, "`partial_rotary_factor` must be 0.5, but is 0.25"),
        ("bamba", {"mamba_expand": 3}, "`mamba_expand` x `hidden_size` must be `mamba_n_heads` x"),
        ("bamba", {"mamba_proj_bias": True}, "`mamba_proj_bias` must be False"),
        ("bamba", {"mlp_bias": True}, "`mlp_bias` must be False"),
    ],
)  # fmt: skip
def test_configs_of_other_models_are_refused(name, changed, message):
    with pytest.raises(ValueError, match=message):
        model_of(named(name), config_for(name, **changed))


def test_a_config_may_leave_out_what_transformers_assumes():
    opt = model_of(named("opt"), {"model_type": "opt"})
    assert (opt.num_layers, opt.hidden_size, opt.ffn_size, opt.positions) == (12, 768, 3072, 2048)
    assert (opt.activation, opt.norm_epsilon, opt.untie_embeddings_and_output_weights) == (
        "relu",
        1e-5,
        False,
    )
    mamba = model_of(named("mamba2"), {"model_type": "mamba2"})
    assert (mamba.layer_kinds, mamba.mamba_heads, mamba.mamba_width) == ("M" * 64, 128, 8192)
    assert (mamba.mamba_state_dim, mamba.mamba_num_groups, mamba.mamba_min_step) == (128, 8, 0.0)
    bare = {"hybrid_override_pattern": "M-M*", "auto_map": {"AutoModel": "x.Y"}, "num_hidden_layers": 4}
    nemotron = model_of(named("nemotron-h"), bare)
    assert (nemotron.layer_kinds, nemotron.mamba_min_step, nemotron.num_experts) == ("M-M*", 1e-3, ())
    assert (nemotron.kv_heads, nemotron.head_dim, nemotron.activation) == (8, 128, "squared_relu")
    older = {"layers_block_type": ["mamba", "attention", "moe"], "mamba_dt_min": 0.01, "mamba_n_groups": 4}
    nemotron = model_of(named("nemotron-h"), older)
    assert (nemotron.layer_kinds, nemotron.mamba_min_step, nemotron.mamba_num_groups) == ("M*E", 0.01, 4)
    assert (nemotron.experts_by_layer, nemotron.moe_router_topk) == ((0, 0, 8), 2)
    bamba = model_of(named("bamba"), {"num_hidden_layers": 2, "attn_layer_indices": [1]})
    assert (bamba.layer_kinds, bamba.num_layers, bamba.rotary_percent) == ("M-*-", 4, 0.5)
    assert (bamba.mamba_head_dim, bamba.mamba_state_dim, bamba.mamba_num_groups) == (64, 256, 1)


@over_table("name", ["opt", "opt-without-biases", "mamba2", "nemotron-h", "nemotron-h-experts", "bamba"])
def test_the_flags_that_are_printed_make_the_model(name):
    model = model_of(named(name), config_for(name)).model_copy(update={"vocab_size": VOCAB})
    flags = [word for line in model_flags(model) for word in line.split()]
    flags += ["--micro-batch-size", "1", "--lr", "1e-3", "--train-iters", "1", "--mock-data"]
    assert parse_config(flags).config.model == model


def test_the_flags_of_a_model_without_attention_run_on_several_tensor_parallel_ranks():
    """`--num-attention-heads 1`, which no layer uses, was once refused as not divisible by two ranks."""
    model = model_of(named("mamba2"), config_for("mamba2")).model_copy(update={"vocab_size": VOCAB})
    flags = [word for line in model_flags(model) for word in line.split()]
    assert flags[flags.index("--num-attention-heads") + 1] == "1"
    flags += ["--micro-batch-size", "1", "--lr", "1e-3", "--train-iters", "1", "--mock-data"]
    flags += ["--tensor-model-parallel-size", "2", "--num-query-groups", "1"]
    assert parse_config(flags, world_size=2).config.model.layer_kinds == "MM"
    with pytest.raises(
        ConfigError, match="tensor x pipeline x data parallel can be 1 x 2 x 1, 2 x 1 x 1, 1 x 1 x 2"
    ):
        parse_config([*flags, "--pipeline-model-parallel-size", "2"], world_size=2)


def test_a_hybrid_without_experts_says_nothing_of_them():
    """`--moe-router-enable-expert-bias` once made it write 0 experts, which transformers refuses."""
    model = SAMPLES["nemotron-h"].ours.model_copy(update={"moe_router_enable_expert_bias": True})
    config = config_of(architecture_of(model), model, VOCAB, TokenIds(), "float32")
    experts = {"n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group"}
    experts |= {"moe_shared_expert_intermediate_size", "routed_scaling_factor"}
    assert not experts & config.keys()
    transformers = pytest.importorskip("transformers")
    assert transformers.NemotronHConfig(**config).layers_block_type == [
        *("linear_attention", "mlp", "full_attention", "linear_attention"),
    ]


def test_both_spellings_of_no_longest_step_are_read():
    for longest in (float("inf"), "Infinity", {"__float__": "Infinity"}):
        config = config_for("mamba2", time_step_limit=[0.25, longest])
        assert model_of(named("mamba2"), config).mamba_min_step == 0.25


def test_what_other_layers_would_have_is_no_difference_between_mixers():
    mamba = SAMPLES["mamba2"].ours
    others = {"num_attention_heads": 4, "add_bias_linear": True, "activation": "gelu", "ffn_hidden_size": 7}
    assert differences(mamba, mamba.model_copy(update=others)) == []
    assert differences(mamba, mamba.model_copy(update={"mamba_min_step": 0.1})) == [
        "`mamba_min_step` is 0.0, not 0.1"
    ]
    hybrid = SAMPLES["nemotron-h"].ours
    assert differences(hybrid, hybrid.model_copy(update={"num_attention_heads": 2, "kv_channels": 10})) == [
        "`num_attention_heads` is 6, not 2"
    ]
    assert differences(hybrid, hybrid.model_copy(update={"hybrid_layer_pattern": "M-M*"})) == [
        "`hybrid_layer_pattern` is M-*M, not M-M*"
    ]


def test_the_shortest_step_changes_what_the_model_computes(tmp_path):
    sample = SAMPLES["nemotron-h"]
    write_hf(weights_of(sample.ours, named("nemotron-h")), sample.ours, VOCAB, tmp_path / "hf")
    with HFReader(tmp_path / "hf") as reader:
        shortest = ModelConfig(**reader.model_settings())
        assert shortest.mamba_min_step == 0.4
        cut, free = (logits_of(reader, m, TOKENS) for m in (shortest, of_any_step(shortest)))
    assert (cut - free).abs().max() > 1e-2


def of_any_step(model: ModelConfig) -> ModelConfig:
    return model.model_copy(update={"mamba_min_step": 0.0})


def test_a_model_of_any_step_is_written_with_one_that_no_state_feels(tmp_path):
    model = of_any_step(SAMPLES["nemotron-h"].ours)
    write_hf(weights_of(model, named("nemotron-h")), model, VOCAB, tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["time_step_min"] == 1e-30
    with HFReader(tmp_path / "hf") as reader:
        assert reader.model_settings()["mamba_min_step"] == 0.0


def test_what_several_tensors_lie_in_is_named_once_where_no_layer_has_it():
    assert list(named("opt").fused_in(3)) == [
        (
            "model.decoder.embed_positions.weight",
            (
                "model.decoder.embed_positions.weight, before the first",
                "model.decoder.embed_positions.weight, from the first",
            ),
        )
    ]
    assert [whole for whole, _ in named("mamba2").fused_in(2)][:2] == [
        "backbone.layers.0.mixer.in_proj.weight",
        "backbone.layers.1.mixer.in_proj.weight",
    ]


def test_opts_rows_before_the_first_position_are_left_out_and_written_as_zeros(tmp_path):
    model = SAMPLES["opt"].ours
    write_hf(weights_of(model, named("opt")), model, VOCAB, tmp_path / "hf")
    tensors, name = loaded(tmp_path / "hf"), "model.decoder.embed_positions.weight"
    positions = tensors[name].clone()
    assert (positions.shape, positions[:2].abs().max()) == ((33, 42), 0)
    positions[:2] = torch.tensor([[5.0], [7.0]])
    save_file({**tensors, name: positions}, tmp_path / "hf" / "model.safetensors")
    convert_from_hf(tmp_path / "hf", tmp_path / "run")
    convert_to_hf(tmp_path / "run", tmp_path / "back")
    assert torch.equal(loaded(tmp_path / "back")[name], tensors[name])
    save_file({**tensors, name: positions[1:].clone()}, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(CheckpointError, match="also hold model.decoder.embed_positions.weight"):
        HFReader(tmp_path / "hf")


def test_a_mixers_matrix_must_have_the_rows_of_all_kinds(tmp_path):
    model = SAMPLES["mamba2"].ours
    write_hf(weights_of(model, named("mamba2")), model, VOCAB, tmp_path)
    tensors, name = loaded(tmp_path), f"{MIXER}.in_proj.weight"
    assert tensors[name].shape == (72 + 72 + 2 * 14 + 8, 36)
    assert tensors[f"{MIXER}.conv1d.weight"].shape == (72 + 2 * 14, 1, 4)
    save_file({**tensors, name: tensors[name][:-1].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lack .*in_proj.* also hold .*0\.mixer\.in_proj"):
        HFReader(tmp_path)


def test_a_tensor_of_a_mixer_in_a_layer_of_another_kind_is_refused(tmp_path):
    model = SAMPLES["nemotron-h"].ours
    write_hf(weights_of(model, named("nemotron-h")), model, VOCAB, tmp_path)
    for rows in (0, 5):
        extra = {"backbone.layers.1.mixer.in_proj.weight": torch.zeros(rows, 36)}
        save_file({**loaded(tmp_path), **extra}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"also hold backbone\.layers\.1\.mixer\.in_proj"):
            HFReader(tmp_path)


def test_stacked_experts_without_gates_are_read(tmp_path):
    """A state that was saved without `save_pretrained` has the form of version 5 in memory."""
    model = SAMPLES["nemotron-h-experts"].ours
    source = weights_of(model, named("nemotron-h-experts"))
    write_hf(source, model, VOCAB, tmp_path)
    tensors = loaded(tmp_path)
    for layer in (1, 4):
        for kind in ("up_proj", "down_proj"):
            block = f"backbone.layers.{layer}.mixer.experts"
            each = [tensors.pop(f"{block}.{number}.{kind}.weight") for number in range(8)]
            tensors[f"{block}.{kind}"] = torch.stack(each)
    save_file(tensors, tmp_path / "model.safetensors")
    with HFReader(tmp_path) as reader:
        for key in reader.shapes:
            assert torch.equal(reader.tensor(key), source.tensors[key])


def test_mamba2s_older_name_of_the_embedding_is_read(tmp_path):
    model = SAMPLES["mamba2"].ours
    write_hf(weights_of(model, named("mamba2")), model, VOCAB, tmp_path)
    tensors = loaded(tmp_path)
    tensors["backbone.embedding.weight"] = tensors.pop("backbone.embeddings.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with HFReader(tmp_path) as reader:
        assert reader.description.model.layer_kinds == "MM"
