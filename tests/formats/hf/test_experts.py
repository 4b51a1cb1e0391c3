"""Mixtral and Qwen2-MoE there and back: the same tensors, single or stacked, or a refusal that says why."""

from __future__ import annotations

import json
import re

import pytest
import torch

from megazero.checkpoint.box import Box, gaps_or_overlaps
from megazero.checkpoint.naming import Table, TensorLink, TensorRule
from megazero.checkpoint.part import Key, Part
from megazero.checkpoint.reader import CheckpointReader
from megazero.commands.checkpoint.hf import main_to_hf
from megazero.config.resolve import parse_config
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.tokenizer import TokenizerConfig
from megazero.errors import CheckpointError, ConfigError
from megazero.formats.hf.approximation import NO_CAPACITY
from megazero.formats.hf.config_json import Description, TokenIds, architecture_of, differences, model_of
from megazero.formats.hf.convert import convert_from_hf, convert_to_hf
from megazero.formats.hf.reader import HFReader
from megazero.formats.hf.writer import ModelFiles, write_hf
from megazero.spec.resolve import model_spec
from tests.formats.hf.expert_samples import MIXTRAL, MODELS, QWEN2_MOE, stacked
from tests.formats.hf.model_flags import model_flags
from tests.formats.hf.samples import (
    GPT2,
    LLAMA,
    VOCAB,
    config_for,
    parameter_specs,
    random_weights,
    their_tensors,
    write_folder,
)
from tests.formats.hf.test_convert import save_as_trained
from tests.formats.hf.test_writer import loaded
from tests.tables import over_table

EXTRAS = ModelFiles(TokenIds(1, 2))
TOKENS = torch.randint(VOCAB, (2, 17), generator=torch.Generator().manual_seed(5))


def table_of(model: ModelConfig) -> Table:
    return Table.of(architecture_of(model).rules, model_spec(model), VOCAB)


def test_a_name_with_a_number_of_an_expert_is_one_tensor_for_each():
    """Our tensor is [x, 2, m, h] = [3, 2, 1, 2]; each of their six is [m, h] = [1, 2]."""
    model = MIXTRAL.model_copy(update={"num_layers": 1, "hidden_size": 2, "ffn_hidden_size": 1})
    rule = TensorRule("{i}.up", "x 2 m h", "experts.{x}.w3", "(x 2 m) h", ("2", slice(1, 2)))
    links = Table.of([rule], model_spec(model), 5).links
    assert links == tuple(
        TensorLink(
            Key("0.up"), (3, 2, 1, 2), Box((x, 1, 0, 0), (1, 1, 1, 2)), f"experts.{x}.w3", ((0, 1, 2), (3,))
        )
        for x in range(3)
    )
    assert links[2].their_shape == (1, 2)
    assert links[2].as_ours(torch.tensor([[7, 8]])).tolist() == [[[[7, 8]]]]


@over_table(
    ("name", "architecture"),
    [
        (name, "MixtralForCausalLM" if name.startswith("mixtral") else "Qwen2MoeForCausalLM")
        for name in MODELS
    ],
)
def test_tables_hold_every_element_of_our_model_once(name, architecture):
    assert architecture_of(MODELS[name]).name == architecture
    table = table_of(MODELS[name])
    assert {key.name: shape for key, shape in table.shapes.items()} == parameter_specs(MODELS[name])
    for key, links in table.by_key.items():
        assert gaps_or_overlaps(table.shapes[key], [link.box for link in links]) is None
    assert len(table.by_theirs) == len(table.links)


def test_ours_are_stacked_whole_and_named_as_the_model_s():
    every_second = table_of(MODELS["qwen2-moe-every-second"]).shapes
    shapes = {key.name: shape for key, shape in every_second.items() if ".mlp." in key.name}
    assert shapes == {
        **{f"layers.{i}.mlp.up.weight": (2, 58, 36) for i in (0, 2, 4)},
        **{f"layers.{i}.mlp.down.weight": (36, 58) for i in (0, 2, 4)},
        **{f"layers.{i}.mlp.router.weight": (3, 36) for i in (1, 3)},
        **{f"layers.{i}.mlp.experts.up.weight": (3, 2, 14, 36) for i in (1, 3)},
        **{f"layers.{i}.mlp.experts.down.weight": (3, 36, 14) for i in (1, 3)},
        **{f"layers.{i}.mlp.shared.up.weight": (2, 22, 36) for i in (1, 3)},
        **{f"layers.{i}.mlp.shared.down.weight": (36, 22) for i in (1, 3)},
        **{f"layers.{i}.mlp.shared_gate.weight": (1, 36) for i in (1, 3)},
    }
    mixtral = {key.name: shape for key, shape in table_of(MIXTRAL).shapes.items() if ".mlp." in key.name}
    assert mixtral == {
        f"layers.{i}.mlp.{name}.weight": shape
        for i in range(2)
        for name, shape in (
            ("router", (3, 36)),
            ("experts.up", (3, 2, 58, 36)),
            ("experts.down", (3, 36, 58)),
        )
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_is_bit_equal(name, dtype, tmp_path):
    model = MODELS[name]
    config = config_for(model, torch_dtype=str(dtype).removeprefix("torch."))
    tensors = their_tensors(model, dtype)
    for link in Table.of(architecture_of(model).blank, model_spec(model), VOCAB).links:
        tensors[link.theirs] = torch.zeros(link.their_shape, dtype=dtype)
    write_folder(tmp_path / "hf", config, tensors)
    imported = convert_from_hf(tmp_path / "hf", tmp_path / "run")
    assert differences(imported.description.model, model) == []
    ours, reader = random_weights(model).tensors, CheckpointReader(imported.folder)
    assert reader.shapes == {key: tuple(tensor.shape) for key, tensor in ours.items()}
    assert all(torch.equal(reader.tensor(key), tensor) for key, tensor in ours.items())
    convert_to_hf(tmp_path / "run", tmp_path / "back", dtype=dtype, max_shard_bytes=20_000)
    back = loaded(tmp_path / "back")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[key], tensors[key]) for key in tensors)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config


@over_table("name", ["mixtral", "qwen2-moe", "qwen2-moe-here-and-there"])
def test_experts_may_be_stacked_in_the_file(name, tmp_path):
    """A state that was saved without `save_pretrained` has them so."""
    one_by_one = their_tensors(MODELS[name])
    tensors = stacked(one_by_one)
    assert tensors.keys() - one_by_one.keys() >= {
        f"model.layers.1.mlp.experts.{n}_proj" for n in ("gate_up", "down")
    }
    assert tensors["model.layers.1.mlp.experts.gate_up_proj"].shape[:2] == (
        3,
        2 * MODELS[name].expert_ffn_size,
    )
    with HFReader(write_folder(tmp_path / "hf", config_for(MODELS[name]), tensors)) as reader:
        reader.check_model(MODELS[name], VOCAB)
        for key, tensor in random_weights(MODELS[name]).tensors.items():
            assert torch.equal(reader.tensor(key), tensor), key
        write_hf(reader, reader.description.model, VOCAB, tmp_path / "out", extras=EXTRAS)
    written = loaded(tmp_path / "out")
    assert written.keys() == one_by_one.keys()
    assert all(torch.equal(written[key], one_by_one[key]) for key in written)


@pytest.mark.parametrize("form", ["one by one", "stacked"])
def test_an_expert_is_read_alone(form, tmp_path, monkeypatch):
    """Rank 1 of three that share the experts reads one gate, in two chunks of rows, and nothing else."""
    from megazero.checkpoint.blocks import BlockFile

    monkeypatch.setattr("megazero.formats.hf.reader.CHUNK", 29 * 36)
    tensors = their_tensors(MIXTRAL)
    folder = write_folder(tmp_path, config_for(MIXTRAL), stacked(tensors) if form == "stacked" else tensors)
    sizes, real = [], BlockFile.read_into
    with HFReader(folder) as reader:
        monkeypatch.setattr(
            BlockFile,
            "read_into",
            lambda self, memory, at: (sizes.append(len(memory)), real(self, memory, at)),
        )
        key, box = Key("layers.1.mlp.experts.up.weight"), Box((1, 0, 0, 0), (1, 1, 58, 36))
        memory = torch.empty(box.shape)
        reader.read([Part(key, reader.shapes[key], box, memory)])
    assert torch.equal(memory[0, 0], tensors["model.layers.1.block_sparse_moe.experts.1.w1.weight"])
    assert sizes == [29 * 36 * 4] * 2


def test_a_missing_expert_is_named(tmp_path):
    tensors = their_tensors(QWEN2_MOE)
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"they lack model.layers.1.mlp.experts.2.up_proj.weight$"):
        HFReader(write_folder(tmp_path, config_for(QWEN2_MOE), tensors))


def test_stacked_experts_of_another_number_are_refused(tmp_path):
    folder = write_folder(
        tmp_path, config_for(MIXTRAL, num_local_experts=2**40), stacked(their_tensors(MIXTRAL))
    )
    with pytest.raises(
        CheckpointError, match=r"experts.down_proj as torch.float32 \[3, 36, 58\] instead of floats"
    ):
        HFReader(folder)


def test_more_experts_than_tensors_are_refused_at_once(tmp_path):
    folder = write_folder(tmp_path, config_for(MIXTRAL, num_local_experts=2**40), their_tensors(MIXTRAL))
    with pytest.raises(CheckpointError, match="2199023255552 experts cannot be in 35 tensors"):
        HFReader(folder)


def test_a_model_without_shared_experts_has_one_channel_of_zeros_there(tmp_path):
    model = MODELS["qwen2-moe-not-shared"]
    write_hf(random_weights(model), model, VOCAB, tmp_path / "out", extras=EXTRAS)
    tensors = loaded(tmp_path / "out")
    shared = {name: tuple(t.shape) for name, t in tensors.items() if "layers.1.mlp.shared" in name}
    assert shared == {
        "model.layers.1.mlp.shared_expert.gate_proj.weight": (1, 36),
        "model.layers.1.mlp.shared_expert.up_proj.weight": (1, 36),
        "model.layers.1.mlp.shared_expert.down_proj.weight": (36, 1),
        "model.layers.1.mlp.shared_expert_gate.weight": (1, 36),
    }
    assert not any(tensors[name].any() for name in shared)
    HFReader.for_model(tmp_path / "out", model, VOCAB).close()
    # One number that is not zero, and they are shared experts.
    tensors["model.layers.1.mlp.shared_expert.up_proj.weight"][0, 3] = 1e-30
    with HFReader(write_folder(tmp_path / "other", config_for(model), tensors)) as reader:
        assert reader.shapes[Key("layers.0.mlp.shared.down.weight")] == (36, 1)
        with pytest.raises(CheckpointError, match="`moe_shared_expert_intermediate_size` is 1, not None"):
            reader.check_model(model, VOCAB)


def test_what_only_trains_is_no_difference():
    free = {
        "moe_aux_loss_coeff": (0.01,),
        "moe_z_loss_coeff": 1e-3,
        "moe_expert_capacity_factor": 1.25,
        "moe_input_jitter_eps": 0.01,
        "moe_ffn_hidden_size": 58,
        "ffn_hidden_size": 99,
        "num_experts": (3, 3),
        "expert_interval": 1,
    }
    assert differences(MIXTRAL, MIXTRAL.model_copy(update=free)) == []
    placed = QWEN2_MOE.model_copy(update={"num_layers": 4, "expert_interval": 2})
    assert (
        differences(
            placed, placed.model_copy(update={"expert_interval": None, "moe_layer_freq": (0, 1, 0, 1)})
        )
        == []
    )
    assert differences(placed, placed.model_copy(update={"ffn_hidden_size": 99})) == [
        "`ffn_hidden_size` is 58, not 99"
    ]
    other = {"moe_router_topk": 1, "moe_router_pre_softmax": False}
    assert differences(QWEN2_MOE, QWEN2_MOE.model_copy(update=other)) == [
        "`moe_router_topk` is 2, not 1",
        "`moe_router_pre_softmax` is True, not False",
    ]
    assert differences(LLAMA, MIXTRAL)[0].startswith("`num_experts` is ")


REFUSED = [
    (MIXTRAL, {"num_local_experts": 0}, "`num_local_experts` is 0"),
    (MIXTRAL, {"num_local_experts": 1}, "there must be experts"),
    (MIXTRAL, {"num_local_experts": "3"}, "`num_local_experts` must be a int"),
    (MIXTRAL, {"num_experts_per_tok": 4}, "a token must not be sent to more experts than there are"),
    (MIXTRAL, {"sliding_window": -1}, "`sliding_window` must be at least 1"),
    (MIXTRAL, {"hidden_act": "gelu"}, "`hidden_act` must be one of silu, swish"),
    (QWEN2_MOE, {"use_sliding_window": True}, "`layer_types` must say which layers have the `sliding_wi"),
    (
        QWEN2_MOE,
        {"layer_types": ["full_attention", "sliding_attention"]},
        "`layer_types` must be full_attention",
    ),
    (QWEN2_MOE, {"decoder_sparse_step": 0}, "`decoder_sparse_step` must be a positive number"),
    (QWEN2_MOE, {"decoder_sparse_step": 3}, "at least one layer must have experts"),
    (QWEN2_MOE, {"mlp_only_layers": 1}, "`mlp_only_layers` must be a list of layers"),
    (QWEN2_MOE, {"mlp_only_layers": [0, 1]}, "at least one layer must have experts"),
    (
        QWEN2_MOE,
        {"mlp_only_layers": [0], "num_hidden_layers": 2**40},
        "`num_hidden_layers` must be 1 to 10000",
    ),
    (QWEN2_MOE, {"head_dim": 8}, "the width of a head must be hidden size / heads"),
    (QWEN2_MOE, {"norm_topk_prob": None}, "`norm_topk_prob` must be a bool"),
]


@over_table(("model", "changed", "message"), REFUSED, ids=[str(row[1])[:60] for row in REFUSED])
def test_what_ours_has_not_is_refused_by_field(model, changed, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_for(model, **changed)))
    with pytest.raises(CheckpointError) as refusal:
        Description.read(tmp_path)
    assert message in str(refusal.value)


def test_a_window_that_is_not_used_does_not_matter():
    """The first Qwen2-MoE has such a field."""
    config = config_for(QWEN2_MOE, sliding_window=32768, use_sliding_window=False, max_window_layers=21)
    assert differences(model_of(architecture_of(QWEN2_MOE), config), QWEN2_MOE) == []


@over_table(
    ("model", "changed", "reasons"),
    [
        (
            MIXTRAL,
            {"moe_router_score_function": "sigmoid"},
            "`moe_router_score_function` must be softmax, but is",
        ),
        (MIXTRAL, {"mlp_type": "residual"}, "`mlp_type` must be standard, but is residual"),
        (MIXTRAL, {"num_experts": (3, 6)}, "all layers with experts must have the same number of them"),
        (MIXTRAL, {"moe_router_num_groups": 3}, "experts must be chosen from all, not from groups"),
        (MIXTRAL, {"moe_router_topk_scaling_factor": 2.5}, "the experts' weights must not be scaled"),
        (
            MIXTRAL,
            {"moe_router_enable_expert_bias": True},
            "no bias of the experts may take part in their choice",
        ),
        (MIXTRAL, {"moe_expert_capacity_factor": 1.0}, "`--ignore-capacity` writes it all the same"),
        (MIXTRAL, {"add_bias_linear": True}, "`add_bias_linear` must be False, but is True"),
        (QWEN2_MOE, {"moe_shared_expert_gate": False}, "shared experts must be weighed by a gate"),
        (QWEN2_MOE, {"kv_channels": 8}, "the width of a head must be hidden size / heads"),
    ],
)
def test_a_model_that_transformers_has_not_is_refused_with_the_reasons(model, changed, reasons):
    with pytest.raises(CheckpointError) as refusal:
        architecture_of(model.model_copy(update=changed))
    assert reasons in str(refusal.value)
    assert re.search("ForCausalLM: .*there must be no experts", str(refusal.value))


def test_a_dense_model_is_not_refused_for_lack_of_experts():
    with pytest.raises(CheckpointError) as refusal:
        architecture_of(GPT2.model_copy(update={"apply_residual_connection_post_layernorm": True}))
    assert "experts" not in str(refusal.value)


def test_a_capacity_is_left_out_only_if_asked_for(tmp_path, capsys):
    limited = MIXTRAL.model_copy(update={"moe_expert_capacity_factor": 1.25})
    run = save_as_trained(
        tmp_path / "run", limited, TokenizerConfig(), weights=random_weights(MIXTRAL).tensors
    )
    assert main_to_hf([str(run), str(tmp_path / "out"), "--no-tokenizer"]) == 1
    assert "nothing may limit how many tokens an expert takes" in capsys.readouterr().err
    assert main_to_hf([str(run), str(tmp_path / "out"), "--no-tokenizer", "--ignore-capacity"]) == 0
    assert "outputs differ from here where that dropped tokens" in capsys.readouterr().out
    plain = save_as_trained(
        tmp_path / "plain", MIXTRAL, TokenizerConfig(), weights=random_weights(MIXTRAL).tensors
    )
    with pytest.raises(
        ConfigError, match="`--ignore-capacity` must be given for a model whose experts have a"
    ):
        convert_to_hf(plain, tmp_path / "again", approximations=[NO_CAPACITY])


@over_table("name", MODELS)
def test_the_flags_that_are_printed_make_the_model(name):
    model = MODELS[name].model_copy(update={"vocab_size": VOCAB})
    flags = [word for line in model_flags(model) for word in line.split()]
    flags += ["--micro-batch-size", "1", "--lr", "1e-3", "--train-iters", "1", "--mock-data"]
    assert parse_config(flags).config.model == model


def test_the_flags_that_are_printed_are_no_line_of_megatron_deepspeeds():
    """With `--expert-interval` alone, the other settings would have Megatron-DeepSpeed's defaults."""
    shape = {"vocab_size": VOCAB, "num_experts": (4,), "moe_layer_freq": None, "expert_interval": 2}
    model = LLAMA.model_copy(update=shape)
    flags = [word for line in model_flags(model) for word in line.split()]
    flags += ["--micro-batch-size", "1", "--lr", "1e-3", "--train-iters", "1", "--mock-data"]
    resolved = parse_config(flags)
    assert (resolved.config.model, resolved.warnings) == (model, ())
