"""Latent attention and further tokens in folders of ranks, by the names that Core has for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megazero.config.tree.model import ModelConfig
from megazero.errors import CheckpointError
from megazero.formats.megatron.reader import MegatronReader
from tests.formats.megatron.samples import (
    LLAMA,
    PADDED,
    VOCAB,
    Layout,
    Weights,
    arguments_of,
    edit,
    random_weights,
)
from tests.formats.megatron.test_reader import TRUSTED, UNTIED, assert_same, read_all
from tests.tables import over_table

INNER = "transformer_layer"
SAID = {
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "q_lora_rank": 10,
    "kv_lora_rank": 6,
    "qk_head_dim": 5,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 3,
    "rotary_scaling_factor": 4.0,
    "mscale": 0.9,
    "mscale_all_dim": 0.7,
    "mtp_num_layers": 2,
    "mtp_loss_scaling_factor": 0.3,
}
LATENT = LLAMA.model_copy(update={**SAID, "num_query_groups": None, "kv_channels": None, "rope_type": None})


def arguments(**further: Any) -> dict[str, Any]:
    return {**UNTIED, **SAID, "group_query_attention": False, "num_query_groups": 1, **further}


def layer(weights: Weights, number: int, tp: int, ranks: int, whole_down: bool, fused: bool) -> Weights:
    """A layer's tensors on a rank.

    With `whole_down`, projections down are not split; with `fused`, norms have Transformer Engine's names.
    """
    own = lambda tensor, dim=0: tensor.chunk(ranks, dim)[tp].clone()  # noqa: E731
    ours = lambda name: weights[f"layers.{number}.{name}.weight"]  # noqa: E731
    down = (lambda tensor: tensor) if whole_down else own
    small = "linear_{}_up_proj.layer_norm_weight" if fused else "{}_layernorm.weight"
    out: dict[str, Tensor] = {
        "input_layernorm.weight": ours("input_norm"),
        "self_attention.linear_proj.weight": own(ours("attention.out"), 1),
        "self_attention.linear_q_down_proj.weight": down(ours("attention.query_down")),
        "self_attention.linear_q_up_proj.weight": own(ours("attention.query").flatten(0, 1)),
        "self_attention.linear_kv_down_proj.weight": down(ours("attention.latent_down")),
        "self_attention.linear_kv_up_proj.weight": own(ours("attention.latent_up").flatten(0, 1)),
        f"self_attention.{small.format('q')}": ours("attention.query_norm"),
        f"self_attention.{small.format('kv')}": ours("attention.latent_norm"),
        "mlp.linear_fc1.layer_norm_weight" if fused else "pre_mlp_layernorm.weight": ours("mlp_norm"),
        "mlp.linear_fc1.weight": own(ours("mlp.up"), 1).flatten(0, 1),
        "mlp.linear_fc2.weight": own(ours("mlp.down"), 1),
    }
    return out


def save(
    run: Path, weights: Weights, tp: int, pp: int, *, whole_down: bool, fused: bool, inner: str, **said: Any
) -> Path:
    folder = run / "iter_0000100"
    pad = lambda table: torch.nn.functional.pad(table, (0, 0, 0, PADDED - VOCAB))  # noqa: E731
    for rank in range(tp):
        word = pad(weights["embedding.word.weight"]).chunk(tp)[rank].clone()
        for stage in range(pp):
            last, model = stage == pp - 1, {}
            if stage == 0 or last:
                model["embedding.word_embeddings.weight"] = word.clone()
            for i in range(4 // pp):
                for name, tensor in layer(weights, stage * 4 // pp + i, rank, tp, whole_down, fused).items():
                    model[f"decoder.layers.{i}.{name}"] = tensor
            if last:
                model["decoder.final_layernorm.weight"] = weights["final_norm.weight"]
                model["output_layer.weight"] = pad(weights["head.weight"]).chunk(tp)[rank].clone()
            for depth in range(2) if last else ():
                block, ours = f"mtp.layers.{depth}", f"layers.{4 + depth}"
                model[f"{block}.enorm.weight"] = weights[f"{ours}.word_norm.weight"]
                model[f"{block}.hnorm.weight"] = weights[f"{ours}.hidden_norm.weight"]
                model[f"{block}.eh_proj.weight"] = weights[f"{ours}.join.weight"].chunk(tp)[rank].clone()
                model[f"{block}.final_layernorm.weight"] = weights[f"{ours}.final_norm.weight"]
                for name, tensor in layer(weights, 4 + depth, rank, tp, whole_down, fused).items():
                    model[f"{block}.{inner}.{name}"] = tensor
            place = folder / (f"mp_rank_{rank:02d}" if pp == 1 else f"mp_rank_{rank:02d}_{stage:03d}")
            place.mkdir(parents=True)
            args = arguments_of(LATENT, Layout(tp, pp, arguments=arguments(**said)))
            saved = {"args": args, "iteration": 100, "checkpoint_version": 3.0, "model": model}
            torch.save(saved, place / "model_optim_rng.pt")
    return folder


@over_table(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@over_table(
    ("whole_down", "fused", "inner"),
    [
        (False, False, "transformer_layer"),
        (True, True, "transformer_layer"),
        (True, False, "mtp_model_layer"),
    ],
    ids=["split", "fused", "renamed"],
)
def test_folders_of_ranks(tmp_path, tp, pp, whole_down, fused, inner):
    """Core's own layers split projections down; Transformer Engine's keep them whole, and fuse norms."""
    weights = random_weights(LATENT)
    folder = save(tmp_path, weights, tp, pp, whole_down=whole_down, fused=fused, inner=inner)
    reader = MegatronReader(folder, TRUSTED)
    assert_same(read_all(reader), weights)
    own = ModelConfig.model_fields.keys() - {"kv_channels", "num_query_groups"}
    assert {n: getattr(reader.model, n) for n in own} == {n: getattr(LATENT, n) for n in own}
    assert {"layers.5.join.weight", "layers.5.attention.latent_up.weight"} <= weights.keys()


@over_table(
    ("tp", "rank", "name", "match"),
    [
        (1, "00_001", "embedding.word_embeddings", "for_further_tokens.weight, which differs from"),
        (
            2,
            "01",
            "decoder.layers.1.self_attention.linear_kv_down_proj",
            "kv_down_proj.weight, whose copies .* differ by up to 1",
        ),
        (2, "01", "mtp.layers.0.enorm", "mtp.layers.0.enorm.weight, whose copies .* differ by up to 1"),
    ],
)
def test_copies_must_be_alike(tmp_path, tp, rank, name, match):
    folder = save(tmp_path, random_weights(LATENT), tp, 3 - tp, whole_down=True, fused=True, inner=INNER)
    path = folder / f"mp_rank_{rank}" / "model_optim_rng.pt"
    edit(path, lambda saved: saved["model"][f"{name}.weight"].view(-1)[3].add_(1))
    with pytest.raises(CheckpointError, match=match):
        MegatronReader(folder, TRUSTED)


@over_table(
    ("said", "match"),
    [
        ({"softmax_scale": 0.2}, "`softmax_scale` is 0.2, which latent attention ignores"),
        ({"rotary_seq_len_interpolation_factor": 2}, "which latent attention ignores"),
        ({"rope_type": "rope"}, "`rotary_scaling_factor` is 4.0 with `rope_type` rope, by which Core"),
        ({"rope_type": "rope", "mscale_all_dim": 0, "rotary_percent": 0.5}, "`rotary_percent` is 0.5 with"),
        ({"rope_type": "spiral"}, "`rope_type`: Input should be 'rope' or 'yarn'"),
        ({"rotary_interleaved": True}, "`rotary_interleaved` is True with latent attention"),
        ({"no_rope_freq": 2}, "`no_rope_freq` is 2 with latent attention"),
        ({"mtp_use_repeated_layer": True}, "one layer that predicts all further tokens"),
        ({"mtp_num_layers": 1}, "holds mtp.layers.1"),
        ({"mtp_num_layers": None}, "of a model with multi-token prediction"),
        ({"multi_latent_attention": False}, "but holds decoder.layers.0.self_attention.kv_layernorm"),
        (
            {"position_embedding_type": "learned_absolute"},
            "`mtp_num_layers` is 2 .with learned positions",
        ),
    ],
    ids=str,
)
def test_refusals(tmp_path, said, match):
    folder = save(
        tmp_path,
        random_weights(LATENT),
        1,
        1,
        whole_down=True,
        fused=True,
        inner=INNER,
        **said,
    )
    with pytest.raises(CheckpointError, match=match):
        MegatronReader(folder, TRUSTED)
