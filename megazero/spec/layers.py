"""`LayerSpecs`: makes the layers of a model from its settings, by number."""

from __future__ import annotations

import math
from dataclasses import replace

from megazero.config.hybrid.settings import ATTENTION, MAMBA
from megazero.config.tree.model import ModelConfig
from megazero.spec.experts import MoeSpec, RouterSpec
from megazero.spec.model import LayerSpec
from megazero.spec.parts import (
    ActivationSpec,
    AttentionSpec,
    LatentAttentionSpec,
    MixerSpec,
    MlpSpec,
    NormSpec,
    SightSpec,
    SparseSpec,
    StreamSpec,
)


def norm_spec(model: ModelConfig, features: int) -> NormSpec:
    """Make a norm of `features` channels."""
    by_mean = model.normalization == "LayerNorm"
    return NormSpec(
        features=features,
        by_mean=by_mean,
        bias=by_mean and model.norm_bias,
        eps=model.norm_epsilon,
        centred=model.apply_layernorm_1p,
    )


def _sparse(model: ModelConfig) -> SparseSpec | None:
    if not model.is_sparse:
        return None
    return SparseSpec(
        kind=model.sparse_attention,
        block=model.sparse_block,
        blocks=model.sparse_blocks,
        heads=model.num_attention_heads if model.sparse_different_layout_per_head else 1,
        seed=model.sparse_seed,
        local=model.sparse_num_local_blocks,
        globals_=model.sparse_num_global_blocks,
        patterns=model.sparse_num_different_global_patterns,
        horizontal=model.sparse_horizontal_global_attention,
        random=model.sparse_num_random_blocks,
        windows=model.sparse_local_window_blocks,
        starts=model.sparse_global_block_indices,
        ends=model.sparse_global_block_end_indices or None,
        sliding=model.sparse_num_sliding_window_blocks,
    )


class LayerSpecs:
    """Makes the layers of a model, by number; layers beyond the last predict further tokens."""

    def __init__(self, model: ModelConfig, stream: StreamSpec, norm: NormSpec, router: RouterSpec | None):
        self.model, self.stream, self.norm, self.router = model, stream, norm, router
        self.sparse = _sparse(model)
        self.shapes, self.kinds = model.layer_shapes, model.layer_kinds
        self.activation = ActivationSpec(
            model.activation, model.glu_linear_offset, model.activation_func_clamp_value
        )
        places = (*range(model.num_layers), *model.further_layers) if model.num_experts else ()
        self.experts = {place: count for place in places if (count := model.experts_at(place))}

    def at(self, number: int) -> LayerSpec:
        """Make the layer `number`."""
        model = self.model
        layer = LayerSpec(
            self.stream,
            self.norm,
            norms=model.norm_position,
            parallel=model.use_parallel_residual,
            one_norm=model.share_parallel_norm,
            residual_after_norm=model.apply_residual_connection_post_layernorm,
        )
        if self.kinds is not None:
            return self._single(layer, number, self.kinds[number])
        groups, width = model.kv_heads, model.ffn_size
        if self.shapes is not None:
            groups, width = self.shapes[number].groups, self.shapes[number].width
        return replace(
            layer,
            attention=self._attention(number, groups) if groups else None,
            cross=self._cross() if number >= model.encoder_layers and model.family == "t5" else None,
            mlp=self._mlp(number, width) if width else None,
        )

    def _single(self, layer: LayerSpec, number: int, letter: str) -> LayerSpec:
        """Make a layer of a hybrid model, which has a single part."""
        if letter == ATTENTION:
            return replace(layer, attention=self._attention(number, self.model.kv_heads))
        if letter == MAMBA:
            return replace(layer, mixer=self._mixer())
        return replace(layer, mlp=self._mlp(number, self.model.ffn_size))

    def _sight(self, number: int) -> SightSpec:
        model = self.model
        causal = model.family == "gpt" or (model.family == "t5" and number >= model.encoder_layers)
        window = model.window_at(number)
        return SightSpec(causal, window, 0 if window is None else model.window_sink_tokens, self.sparse)

    def _attention(self, number: int, groups: int) -> AttentionSpec | LatentAttentionSpec:
        model, sight = self.model, self._sight(number)
        if model.multi_latent_attention:
            return self._latent(sight)
        table = None
        if model.rotates_at(number):
            table = int(model.window_rotary_base is not None and sight.window is not None)
        return AttentionSpec(
            stream=self.stream,
            heads=model.num_attention_heads,
            groups=groups,
            head_dim=model.head_dim,
            sight=sight,
            qkv_bias=model.qkv_bias,
            dropout=model.attention_dropout,
            scale=self._t5_scale if model.family == "t5" else model.softmax_scale,
            softcap=model.attn_logit_softcapping,
            softmax=model.softmax_type,
            q_norm=self._head_norm(model.num_attention_heads),
            k_norm=self._head_norm(groups),
            gated=model.attention_output_gate,
            rotary=table,
            interleaved=model.rotary_dim if model.rotary_interleaved else None,
            alibi=model.position_embedding_type == "alibi",
        )

    @property
    def _t5_scale(self) -> float:
        return 1.0 if self.model.t5_style == "google" else 1 / math.sqrt(self.model.head_dim)

    def _cross(self) -> AttentionSpec:
        """Make a decoder's attention to the encoder's output."""
        model = self.model
        return AttentionSpec(
            stream=self.stream,
            heads=model.num_attention_heads,
            groups=model.kv_heads,
            head_dim=model.head_dim,
            sight=SightSpec(causal=False),
            qkv_bias=model.qkv_bias,
            dropout=model.attention_dropout,
            scale=self._t5_scale,
        )

    def _head_norm(self, heads: int) -> NormSpec | None:
        model, scope = self.model, self.model.qk_layernorm_scope
        if not model.qk_layernorm:
            return None
        norm = norm_spec(model, model.head_dim * (heads if scope == "projection" else 1))
        return replace(norm, scope=scope, decays=model.apply_wd_to_qk_layernorm)

    def _latent(self, sight: SightSpec) -> LatentAttentionSpec:
        """Scores have the factor 1 / sqrt(d); YaRN multiplies it by (0.1 mscale_all_dim ln factor + 1)^2."""
        model, sharper = self.model, 1.0
        if model.scales_by_yarn:
            sharper += 0.1 * model.mscale_all_dim * math.log(model.rotary_scaling_factor)
        norm = replace(self.norm, features=model.kv_lora_rank) if model.qk_layernorm else None
        narrow = model.q_lora_rank
        decays = model.apply_wd_to_qk_layernorm  # of the queries' norm alone, as in Megatron-LM
        return LatentAttentionSpec(
            stream=self.stream,
            heads=model.num_attention_heads,
            query_rank=narrow,
            rank=model.kv_lora_rank,
            plain_dim=model.qk_head_dim,
            rotary_dim=model.qk_pos_emb_head_dim,
            value_dim=model.v_head_dim,
            sight=sight,
            scale=sharper**2 / math.sqrt(model.head_dim),
            query_norm=replace(norm, features=narrow, decays=decays) if norm and narrow else None,
            latent_norm=norm,
            dropout=model.attention_dropout,
            softcap=model.attn_logit_softcapping,
        )

    def _mixer(self) -> MixerSpec:
        model = self.model
        assert model.mamba_heads is not None, "the pattern has such a layer"
        return MixerSpec(
            stream=self.stream,
            heads=model.mamba_heads,
            head_dim=model.mamba_head_dim,
            groups=model.mamba_num_groups,
            state=model.mamba_state_dim,
            min_step=model.mamba_min_step,
            eps=model.norm_epsilon,
        )

    def _mlp(self, number: int, width: int) -> MlpSpec | MoeSpec:
        model, mlp = self.model, MlpSpec(self.stream, width, self.activation)
        experts = self.experts.get(number, 0)
        if not experts:
            return mlp
        assert self.router is not None, "a model with experts has routers"
        router, width = self.router, model.moe_ffn_hidden_size or width
        if number < min(model.moe_n_hash_layers, model.num_layers):
            # Neither losses nor a bias can change the choice.
            router = replace(router, hashed=True, balance=(), expert_bias=False)
        expert, shared = replace(mlp, width=width), model.moe_shared_expert_intermediate_size
        return MoeSpec(
            stream=self.stream,
            experts=experts,
            expert=expert,
            router=router,
            routers=len(self.experts),
            length=model.seq_length,
            shared=None if shared is None else replace(mlp, width=shared),
            shared_gate=model.moe_shared_expert_gate,
            dense=expert if model.mlp_type == "residual" else None,
        )
