"""What descendants of Llama cannot hold is refused by name, in both directions."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import save_file

from megazero.checkpoint.naming import Table
from megazero.checkpoint.part import ROUTER, WEIGHT, Key
from megazero.commands.checkpoint.hf import describe_import, main_to_hf
from megazero.config.tree.model import ModelConfig
from megazero.errors import CheckpointError
from megazero.formats.hf.architecture import Architecture
from megazero.formats.hf.architectures import ARCHITECTURES, DECODERS
from megazero.formats.hf.config_json import (
    Description,
    TokenIds,
    architecture_of,
    config_of,
    model_of,
    objections,
)
from megazero.formats.hf.convert import convert_from_hf
from megazero.formats.hf.reader import HFReader
from megazero.formats.hf.writer import ModelFiles, write_hf
from megazero.spec.resolve import model_spec
from tests.formats.hf.descendants import SAMPLES
from tests.formats.hf.samples import LLAMA, VOCAB, MemorySource
from tests.formats.hf.test_writer import loaded
from tests.tables import over_table


def named(name: str) -> Architecture:
    return next(each for each in ARCHITECTURES if each.name == f"{SAMPLES[name].name}ForCausalLM")


def config_for(name: str, **changed: object) -> dict[str, object]:
    config = config_of(named(name), SAMPLES[name].ours, VOCAB, TokenIds(1, 2), "float32")
    return {**config, **changed}


VARIANTS = {
    "softmax_type": "learnable",
    "softmax_scale": 0.3,
    "attn_logit_softcapping": 2.0,
    "qk_layernorm": True,
    "attention_output_gate": True,
    "apply_layernorm_1p": True,
    "norm_position": "both",
    "glu_linear_offset": 1.0,
    "activation_func_clamp_value": 3.0,
    "use_parallel_residual": True,
    "share_parallel_norm": True,
    "norm_bias": False,
    "rotary_interleaved": True,
    "no_rope_freq": (2,),
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "logits_multiplier": 0.5,
    "final_logit_softcapping": 3.0,
    "window_rotary_base": 7.0,
    "multi_latent_attention": True,
    "mtp_num_layers": 1,
}


@over_table("field", VARIANTS)
def test_an_architecture_without_a_variant_refuses_it_by_name(field):
    llama = next(each for each in DECODERS if each.name == "LlamaForCausalLM")
    assert objections(llama, LLAMA) == []
    reasons = objections(llama, LLAMA.model_copy(update={field: VARIANTS[field]}))
    assert any(reason.startswith(f"`{field}` must be ") for reason in reasons)


@over_table(
    ("name", "update", "message"),
    [
        ("qwen3", {"add_qkv_bias": True}, "`add_qkv_bias` must be False, but is True"),
        ("qwen3", {"qk_layernorm_scope": "projection"}, "`qk_layernorm_scope` must be head"),
        ("qwen3-moe", {"moe_shared_expert_intermediate_size": 8}, "there must be no shared experts"),
        ("olmo2", {"norm_position": "both"}, "`norm_position` must be output, but is both"),
        ("olmoe", {"moe_layer_freq": (2,)}, "all layers must have experts"),
        ("gemma2", {"embedding_multiplier": 5.0}, "`embedding_multiplier` must be the root of the hidden"),
        ("gemma2", {"softmax_scale": 0.3}, r"`softmax_scale` must be 1 / sqrt\(a whole number\)"),
        ("gemma3", {"window_rotary_base": None}, "`window_rotary_base` must be set where layers have a"),
        ("phi3", {"position_embedding_type": "yarn"}, "rotary positions must not be scaled"),
        ("gpt-oss", {"moe_router_bias": False}, "`moe_router_bias` must be True, but is False"),
        ("gpt-oss", {"activation_func_clamp_value": None}, "the values of gates must be bounded"),
        ("deepseek-v3", {"norm_epsilon": 1e-5}, "`norm_epsilon` must be 1e-06"),
        ("deepseek-v3", {"moe_router_topk": 6}, "must be sent to 2 experts of each group"),
        ("deepseek-v3", {"moe_layer_freq": (1, 0, 1)}, "dense layers must come before all"),
        ("deepseek-v3", {"moe_shared_expert_intermediate_size": None}, "there must be shared experts"),
        ("deepseek-v3", {"mscale": 0.0}, "`mscale` must be positive where `mscale_all_dim` is"),
        ("deepseek-v3", {"mtp_num_layers": 1}, "`mtp_num_layers` must be None, but is 1"),
        ("deepseek-v2", {"moe_router_pre_softmax": False}, "`moe_router_pre_softmax` must be True"),
        ("gpt-neox", {"rotary_percent": 0.5}, "an even number of rotated channels"),
        ("cohere", {"norm_bias": True}, "`norm_bias` must be False, but is True"),
        ("cohere", {"share_parallel_norm": False}, "`share_parallel_norm` must be True"),
        ("cohere", {"rotary_interleaved": False}, "`rotary_interleaved` must be True"),
        ("cohere", {"no_rope_freq": (2,)}, r"`no_rope_freq` must be None, but is \(2,\)"),
        ("cohere2", {"no_rope_freq": None}, "layers with a window must rotate, and no others"),
        ("cohere2", {"window_attn_skip_freq": None}, "layers with a window must rotate, and no others"),
        ("smollm3", {"window_size": (3, 0)}, "all tokens must see all earlier ones"),
        ("falcon", {"rotary_percent": 0.67}, "`rotary_percent` must be 1.0, but is 0.67"),
    ],
)  # fmt: skip
def test_models_that_it_cannot_express_are_refused(name, update, message):
    with pytest.raises(CheckpointError, match=message):
        architecture_of(SAMPLES[name].ours.model_copy(update=update), named(name).name)


@over_table(
    ("name", "changed", "message"),
    [
        ("qwen3", {"attention_bias": True}, "`attention_bias` must be False"),
        ("qwen3-moe", {"use_sliding_window": True, "sliding_window": 5}, "`layer_types` must say which"),
        ("olmoe", {"clip_qkv": 8.0}, "`clip_qkv` must be None, but is 8.0"),
        ("gemma2", {"use_bidirectional_attention": True}, "`use_bidirectional_attention` must be False"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 2}, "must be sliding_attention or full_attention"),
        (
            "gemma3",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "`rope_parameters` must not scale layers with a window",
        ),
        ("phi3", {"rope_parameters": None, "rope_scaling": {"type": "longrope"}}, "must be a rotation of"),
        ("gpt-oss", {"swiglu_alpha": 1.5}, "`swiglu_alpha` must be 1.702"),
        ("deepseek-v3", {"norm_topk_prob": False}, "`norm_topk_prob` must be True"),
        ("deepseek-v3", {"n_shared_experts": 0}, "`n_shared_experts` must be a positive number"),
        ("deepseek-v3", {"first_k_dense_replace": 3}, "`first_k_dense_replace` must be less than the 3"),
        (
            "deepseek-v3",
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale_all_dim": 1.0}},
            "`rope_scaling` must have `mscale` beside `mscale_all_dim`",
        ),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "`topk_method` must be greedy or group_limited_greedy"),
        ("deepseek-v2", {"topk_group": 1, "num_experts_per_tok": 4}, "must be sent to 1 experts of each"),
        ("deepseek-v3", {"moe_intermediate_size": None}, "`moe_intermediate_size` must be a positive number"),
        ("gpt-neox", {"rotary_pct": 0.5}, "`rotary_pct` must be given once"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "`query_pre_attn_scalar` must be a number to"),
        ("granite", {"logits_scaling": 0.0}, "to calculate with, but is 0.0: float division"),
        ("gemma3", {"layer_types": None, "sliding_window_pattern": 0}, "`sliding_window_pattern` must be a"),
        ("gemma3", {"layer_types": None, "sliding_window_pattern": None}, "a positive number, but is None"),
        ("gemma3", {"layer_types": None, "sliding_window_pattern": "x"}, "a positive number, but is 'x'"),
        ("gemma3", {"rope_parameters": {"sliding_attention": 3}}, "`rope_parameters` must hold objects, but"),
        ("qwen3", {"layer_types": 3}, "`layer_types` must be full_attention for all .*, but is 3"),
        ("cohere", {"use_qk_norm": True}, "`use_qk_norm` must be False, but is True"),
        ("cohere", {"attention_bias": True}, "`attention_bias` must be False, but is True"),
        ("cohere2", {"layer_types": ["full_attention"] * 4}, "must give some layers a window"),
        ("cohere2", {"head_dim": 9}, "`head_dim` must be `hidden_size` / `num_attention_heads`"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "`no_rope_layers` must be 0 or 1 for each of 4 layers"),
        ("smollm3", {"no_rope_layers": [0] * 4}, "`no_rope_layers` must let some layer rotate"),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "must be a positive number, but"),
        ("smollm3", {"use_sliding_window": True}, "`use_sliding_window` must be "),
        ("falcon", {"new_decoder_architecture": False}, "`new_decoder_architecture` must be true"),
        ("falcon", {"num_ln_in_parallel_attn": 1}, "`num_ln_in_parallel_attn` must be 2"),
    ],
)  # fmt: skip
def test_configs_of_other_models_are_refused(name, changed, message):
    with pytest.raises(ValueError, match=message):
        model_of(named(name), config_for(name, **changed))


@over_table("scale", [1.5, 2.0, 1e200, 1e-200])
def test_any_scale_of_the_scores_is_refused_with_reasons(scale):
    """Every architecture is tried; Gemma's once divided by 0, the rounded inverse of a scale's square."""
    with pytest.raises(CheckpointError, match=r"`softmax_scale` must be 1 / sqrt\(a whole number\)"):
        architecture_of(SAMPLES["gemma2"].ours.model_copy(update={"softmax_scale": scale}))
    with pytest.raises(CheckpointError, match="`softmax_scale` must be None, but is "):
        architecture_of(LLAMA.model_copy(update={"softmax_scale": scale, "add_bias_linear": True}))


@over_table("divisor", [1.0, 3.0, 16.0, 1e-14, 123456789.123, 0.1 + 0.2])
def test_granites_divisor_comes_back(divisor):
    config = config_for("granite", logits_scaling=divisor)
    model = model_of(named("granite"), config)
    written = config_of(named("granite"), model, VOCAB, TokenIds(1, 2), "float32")["logits_scaling"]
    assert written == divisor


def test_own_code_of_older_folders_and_another_name_of_gelu_are_read():
    model = model_of(named("falcon"), config_for("falcon", auto_map={"AutoConfig": "configuration_falcon.X"}))
    assert model.use_parallel_residual
    assert model_of(named("gpt-neox"), config_for("gpt-neox", hidden_act="gelu_fast")).activation == "gelu"
    gelu = SAMPLES["gpt-neox"].ours.model_copy(update={"activation": "gelu"})
    assert config_of(named("gpt-neox"), gelu, VOCAB, TokenIds(), "float32")["hidden_act"] == "gelu_new"


def test_gpt_oss_without_yarn_says_so_to_version_4_too():
    """Version 4 assumes YaRN if `rope_scaling` is missing."""
    model = SAMPLES["gpt-oss"].ours.model_copy(update={"position_embedding_type": "rope"})
    config = config_of(named("gpt-oss"), model, VOCAB, TokenIds(1, 2), "float32")
    assert config["rope_scaling"] == {"rope_type": "default"}
    assert config["rope_theta"] == 500.0
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 500.0}
    assert model_of(named("gpt-oss"), config).position_embedding_type == "rope"
    transformers = pytest.importorskip("transformers")
    read = transformers.GptOssConfig(**config).rope_parameters
    assert (read["rope_type"], read["rope_theta"]) == ("default", 500.0)


def test_a_config_may_leave_out_what_transformers_assumes():
    bare = {"model_type": "gemma2", "num_hidden_layers": 4, "architectures": ["Gemma2ForCausalLM"]}
    gemma = model_of(named("gemma2"), bare)
    assert (gemma.attn_logit_softcapping, gemma.final_logit_softcapping) == (50.0, 30.0)
    assert (gemma.windows, gemma.softmax_scale) == (((4095, 0), None) * 2, 256**-0.5)
    old = {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8},
    }
    gemma = model_of(named("gemma3"), {"num_hidden_layers": 6, "sliding_window": 512, **old})
    assert gemma.windows == ((511, 0),) * 5 + (None,)
    assert (gemma.rotary_base, gemma.window_rotary_base) == (1e6, 1e4)
    assert gemma.rotary_seq_len_interpolation_factor == 8.0
    oss = model_of(named("gpt-oss"), {"num_hidden_layers": 2})
    assert (oss.position_embedding_type, oss.rotary_scaling_factor, oss.rotary_base) == ("yarn", 32.0, 150e3)
    assert oss.windows == ((127, 0), None)
    assert not oss.yarn_correction_range_round_to_int
    v3 = model_of(named("deepseek-v3"), {"num_hidden_layers": 4, "auto_map": {"AutoModel": "x.Y"}})
    assert v3.experts_by_layer == (0, 0, 0, 256)
    assert (v3.q_lora_rank, v3.moe_router_num_groups, v3.moe_router_group_topk) == (1536, 8, 4)
    assert (v3.moe_router_topk_scaling_factor, v3.moe_shared_expert_intermediate_size) == (2.5, 2048)
    command = model_of(named("cohere2"), {"num_hidden_layers": 4})
    assert (command.windows, command.unrotated) == (((4095, 0),) * 3 + (None,), (0, 0, 0, 1))
    assert (command.rotary_base, command.logits_multiplier) == (10_000.0, 0.0625)
    assert model_of(named("cohere"), {"num_hidden_layers": 2}).rotary_base == 500_000.0
    smol = model_of(named("smollm3"), {"num_hidden_layers": 5})
    assert (smol.unrotated, smol.rotary_base) == ((0, 0, 0, 1, 0), 2e6)
    neox = model_of(named("gpt-neox"), {"rotary_emb_base": 20000})
    assert (neox.rotary_base, neox.rotary_percent, neox.use_parallel_residual) == (20000.0, 0.25, True)


def test_a_window_of_all_positions_stays_where_it_has_a_base_of_its_own():
    config = config_for("gemma3", sliding_window=31)
    model = model_of(named("gemma3"), config)
    assert model.windows == ((30, 0), None)
    assert config_of(named("gemma3"), model, VOCAB, TokenIds(1, 2), "float32") == config


def weights_of(model: ModelConfig, architecture: Architecture) -> MemorySource:
    generator = torch.Generator().manual_seed(7)
    shapes = Table.of(architecture.rules, model_spec(model), VOCAB).shapes
    source = MemorySource({})
    source.tensors = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    return source


def test_constants_are_written_and_checked(tmp_path):
    """Apertus has two numbers of xIELU as buffers; a file may lack them, or hold them as bf16 rounds them."""
    model, name = SAMPLES["apertus"].ours, "model.layers.1.mlp.act_fn"
    write_hf(weights_of(model, named("apertus")), model, VOCAB, tmp_path / "hf")
    tensors = loaded(tmp_path / "hf")
    assert tensors[f"{name}.beta"].item() == 0.5
    assert torch.equal(tensors[f"{name}.eps"], torch.tensor(-1e-6))

    def read(**changed: torch.Tensor | None) -> None:
        own = {**tensors, **{f"{name}.{which}": tensor for which, tensor in changed.items()}}
        kept = {key: tensor for key, tensor in own.items() if tensor is not None}
        save_file(kept, tmp_path / "hf" / "model.safetensors")
        HFReader(tmp_path / "hf").close()

    read(beta=None, eps=torch.tensor(-1e-6).bfloat16())
    read(eps=torch.tensor(-1e-6).bfloat16().float())
    for wrong in (torch.tensor(0.4), torch.tensor([0.5]), torch.tensor(1)):
        with pytest.raises(CheckpointError, match=r"act_fn.beta as .* with other numbers than 0.5"):
            read(beta=wrong)


def test_apertus_is_scaled_unless_it_says_otherwise():
    model = model_of(named("apertus"), {"num_hidden_layers": 2})
    assert (model.rotary_base, model.use_rope_scaling, model.rope_scaling_factor) == (12e6, True, 8.0)
    plain = model_of(named("apertus"), {"rope_parameters": {"rope_type": "default"}})
    assert (plain.rotary_base, plain.use_rope_scaling) == (12e6, False)
    with pytest.raises(ValueError, match="`hidden_act` must be one of xielu"):
        model_of(named("apertus"), {"hidden_act": "silu"})


def test_the_class_may_be_named(tmp_path, capsys):
    """Mistral, which is tried first, can express whatever Phi-3 can."""
    model = SAMPLES["phi3"].ours
    assert architecture_of(model).name == "MistralForCausalLM"
    source = weights_of(model, named("phi3"))
    for name in ("MistralForCausalLM", "Phi3ForCausalLM"):
        files = ModelFiles(architecture=name)
        assert write_hf(source, model, VOCAB, tmp_path / name, extras=files).architecture == name
        assert Description.read(tmp_path / name).architecture.name == name
    with pytest.raises(CheckpointError, match="the architecture must be one of .*, but is 'T5'"):
        architecture_of(model, "T5")
    with pytest.raises(SystemExit):
        main_to_hf(["run", "out", "--architecture", "T5"])
    assert "invalid choice: 'T5'" in capsys.readouterr().err


def test_biases_of_the_choice_are_zeros_where_a_checkpoint_has_none(tmp_path):
    sample = SAMPLES["deepseek-v3"]
    source = weights_of(sample.ours, named("deepseek-v3"))
    source.tensors = {key: tensor for key, tensor in source.tensors.items() if key.kind == WEIGHT}
    write_hf(source, sample.ours, VOCAB, tmp_path / "out")
    with HFReader(tmp_path / "out") as reader:
        bias = reader.tensor(Key("layers.1.mlp.router.bias", ROUTER))
        assert (bias.shape, bias.abs().max()) == ((8,), 0)
        assert torch.equal(
            reader.tensor(Key("layers.1.mlp.router.weight")),
            source.tensors[Key("layers.1.mlp.router.weight")],
        )


def test_biases_of_the_choice_stay_fp32(tmp_path):
    """Rounded to bf16, they once changed the chosen experts; transformers keeps them in fp32 too."""
    sample, key = SAMPLES["deepseek-v3"], Key("layers.1.mlp.router.bias", ROUTER)
    source = weights_of(sample.ours, named("deepseek-v3"))
    source.tensors[key] = torch.tensor([1.0, 1.0009765625, 0.99951171875, 0.1, 0.2, 0.3, 0.4, 0.5])
    write_hf(source, sample.ours, VOCAB, tmp_path / "one", dtype=torch.bfloat16)
    write_hf(source, sample.ours, VOCAB, tmp_path / "many", dtype=torch.bfloat16, max_shard_bytes=9000)
    tensors = loaded(tmp_path / "one")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert {n for n, tensor in tensors.items() if tensor.dtype == torch.float32} == {
        name,
        name.replace("1", "2"),
    }
    assert torch.equal(tensors[name], source.tensors[key])
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    with HFReader(tmp_path / "one") as reader:
        assert torch.equal(reader.tensor(key), source.tensors[key])


def test_a_layer_for_further_tokens_is_left_out_with_a_remark(tmp_path):
    """transformers drops the layer too; any other surplus layer is still refused."""
    sample = SAMPLES["deepseek-v3"]
    write_hf(weights_of(sample.ours, named("deepseek-v3")), sample.ours, VOCAB, tmp_path / "hf")
    tensors, layers = loaded(tmp_path / "hf"), sample.ours.num_layers
    last = {n: t for n, t in tensors.items() if n.startswith(f"model.layers.{layers - 1}.")}
    further = {n.replace(f"layers.{layers - 1}.", f"layers.{layers}."): t.clone() for n, t in last.items()}
    further |= {f"model.layers.{layers}.eh_proj.weight": torch.zeros(36, 72)}
    save_file({**tensors, **further}, tmp_path / "hf" / "model.safetensors")
    imported = convert_from_hf(tmp_path / "hf", tmp_path / "run")
    assert imported.remarks == ("left out layer 3, which predicts further tokens, as transformers does",)
    assert imported.remarks[0] in describe_import(imported)
    assert imported.description.model.num_layers == layers == 3
    del further[f"model.layers.{layers}.eh_proj.weight"]
    save_file({**tensors, **further}, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"also hold .*model\.layers\.3\."):
        HFReader(tmp_path / "hf")


def test_each_architecture_names_our_fields_and_theirs_once():
    for architecture in DECODERS:
        fields = [field for field, _ in (*architecture.ours_fixed, *architecture.implied)]
        assert len(fields) == len(set(fields)), architecture.name
        assert set(fields) <= ModelConfig.model_fields.keys()
        theirs = [setting.theirs for setting in architecture.settings]
        assert len(theirs) == len(set(theirs)), architecture.name
        assert json.dumps(dict(architecture.fixed))
        assert dataclasses.is_dataclass(architecture)


def test_a_matrix_of_queries_keys_and_values_must_have_the_rows_of_all(tmp_path):
    model = SAMPLES["phi3"].ours
    write_hf(
        weights_of(model, named("phi3")),
        model,
        VOCAB,
        tmp_path,
        extras=ModelFiles(architecture="Phi3ForCausalLM"),
    )
    tensors, name = loaded(tmp_path), "model.layers.1.self_attn.qkv_proj.weight"
    assert tensors[name].shape == (36 + 12 + 12, 36)
    save_file({**tensors, name: tensors[name][:-1].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lack .*k_proj.* also hold .*1\.self_attn\.qkv_proj"):
        HFReader(tmp_path)
