"""Hybrids in folders of ranks and in distributed checkpoints, by the names that Core has for them."""

from __future__ import annotations

from argparse import Namespace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megazero.checkpoint.part import Key
from megazero.checkpoint.reader import CheckpointReader
from megazero.checkpoint.writer import later_weights, write_checkpoint
from megazero.config.tree.model import ModelConfig
from megazero.errors import CheckpointError
from megazero.formats.hf.convert import KIND
from megazero.formats.megatron.dist_file import read_metadata
from megazero.formats.megatron.export import ExportOptions, export_megatron
from megazero.formats.megatron.reader import ImportOptions, MegatronReader
from tests.formats.megatron.samples import PADDED, VOCAB, Weights, edit, random_weights
from tests.formats.megatron.test_reader import TRUSTED, assert_same, read_all
from tests.tables import over_table

SAID = {
    "hidden_size": 24,
    "num_attention_heads": 4,
    "kv_channels": 8,
    "ffn_hidden_size": 20,
    "seq_length": 16,
    "max_position_embeddings": 16,
    "make_vocab_size_divisible_by": 16,
    "normalization": "RMSNorm",
    "position_embedding_type": "none",
    "squared_relu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "is_hybrid_model": True,
    "mamba_state_dim": 5,
    "mamba_head_dim": 3,
    "mamba_num_groups": 2,
    "mamba_num_heads": 8,
    "num_query_groups": 2,
}
PATTERN = "M*-MM-E*"
EXPERTS = {"num_experts": 2, "moe_ffn_hidden_size": 10, "moe_router_topk": 1}
HYBRID = ModelConfig(
    **{name: value for name, value in SAID.items() if name != "squared_relu"},
    **EXPERTS,
    activation="squared_relu",
    hybrid_layer_pattern=PATTERN,
    norm_epsilon=1e-5,
    vocab_size=VOCAB,
)


def arguments(tp: int = 1, pp: int = 1, **further: Any) -> Namespace:
    said = {**SAID, **EXPERTS, "num_layers": len(PATTERN), "hybrid_override_pattern": PATTERN}
    ranks = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    said |= {"group_query_attention": True, "layernorm_epsilon": 1e-5, "padded_vocab_size": PADDED}
    return Namespace(**{**said, **ranks, "params_dtype": torch.float32, **further})


def mixer(ours, rank: int, tp: int) -> Weights:
    """A mixer's tensors on a rank: each kind is sliced on its own, then all are concatenated."""
    heads, width, groups, n = 8, 3, 2, 5
    per = heads // groups
    made, taps, bias = ours("mamba.input.weight"), ours("mamba.conv.weight"), ours("mamba.conv.bias")
    ends = [0, per * width, 2 * per * width, 2 * per * width + n, 2 * per * width + 2 * n, made.shape[1]]
    kinds = [made[:, a:b].flatten(0, 1) for a, b in pairwise(ends)]
    mixed = [0, per * width, per * width + n, per * width + 2 * n]
    places = list(pairwise(mixed))
    own = lambda tensor: tensor.chunk(tp)[rank]  # noqa: E731
    return {
        "mixer.in_proj.weight": torch.cat([own(kind) for kind in kinds]),
        "mixer.conv1d.weight": torch.cat([own(taps[:, a:b].flatten(0, 1)) for a, b in places])[:, None],
        "mixer.conv1d.bias": torch.cat([own(bias[:, a:b].flatten()) for a, b in places]),
        "mixer.A_log": own(ours("mamba.a_log").flatten()).clone(),
        "mixer.dt_bias": own(ours("mamba.dt_bias").flatten()).clone(),
        "mixer.D": own(ours("mamba.skip").flatten()).clone(),
        "mixer.norm.weight": own(ours("mamba.norm.weight").flatten()).clone(),
        "mixer.out_proj.weight": ours("mamba.output.weight").chunk(tp, 1)[rank].clone(),
    }


def layer(weights: Weights, number: int, rank: int, tp: int, fused: bool) -> Weights:
    ours = lambda name: weights[f"layers.{number}.{name}"]  # noqa: E731
    own = lambda tensor, dim=0: tensor.chunk(tp, dim)[rank].clone()  # noqa: E731
    kind = PATTERN[number]
    norms = {
        "M": "mixer.in_proj.layer_norm_" if fused else "norm.",
        "*": "self_attention.linear_qkv.layer_norm_" if fused else "input_layernorm.",
        "-": "mlp.linear_fc1.layer_norm_" if fused else "pre_mlp_layernorm.",
        "E": "pre_mlp_layernorm.",
    }
    out = {f"{norms[kind]}weight": ours("input_norm.weight")}
    if kind == "M":
        return out | mixer(ours, rank, tp)
    if kind == "*":
        out["self_attention.linear_qkv.weight"] = own(ours("attention.qkv.weight")).flatten(0, 2)
        return out | {"self_attention.linear_proj.weight": own(ours("attention.out.weight"), 1)}
    if kind == "-":
        return out | {
            "mlp.linear_fc1.weight": own(ours("mlp.up.weight")),
            "mlp.linear_fc2.weight": own(ours("mlp.down.weight"), 1),
        }
    out["mlp.router.weight"] = ours("mlp.router.weight")
    for x in range(2):
        out[f"mlp.experts.linear_fc1.weight{x}"] = own(ours("mlp.experts.up.weight")[x])
        out[f"mlp.experts.linear_fc2.weight{x}"] = own(ours("mlp.experts.down.weight")[x], 1)
    return out


def save(run: Path, weights: Weights, tp: int = 1, pp: int = 1, *, fused: bool = True, **said: Any) -> Path:
    folder = run / "iter_0000100"
    pad = lambda table: F.pad(table, (0, 0, 0, PADDED - VOCAB))  # noqa: E731
    count = len(PATTERN) // pp
    for rank in range(tp):
        for stage in range(pp):
            model = {}
            if stage == 0:
                word = pad(weights["embedding.word.weight"])
                model["embedding.word_embeddings.weight"] = word.chunk(tp)[rank].clone()
            for i in range(count):
                for name, tensor in layer(weights, stage * count + i, rank, tp, fused).items():
                    model[f"decoder.layers.{i}.{name}"] = tensor
            if stage == pp - 1:
                model["decoder.final_norm.weight"] = weights["final_norm.weight"]
                model["output_layer.weight"] = pad(weights["head.weight"]).chunk(tp)[rank].clone()
            place = folder / (f"mp_rank_{rank:02d}" if pp == 1 else f"mp_rank_{rank:02d}_{stage:03d}")
            place.mkdir(parents=True)
            args = arguments(tp, pp, **said)
            saved = {"args": args, "iteration": 100, "checkpoint_version": 3.0, "model": model}
            torch.save(saved, place / "model_optim_rng.pt")
    return folder


@over_table("fused", [False, True])
@over_table(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 4)])
def test_folders_of_ranks(tmp_path, tp, pp, fused):
    weights = random_weights(HYBRID)
    reader = MegatronReader(save(tmp_path, weights, tp, pp, fused=fused), TRUSTED)
    assert_same(read_all(reader), weights)
    assert reader.model == HYBRID


def test_without_words_of_the_arguments(tmp_path):
    """A model of mixers alone is recognized by its tensors: older releases had no arguments for it."""
    model = HYBRID.model_copy(
        update={"hybrid_layer_pattern": None, "num_layers": 3, "num_experts": (), "is_hybrid_model": True}
    )
    weights = random_weights(model)
    run = tmp_path / "iter_0000100" / "mp_rank_00"
    run.mkdir(parents=True)
    pad = lambda table: F.pad(table, (0, 0, 0, PADDED - VOCAB))  # noqa: E731
    held = {
        "embedding.word_embeddings.weight": pad(weights["embedding.word.weight"]),
        "decoder.final_norm.weight": weights["final_norm.weight"],
        "output_layer.weight": pad(weights["head.weight"]),
    }
    for number in range(3):
        ours = lambda name, number=number: weights[f"layers.{number}.{name}"]  # noqa: E731
        held |= {f"decoder.layers.{number}.{n}": t for n, t in mixer(ours, 0, 1).items()}
        held[f"decoder.layers.{number}.norm.weight"] = ours("input_norm.weight")
    args = arguments(num_layers=3, num_experts=None, is_hybrid_model=None, hybrid_override_pattern=None)
    saved = {"args": args, "iteration": 100, "checkpoint_version": 3.0, "model": held}
    torch.save(saved, run / "model_optim_rng.pt")
    reader = MegatronReader(tmp_path / "iter_0000100", TRUSTED)
    assert reader.model.layer_kinds == "MMM"
    assert_same(read_all(reader), weights)


def test_distributed_there_and_back(tmp_path):
    """Each kind of a mixer is a tensor of its own there, and layers are not stacked."""
    weights = random_weights(HYBRID)
    with MegatronReader(save(tmp_path / "theirs", weights), TRUSTED) as reader:
        facts = {
            "kind": KIND,
            "model": reader.model_settings(),
            "vocab_size": VOCAB,
            "tokenizer": {},
        }
        ours = write_checkpoint(tmp_path / "ours", 0, later_weights(reader), facts)
    written = export_megatron(CheckpointReader(ours), tmp_path / "back", ExportOptions())
    again = MegatronReader(written.folder, ImportOptions(trust_pickle=True, vocab_size=VOCAB))
    assert_same(read_all(again), weights)
    assert again.model == HYBRID
    names = read_metadata(written.folder).keys()
    assert {
        *(f"decoder.layers.0.mixer.in_proj.weight.{kind}" for kind in ("z", "x", "B", "C", "dt")),
        *(f"decoder.layers.4.mixer.conv1d.bias.{kind}" for kind in ("x", "B", "C")),
        "decoder.layers.0.mixer.in_proj.layer_norm_weight",
        "decoder.layers.2.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.6.pre_mlp_layernorm.weight",
        "decoder.final_norm.weight",
    } <= names
    assert Key("layers.0.mamba.a_log") in again.shapes


@over_table(
    ("said", "match"),
    [
        ({"hybrid_override_pattern": "M*-MM-E"}, "`num_layers` is 8 beside a pattern of 7 letters"),
        ({"hybrid_override_pattern": "M*-MM-E*/M"}, "layers after `/` predict several tokens"),
        ({"hybrid_override_pattern": "M*-MM-EM"}, "must hold a model that megazero supports, but holds"),
        ({"hybrid_override_pattern": 7}, "`hybrid_layer_pattern` is 7, which is no text"),
        ({"layernorm_epsilon": 1e-6}, "`layernorm_epsilon` is 1e-06 beside mixers, whose norms have 1e-05"),
        ({"qk_layernorm": True}, "`qk_layernorm` is True, which hybrids ignore in part"),
        ({"position_embedding_type": "yarn"}, "`position_embedding_type` is 'yarn', which hybrids ignore"),
        ({"use_rope_scaling": True}, "`use_rope_scaling` is True, which hybrids ignore"),
        ({"rotary_interleaved": True}, "`rotary_interleaved` is True, which hybrids ignore in part"),
        ({"moe_layer_freq": 2}, "`moe_layer_freq` is 2, which hybrids ignore"),
        ({"mamba_num_groups": 1}, "as .* instead of"),
    ],
    ids=str,
)
def test_refusals(tmp_path, said, match):
    folder = save(tmp_path, random_weights(HYBRID), **said)
    with pytest.raises(CheckpointError, match=match):
        MegatronReader(folder, TRUSTED)


def test_a_mixer_that_is_cut_otherwise(tmp_path):
    """A projection whose rows do not fit is not split, so it has a name that the model lacks."""
    folder = save(tmp_path, random_weights(HYBRID))
    name = "decoder.layers.0.mixer.conv1d.bias"
    edit(
        folder / "mp_rank_00" / "model_optim_rng.pt",
        lambda saved: saved["model"].update({name: saved["model"][name][:-1]}),
    )
    with pytest.raises(CheckpointError, match="holds decoder.layers.0.mixer.conv1d.* state-space"):
        MegatronReader(folder, TRUSTED)
