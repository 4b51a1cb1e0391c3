"""Make the model of a configuration small: few, narrow layers of every kind that it has."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

from megazero.config.derive import PipelineShape
from megazero.config.heterogeneous.shapes import LayerShape, text_of
from megazero.config.tree.config import Config
from megazero.config.tree.model import ModelConfig
from megazero.mpu.grid import ProcessGrid
from megazero.spec.resolve import model_spec

_HEAD_WIDTH = 4
_MOST_SHAPES = 4  # of layers in a heterogeneous model


def shrunk_model(config: Config, grid: ProcessGrid) -> dict[str, object]:
    """The changed settings of the section `model`, for the ranks of `grid`."""
    model, tp, cp = config.model, grid.tp, grid.cp
    grouped = any(attention.groups != attention.heads for attention in model_spec(model).attentions())
    heads = 2 * tp if grouped else tp * (1 if tp > 1 else 2)
    if cp > 1:  # enough for ranks to exchange
        heads = max(heads, 2 * tp * cp)
    kinds = "".join(dict.fromkeys(model.layer_kinds or ""))
    shapes = tuple(dict.fromkeys(model.layer_shapes or ()))[:_MOST_SHAPES]
    layers = max(2, grid.pp * PipelineShape.of(config).chunks_per_stage, len(kinds), len(shapes))
    return {
        **_layers(model, layers),
        **_hybrid(kinds, layers, tp),
        **_heterogeneous(model, shapes, layers, heads, tp),
        "num_attention_heads": heads,
        "num_query_groups": tp if grouped else None,
        "kv_channels": None,
        "hidden_size": heads * _HEAD_WIDTH,
        "ffn_hidden_size": 24 * tp,
        "seq_length": 8 * tp * cp,
        "t5_decoder_seq_length": None if model.t5_decoder_seq_length is None else 4 * tp,
        "max_position_embeddings": None,
        **_windows(model),
        **_latent(model),
        "vocab_size": 61,
        "extra_vocab_size": 0,
        "make_vocab_size_divisible_by": 4,
        "pad_vocab_size_to": None,
        "init_method_std": 0.1,
        **_sparse(model),
        **_experts(model, grid),
    }


def _layers(model: ModelConfig, count: int) -> dict[str, object]:
    """Reduce to `count` layers; an encoder-decoder gets half in each stack, and at least 2."""
    if model.t5_decoder_layers is None:
        return {"num_layers": count}
    count = max(4, count)
    return {"num_layers": count, "t5_encoder_layers": count // 2, "t5_decoder_layers": count - count // 2}


def _hybrid(kinds: str, layers: int, tp: int) -> dict[str, object]:
    """Repeat the kinds of layers that a hybrid model has, with few heads and small states."""
    if not kinds:
        return {}
    return {
        "hybrid_layer_pattern": (kinds * layers)[:layers],
        "hybrid_attention_ratio": 0.0,
        "hybrid_mlp_ratio": 0.0,
        "mamba_state_dim": 4,
        "mamba_head_dim": 4,
        "mamba_num_groups": tp,
        "mamba_num_heads": 2 * tp,
    }


def _heterogeneous(
    model: ModelConfig, shapes: tuple[LayerShape, ...], layers: int, heads: int, tp: int
) -> dict[str, object]:
    """Repeat some of the shapes that a heterogeneous model's layers have, with few heads and small widths."""
    if not shapes:
        return {}
    widths = sorted({shape.width for shape in shapes} - {0})
    small = [
        LayerShape(
            shape.groups and (tp if shape.groups < model.num_attention_heads else heads),
            shape.width and 8 * tp * (1 + widths.index(shape.width)),
        )
        for shape in shapes
    ]
    repeated = tuple(itertools.islice(itertools.cycle(small), layers))
    return {"heterogeneous_layers_config_encoded_json": text_of(repeated)}


def _windows(model: ModelConfig) -> Mapping[str, object]:
    """Shrink the attention window so that it hides some of the short sequence.

    If only some layers have a window, the first does. If only some have rotary positions, the second has
    none.
    """
    rotary = {} if model.no_rope_freq is None else {"no_rope_freq": (2,)}
    if model.window_size is None:
        return rotary
    return rotary | {
        "window_size": tuple(min(side, 3) for side in model.window_size),
        "window_attn_skip_freq": None if model.window_attn_skip_freq is None else (2,),
        "window_sink_tokens": min(1, model.window_sink_tokens),
    }


def _latent(model: ModelConfig) -> Mapping[str, object]:
    """Give latent attention few channels, each width another, and predict at most two further tokens."""
    heads = {} if model.mtp_num_layers is None else {"mtp_num_layers": min(2, model.mtp_num_layers)}
    if not model.multi_latent_attention:
        return heads
    return heads | {
        "q_lora_rank": None if model.q_lora_rank is None else 7,
        "kv_lora_rank": 6,
        "qk_head_dim": 3,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 5,
    }


def _sparse(model: ModelConfig) -> dict[str, object]:
    """Blocks of one token, and of each sort of block only as many as keep the kind of layout."""
    if not model.is_sparse:
        return {}
    return {
        "sparse_block": 1,
        "sparse_num_local_blocks": 4,
        "sparse_num_global_blocks": 1,
        "sparse_num_different_global_patterns": min(4, model.sparse_num_different_global_patterns),
        "sparse_num_random_blocks": min(2, model.sparse_num_random_blocks),
        "sparse_local_window_blocks": tuple(min(4, w) for w in model.sparse_local_window_blocks),
        "sparse_global_block_indices": (0,),
        "sparse_global_block_end_indices": (2,) if model.sparse_global_block_end_indices else (),
        "sparse_num_sliding_window_blocks": min(3, model.sparse_num_sliding_window_blocks),
    }


def _experts(model: ModelConfig, grid: ProcessGrid) -> dict[str, object]:
    """Few and narrow experts of the same kind, in every layer or every N-th, as the model has them."""
    if not model.num_experts:
        return {}
    k, groups = model.moe_router_topk, model.moe_router_num_groups
    count = grid.ep * -(-max(k, 2 * groups if groups else k, 4) // grid.ep)
    if groups:
        count = math.lcm(count, groups)
    pattern, shared = model.moe_layer_freq, model.moe_shared_expert_intermediate_size
    return {
        "num_experts": (count,),
        "moe_layer_freq": (1,) if pattern is not None and len(pattern) > 1 else pattern,
        "expert_interval": None if model.expert_interval is None else min(2, model.expert_interval),
        "moe_ffn_hidden_size": None if model.moe_ffn_hidden_size is None else 8 * grid.etp,
        "moe_n_hash_layers": min(model.moe_n_hash_layers, 2 if model.expert_interval else 1),
        "moe_min_capacity": min(1, model.moe_min_capacity),
        "moe_shared_expert_intermediate_size": None if shared is None else 16 * grid.tp,
    }
