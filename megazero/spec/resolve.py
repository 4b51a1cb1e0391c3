"""`model_spec`: the settings of a model, read once and for all layers."""

from __future__ import annotations

import math
from dataclasses import replace

from megazero.config.tree.model import ModelConfig
from megazero.config.tree.routing import RoutingConfig
from megazero.spec.experts import CapacitySpec, RouterSpec
from megazero.spec.layers import LayerSpecs, norm_spec
from megazero.spec.model import EmbeddingSpec, HeadSpec, ModelSpec, RelativeSpec
from megazero.spec.parts import NormSpec, RotaryScaling, RotarySpec, StreamSpec


def model_spec(model: ModelConfig) -> ModelSpec:
    """Resolve the settings into a model, layer by layer."""
    stream, norm = _stream(model), norm_spec(model, model.hidden_size)
    router = router_spec(model) if model.num_experts else None
    layers = LayerSpecs(model, stream, norm, router)
    learned = model.position_embedding_type == "learned_absolute"
    segments = 2 if model.family == "bert" and model.has_token_types else 0
    relative = RelativeSpec(model.t5_relative_buckets, model.t5_relative_distance)
    return ModelSpec(
        model.family,
        stream,
        norm,
        EmbeddingSpec(
            stream,
            model.embedding_multiplier,
            model.positions if learned else 0,
            segments,
            norm if model.embed_layernorm else None,
        ),
        _head(model, stream, norm),
        tuple(map(layers.at, range(model.num_layers))),
        model.encoder_layers,
        model.seq_length,
        model.decoder_length,
        model.positions,
        tuple(map(layers.at, model.further_layers)),
        model.mtp_loss_scaling_factor,
        _rotary(model),
        relative if model.position_embedding_type == "relative" else None,
        router,
    )


def router_spec(model: RoutingConfig) -> RouterSpec:
    """How tokens get to experts, in layers that look nothing up."""
    return RouterSpec(
        topk=model.moe_router_topk,
        sigmoid=model.moe_router_score_function == "sigmoid",
        pre_softmax=model.moe_router_pre_softmax,
        bias=model.moe_router_bias,
        groups=model.moe_router_num_groups,
        group_topk=model.moe_router_group_topk,
        scaling=model.moe_router_topk_scaling_factor,
        expert_bias=model.moe_router_enable_expert_bias,
        bias_rate=model.moe_router_bias_update_rate,
        balance=tuple(model.balance_losses.items()),
        assigns=model.assigns,
        z_loss=model.moe_z_loss_coeff,
        jitter=model.moe_input_jitter_eps,
        sampling=model.moe_router_sampling,
        forced=model.moe_router_force_load_balancing,
        capacity=CapacitySpec(
            model.moe_expert_capacity_factor,
            model.moe_eval_capacity_factor,
            model.moe_min_capacity,
            model.moe_token_drop_policy,
            model.moe_capacity_scope == "micro_batch",
            model.moe_pad_expert_input_to_capacity,
        ),
    )


def _stream(model: ModelConfig) -> StreamSpec:
    return StreamSpec(
        model.hidden_size,
        model.init_method_std,
        model.init_method_std / math.sqrt(model.residual_writers),
        model.add_bias_linear,
        model.hidden_dropout,
        model.residual_multiplier,
        model.fp32_residual_connection,
    )


def _head(model: ModelConfig, stream: StreamSpec, norm: NormSpec) -> HeadSpec:
    tied, google = not model.untie_embeddings_and_output_weights, model.t5_style == "google"
    factor = model.logits_multiplier
    if model.family == "t5" and tied and google:
        factor = model.hidden_size**-0.5
    return HeadSpec(
        stream,
        norm,
        tied,
        factor,
        model.final_logit_softcapping,
        model.family == "bert" or (model.family == "t5" and tied and not google),
        model.bert_head_activation == "gelu_exact",
        model.bert_binary_head,
        model.num_classes,
    )


def _rotary(model: ModelConfig) -> tuple[RotarySpec, ...]:
    """The table of all layers, then that of layers with a window where these have a base of their own."""
    if not model.rotates:
        return ()
    table = RotarySpec(model.rotary_dim, model.rotary_base, _rotary_scaling(model), model.positions)
    if model.window_rotary_base is None:
        return (table,)
    return table, replace(table, base=model.window_rotary_base, scaling=None)


def _rotary_scaling(model: ModelConfig) -> RotaryScaling | None:
    if model.scales_by_yarn:
        return RotaryScaling(
            "yarn",
            model.rotary_scaling_factor,
            model.yarn_original_max_position_embeddings,
            model.yarn_beta_slow,
            model.yarn_beta_fast,
            model.yarn_correction_range_round_to_int,
            (model.mscale, model.mscale_all_dim),
        )
    if model.use_rope_scaling:
        return RotaryScaling(
            "llama3",
            model.rope_scaling_factor,
            model.rope_original_max_position_embeddings,
            model.rope_low_freq_factor,
            model.rope_high_freq_factor,
        )
    divisor = model.rotary_seq_len_interpolation_factor
    return None if divisor is None else RotaryScaling("linear", divisor)
