"""What cannot be brought over is refused, by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from megazero.checkpoint.box import Box
from megazero.checkpoint.part import Key, Part
from megazero.errors import CheckpointError
from megazero.formats.megatron.reader import ImportOptions, MegatronReader
from tests.formats.megatron.samples import (
    GPT2,
    LLAMA,
    PADDED,
    VOCAB,
    Layout,
    arguments_of,
    edit,
    random_weights,
    save_deepspeed,
    save_layers,
    save_megatron,
)
from tests.tables import over_table

BOUNDED = {
    **{"num_experts": 4, "quick_geglu": True},
    **{"glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0},
}
UNTIED = {"untie_embeddings_and_output_weights": True}
_EXPERTS = "mixture of experts other than the arguments say"
TRUSTED = ImportOptions(trust_pickle=True, vocab_size=VOCAB)
WEIGHTS = random_weights(GPT2)


def refused(source: Path, match: str, options: ImportOptions = TRUSTED) -> None:
    with pytest.raises(CheckpointError, match=match):
        MegatronReader(source, options)


def rank_file(run: Path, rank: str = "00") -> Path:
    return run / "iter_0000100" / f"mp_rank_{rank}" / "model_optim_rng.pt"


@over_table(
    ("arguments", "match"),
    [
        ({"num_experts": 8}, "but holds decoder.layers.0.mlp.linear_fc1.bias"),
        ({"num_experts": [4, 8]}, "`num_experts` is .4, 8. .layers with different numbers of experts"),
        ({"retro_add_retriever": True}, "RETRO"),
        (
            {"multi_latent_attention": True},
            "holds decoder.layers.0.self_attention.linear_qkv.bias.* of a model with another attention",
        ),
        ({"mtp_num_layers": 1}, "`mtp_num_layers` is 1 .with learned positions"),
        ({"qk_layernorm": True}, "lacks decoder.layers.0.self_attention.k_layernorm"),
        ({"qk_l2_norm": True}, "`qk_l2_norm` is True .norms of queries and keys without weights"),
        (
            {"apply_layernorm_1p": True, "embed_layernorm": True},
            "`apply_layernorm_1p` is True .but not for all",
        ),
        ({"swiglu": True, "glu_linear_offset": 1.0}, "`glu_linear_offset` is 1.0 .without `quick_geglu`"),
        ({"activation_func_clamp_value": 7.0}, "`activation_func_clamp_value` is 7.0 .without `quick_geglu`"),
        (
            {**BOUNDED, "moe_grouped_gemm": True, "transformer_impl": "local"},
            "is 7.0 .which `GroupedMLP` and",
        ),
        (
            {**BOUNDED, "moe_shared_expert_intermediate_size": 8, "moe_shared_expert_overlap": True},
            "`glu_linear_offset` is 1.0, `activation_func_clamp_value` is 7.0 .which `GroupedMLP` and",
        ),
        ({"quick_geglu": True, "swiglu": True}, "`quick_geglu` is True beside another activation"),
        (
            {"position_embedding_type": "rope", "no_rope_freq": 3},
            "`no_rope_freq` is 3 of 4 layers",
        ),
        (
            {"position_embedding_type": "rope", "no_rope_freq": [0, 1]},
            "`no_rope_freq` is .0, 1. of 4 layers",
        ),
        ({"window_size": (128, 0, 1)}, "`window_size.*: Tuple should have at most 2 items"),
        ({"softmax_type": "half"}, "`softmax_type`: Input should be 'vanilla', 'off-by-one' or 'learnable'"),
        ({"position_embedding_type": "relative"}, "relative"),
        ({"normalization": "ScaleNorm"}, "`normalization` is 'ScaleNorm'"),
        ({"glu_activation": "geglu"}, "other than SwiGLU"),
        ({"openai_gelu": True}, "`openai_gelu` is True, which Core ignores"),
        ({"hidden_size": None}, "`hidden_size`: Field required; add what is missing with --megatron-args"),
        ({"num_layers": "many"}, "`num_layers`"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_arguments(tmp_path, arguments, match):
    save_megatron(tmp_path, GPT2, WEIGHTS, Layout(arguments=arguments))
    refused(tmp_path, match)


@over_table(
    "arguments",
    [{"qk_layernorm": True}, {"softmax_scale": 0.2}, {"quick_geglu": True}, {"apply_layernorm_1p": True}],
    ids=str,
)
def test_what_megatron_before_core_ignores(tmp_path, arguments):
    save_megatron(
        tmp_path, LLAMA, random_weights(LLAMA), Layout(dialect="old", arguments={**UNTIED, **arguments})
    )
    refused(tmp_path, f"`{next(iter(arguments))}` is .*, which (only Core has|RMSNorm before Core)")


def test_all_that_is_wrong_with_the_arguments_is_said_at_once(tmp_path):
    save_megatron(tmp_path, GPT2, WEIGHTS, Layout(arguments={"qk_l2_norm": True, "normalization": "x"}))
    refused(tmp_path, "qk_l2_norm.*; .*normalization")


@over_table(
    ("name", "kind"),
    [
        ("decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight", _EXPERTS),
        ("decoder.layers.0.mlp.router.weight", _EXPERTS),
        ("encoder.layers.0.mlp.linear_fc1.weight", "encoder-decoder"),
        ("decoder.layers.0.cross_attention.linear_kv.weight", "encoder-decoder"),
        ("language_model.decoder.layers.0.mlp.dense_h_to_4h.weight", "encoder-decoder"),
        ("binary_head.weight", "heads that its kind does not have"),
        ("language_model.embedding.tokentype_embeddings.weight", "heads that its kind does not have"),
        ("language_model.retriever.layers.0.mlp.weight", "RETRO"),
        ("decoder.layers.0.self_attention.q_layernorm.weight", "another attention"),
        ("decoder.layers.0.mlp.adapter.weight", None),
    ],
)
def test_unknown_tensors_are_listed_with_what_they_tell(tmp_path, name, kind):
    save_megatron(tmp_path, GPT2, WEIGHTS, Layout())
    edit(rank_file(tmp_path), lambda saved: saved["model"].update({name: torch.zeros(2)}))
    refused(
        tmp_path,
        rf"but holds .*{name.rpartition('.')[0].rpartition('.')[2]}.weight"
        + (f", of a model with {kind}$" if kind else "$"),
    )


def test_missing_tensors_are_listed(tmp_path):
    save_megatron(tmp_path, GPT2, WEIGHTS, Layout())
    edit(rank_file(tmp_path), lambda saved: saved["model"].pop("decoder.layers.2.mlp.linear_fc1.bias"))
    refused(tmp_path, "lacks decoder.layers.2.mlp.linear_fc1.bias$")


def test_a_missing_layer(tmp_path):
    save_megatron(tmp_path, GPT2, WEIGHTS, Layout())

    def drop(saved):
        for name in [name for name in saved["model"] if ".layers.2." in name]:
            del saved["model"][name]

    edit(rank_file(tmp_path), drop)
    refused(tmp_path, r"must number its layers from 0, but has \[0, 1, 3\]")


@over_table("tp_pp", ["00_000", "00_001", "01_000", "01_001"])
def test_a_missing_rank(tmp_path, tp_pp):
    save_megatron(tmp_path, GPT2, WEIGHTS, Layout(2, 2))
    shutil.rmtree(rank_file(tmp_path, tp_pp).parent)
    refused(tmp_path, "tensor-parallel rank")


def test_a_missing_tensor_parallel_size_or_stage(tmp_path):
    """Without the last rank of all stages, or the last stage of all ranks, names have no gap."""
    save_megatron(tmp_path / "a", GPT2, WEIGHTS, Layout(2))
    shutil.rmtree(rank_file(tmp_path / "a", "01").parent)
    refused(tmp_path / "a", "of 2 tensor-parallel ranks in 1 stages, but has 1 files")
    save_megatron(tmp_path / "b", GPT2, WEIGHTS, Layout(1, 2))
    shutil.rmtree(rank_file(tmp_path / "b", "00_001").parent)
    refused(tmp_path / "b", "in 2 stages, but has 1 files")


@pytest.mark.parametrize("name", ["layer_03-model_01-model_states.pt", "mp_rank_03_model_states.pt"])
def test_a_missing_file_of_deepspeed(tmp_path, name):
    folder = save_layers(tmp_path, GPT2, WEIGHTS, Layout(2, 2))
    (folder / name).unlink()
    refused(tmp_path, "copy all")


def test_a_missing_layer_of_deepspeed(tmp_path):
    folder = save_layers(tmp_path, GPT2, WEIGHTS, Layout(1, 2))
    (folder / "layer_04-model_00-model_states.pt").unlink()
    refused(tmp_path, "lacks decoder.layers.3")


def test_ranks_of_different_steps(tmp_path):
    save_megatron(tmp_path, GPT2, WEIGHTS, Layout(2))
    edit(rank_file(tmp_path, "01"), lambda saved: saved.update(iteration=90))
    refused(tmp_path, "must be of one iteration, but its ranks are of 100 in mp_rank_00.*, 90 in mp_rank_01")


@pytest.mark.parametrize("version", [0.5, 4.0])
def test_an_unknown_version(tmp_path, version):
    save_megatron(tmp_path, GPT2, WEIGHTS, Layout(version=version))
    refused(tmp_path, f"must be of checkpoint version 0.0, 1.0, 2.0, 3.0, but is of {version}")


def test_chunks_that_are_no_series(tmp_path):
    save_megatron(tmp_path, GPT2, WEIGHTS, Layout())
    edit(rank_file(tmp_path), lambda saved: saved.update(model0=saved["model"]))
    refused(
        tmp_path, "must hold `module`, `model`, or `model0`, `model1` and so on, but holds .*model, model0"
    )


@over_table("value", [torch.zeros(3), Path("a"), {"a": 1}, [torch.ones(2)]], ids=str)
@over_table("name", ["num_experts", "hidden_size", "position_embedding_type", "normalization"])
def test_arguments_that_are_no_plain_values(tmp_path, name, value):
    save_megatron(tmp_path, GPT2, WEIGHTS, Layout(arguments={name: value}))
    refused(tmp_path, f"`{name}[.`]")


@pytest.mark.parametrize("name", ["tensor_model_parallel_size", "pipeline_model_parallel_size"])
def test_sizes_that_are_no_numbers_count_as_unknown(tmp_path, name):
    save_megatron(tmp_path, GPT2, WEIGHTS, Layout(2, 2, arguments={name: "2"}))
    assert MegatronReader(tmp_path, TRUSTED).model == GPT2


def test_a_tensor_of_another_shape(tmp_path):
    save_megatron(tmp_path, GPT2, WEIGHTS, Layout(2, arguments={"ffn_hidden_size": 24}))
    refused(tmp_path, r"linear_fc1.bias as \[\[10\], \[10\]\] instead of \[12\] per rank")


def test_a_tensor_of_integers(tmp_path):
    save_megatron(tmp_path, GPT2, WEIGHTS, Layout())
    name = "decoder.final_layernorm.bias"
    edit(rank_file(tmp_path), lambda saved: saved["model"].update({name: torch.zeros(24, dtype=torch.int8)}))
    refused(tmp_path, "final_layernorm.bias as torch.int8 instead of floats")


def test_a_tensor_of_two_dtypes(tmp_path):
    save_megatron(tmp_path, GPT2, WEIGHTS, Layout(2))
    name = "decoder.final_layernorm.bias"
    edit(rank_file(tmp_path, "01"), lambda saved: saved["model"].update({name: saved["model"][name].half()}))
    refused(tmp_path, "final_layernorm.bias as torch.float16, torch.float32 instead of floats of one kind")


@pytest.mark.parametrize(
    "tensor", [torch.zeros(24, device="meta"), torch.zeros(24).to_sparse()], ids=["meta", "sparse"]
)
def test_a_tensor_without_values_in_memory(tmp_path, tensor):
    save_megatron(tmp_path, GPT2, WEIGHTS, Layout())
    edit(rank_file(tmp_path), lambda saved: saved["model"].update({"decoder.final_layernorm.bias": tensor}))
    refused(tmp_path, "must hold dense tensors, but decoder.final_layernorm.bias is torch.* on (meta|cpu)")


def test_copies_that_differ_over_the_ranks_are_averaged_only_on_demand(tmp_path):
    save_megatron(tmp_path, GPT2, WEIGHTS, Layout(2))
    name = "decoder.final_layernorm.bias"
    edit(rank_file(tmp_path, "01"), lambda saved: saved["model"][name].add_(0.5))
    refused(tmp_path, "final_layernorm.bias, whose copies .* differ by up to 0.5; --average-replicas")
    reader = MegatronReader(tmp_path, ImportOptions(True, VOCAB, average_replicas=True))
    mean, alike = torch.empty(24), torch.empty(24)
    names = {"final_norm.bias": mean, "layers.0.attention.out.bias": alike}
    reader.read([Part(Key(name), (24,), Box.whole((24,)), memory) for name, memory in names.items()])
    torch.testing.assert_close(mean, WEIGHTS["final_norm.bias"] + 0.25)
    assert torch.equal(alike, WEIGHTS["layers.0.attention.out.bias"])


@pytest.mark.parametrize("dialect", ["core", "old"])
def test_a_tied_head_that_is_no_copy(tmp_path, dialect):
    save_megatron(tmp_path, GPT2, WEIGHTS, Layout(1, 2, dialect=dialect))

    def change(saved):
        model = saved["model"]
        head = model.get("output_layer.weight", model.get("word_embeddings_for_head", {}).get("weight"))
        head[5, 5] += 1e-3

    edit(rank_file(tmp_path, "00_001"), change)
    refused(tmp_path, "which differs from the embedding that it is a copy of; .* untie_embeddings")


def test_the_vocabulary(tmp_path):
    save_megatron(tmp_path, GPT2, WEIGHTS, Layout())
    refused(
        tmp_path,
        f"the tokenizer of .* must be known, .* {PADDED} rows .* give --vocab-size",
        ImportOptions(True),
    )
    refused(
        tmp_path,
        f"must be from 1 to the {PADDED} rows .*, but is {PADDED + 1}",
        ImportOptions(True, PADDED + 1),
    )
    refused(tmp_path, "must be from 1 to .*, but is 0", ImportOptions(True, 0))
    for size in (1, PADDED):
        assert MegatronReader(tmp_path, ImportOptions(True, size)).model.vocab_size == size
    null = {"tokenizer_type": "NullTokenizer", "vocab_size": VOCAB - 1}
    edit(rank_file(tmp_path), lambda saved: vars(saved["args"]).update(null))
    assert MegatronReader(tmp_path, ImportOptions(True)).model.vocab_size == VOCAB


def test_arguments_can_be_given_and_corrected(tmp_path):
    save_megatron(tmp_path, GPT2, WEIGHTS, Layout(arguments={"num_layers": None, "layernorm_epsilon": 1.0}))
    given = vars(arguments_of(GPT2, Layout()))
    reader = MegatronReader(tmp_path, ImportOptions(True, VOCAB, arguments=given))
    assert reader.model == GPT2
    edit(rank_file(tmp_path), lambda saved: saved.pop("args"))
    refused(tmp_path, "must hold Megatron's `args`, but does not; .* --megatron-args")
    assert MegatronReader(tmp_path, ImportOptions(True, VOCAB, arguments=given)).model == GPT2


@over_table(
    ("name", "match"),
    [
        ("mp_rank_00_000_000/model_optim_rng.pt", "one file for each rank, but has two"),
        ("mp_rank_00_001_001/model_optim_rng.pt", "first expert-parallel rank of rank 0, stage 1"),
        (
            "layer_0_expert_0_mp_rank_00_model_states.pt",
            "as Megatron-LM does, but holds them as DeepSpeed does",
        ),
        ("zero_pp_rank_0_mp_rank_00_model_states.pt", "ZeRO stage 3"),
    ],
)
def test_other_forms(tmp_path, name, match):
    path = save_megatron(tmp_path, GPT2, WEIGHTS, Layout()) / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"")
    refused(tmp_path, match)


def test_folders_without_a_checkpoint(tmp_path):
    refused(tmp_path / "none", "must be a folder")
    refused(
        tmp_path,
        "must hold one of latest_checkpointed_iteration.txt, latest, latest_universal, or be a checkpoint",
    )
    (tmp_path / "latest").write_text("../../elsewhere")
    refused(tmp_path, "must name a checkpoint, but holds '../../elsewhere'")
    (tmp_path / "latest").write_text("global_step3")
    refused(tmp_path, "has no checkpoint global_step3")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("70")
    refused(tmp_path, "no checkpoint iter_0000070 or global_step70")
    (tmp_path / "iter_0000070" / "mp_rank_00").mkdir(parents=True)
    refused(tmp_path, "must hold files mp_rank_")


def test_deepspeed_without_the_files_of_its_layers(tmp_path):
    folder = save_layers(tmp_path, GPT2, WEIGHTS, Layout())
    for path in folder.glob("layer_*"):
        path.unlink()
    refused(tmp_path, "must hold `module`, `model`, .*, but holds nothing; copy all files")


def test_mappings_without_end(tmp_path):
    folder = save_deepspeed(tmp_path, GPT2, WEIGHTS, Layout(dialect="old"))

    def tie_a_knot(saved):
        saved["module"]["again"] = saved["module"]

    edit(folder / "mp_rank_00_model_states.pt", tie_a_knot)
    refused(tmp_path, "nests mappings")


def test_a_tensor_in_two_files(tmp_path):
    folder = save_layers(
        tmp_path,
        LLAMA,
        random_weights(LLAMA),
        Layout(arguments={"untie_embeddings_and_output_weights": True}),
    )
    shutil.copy(folder / "layer_01-model_00-model_states.pt", folder / "layer_02-model_00-model_states.pt")
    refused(tmp_path, "must hold each tensor once, but has embedding.word_embeddings.weight twice")


def test_more_layers_than_there_are_tensors(tmp_path):
    """They are refused before a table of their names is made."""
    save_megatron(tmp_path, GPT2, WEIGHTS, Layout(1))
    options = ImportOptions(trust_pickle=True, vocab_size=VOCAB, arguments={"num_layers": 10**12})
    refused(tmp_path, "`num_layers` must fit the [0-9]+ tensors in .* but .* say 1000000000000;", options)
