"""`model_spec`: reads the settings of a model once, for all layers."""

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
    """Resolve a model's settings, layer by layer."""
    stream, norm = _stream(model), norm_spec(model, model.hidden_size)
    router = router_spec(model) if model.num_experts else None
    layers = LayerSpecs(model, stream, norm, router)
    learned = model.position_embedding_type == "learned_absolute"
    segments = 2 if model.family == "bert" and model.has_token_types else 0
    relative = RelativeSpec(model.t5_relative_buckets, model.t5_relative_distance)
    return ModelSpec(
        family=model.family,
        stream=stream,
        norm=norm,
        embedding=EmbeddingSpec(
            stream=stream,
            factor=model.embedding_multiplier,
            positions=model.positions if learned else 0,
            token_types=segments,
            norm=norm if model.embed_layernorm else None,
        ),
        head=_head(model, stream, norm),
        layers=tuple(map(layers.at, range(model.num_layers))),
        encoder_layers=model.encoder_layers,
        length=model.seq_length,
        decoder_length=model.decoder_length,
        positions=model.positions,
        further=tuple(map(layers.at, model.further_layers)),
        further_weight=model.mtp_loss_scaling_factor,
        rotary=_rotary(model),
        relative=relative if model.position_embedding_type == "relative" else None,
        router=router,
    )


def router_spec(model: RoutingConfig) -> RouterSpec:
    """Make the router of a layer whose experts are not chosen by a hash table."""
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
            factor=model.moe_expert_capacity_factor,
            eval_factor=model.moe_eval_capacity_factor,
            least=model.moe_min_capacity,
            policy=model.moe_token_drop_policy,
            together=model.moe_capacity_scope == "micro_batch",
            padded=model.moe_pad_expert_input_to_capacity,
        ),
    )


def _stream(model: ModelConfig) -> StreamSpec:
    return StreamSpec(
        width=model.hidden_size,
        std=model.init_method_std,
        out_std=model.init_method_std / math.sqrt(model.residual_writers),
        bias=model.add_bias_linear,
        dropout=model.hidden_dropout,
        scale=model.residual_multiplier,
        fp32=model.fp32_residual_connection,
    )


def _head(model: ModelConfig, stream: StreamSpec, norm: NormSpec) -> HeadSpec:
    tied, google = not model.untie_embeddings_and_output_weights, model.t5_style == "google"
    factor = model.logits_multiplier
    if model.family == "t5" and tied and google:
        factor = model.hidden_size**-0.5
    return HeadSpec(
        stream=stream,
        norm=norm,
        tied=tied,
        factor=factor,
        softcap=model.final_logit_softcapping,
        bias=model.family == "bert" or (model.family == "t5" and tied and not google),
        classifier_bias=model.classifier_bias,
        exact_gelu=model.bert_head_activation == "gelu_exact",
        binary=model.bert_binary_head,
        classes=model.num_classes,
        losses=tuple((name, weight) for name, weight in model.word_losses.items() if weight),
    )


def _rotary(model: ModelConfig) -> tuple[RotarySpec, ...]:
    """Make the rotary table of all layers, and one for layers with a window if these have their own base."""
    if not model.rotates:
        return ()
    table = RotarySpec(model.rotary_dim, model.rotary_base, _rotary_scaling(model), model.positions)
    if model.window_rotary_base is None:
        return (table,)
    return table, replace(table, base=model.window_rotary_base, scaling=None)


def _rotary_scaling(model: ModelConfig) -> RotaryScaling | None:
    if model.scales_by_yarn:
        return RotaryScaling(
            kind="yarn",
            factor=model.rotary_scaling_factor,
            original=model.yarn_original_max_position_embeddings,
            slow=model.yarn_beta_slow,
            fast=model.yarn_beta_fast,
            rounded=model.yarn_correction_range_round_to_int,
            sharper=(model.mscale, model.mscale_all_dim),
        )
    if model.use_rope_scaling:
        return RotaryScaling(
            kind="llama3",
            factor=model.rope_scaling_factor,
            original=model.rope_original_max_position_embeddings,
            slow=model.rope_low_freq_factor,
            fast=model.rope_high_freq_factor,
        )
    divisor = model.rotary_seq_len_interpolation_factor
    return None if divisor is None else RotaryScaling("linear", divisor)
