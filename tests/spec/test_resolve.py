"""Settings of models, and the layers that they make."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megazero.config.heterogeneous.shapes import LayerShape, text_of
from megazero.config.tree.model import ModelConfig
from megazero.spec.experts import CapacitySpec, MoeSpec, RouterSpec
from megazero.spec.model import EmbeddingSpec, HeadSpec, LayerSpec, ModelSpec, RelativeSpec
from megazero.spec.parts import (
    ActivationSpec,
    AttentionSpec,
    LatentAttentionSpec,
    MixerSpec,
    MlpSpec,
    NormSpec,
    RotaryScaling,
    RotarySpec,
    SightSpec,
    StreamSpec,
)
from megazero.spec.resolve import model_spec


def spec(**settings) -> ModelSpec:
    shape = {"num_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "seq_length": 16}
    return model_spec(ModelConfig(**{**shape, **settings}))


STREAM = StreamSpec(24, 0.02, 0.01, bias=True, dropout=0.1, scale=1.0, fp32=False)
NORM = NormSpec(24, by_mean=True, bias=True, eps=1e-5)
ATTENTION = AttentionSpec(STREAM, heads=4, groups=4, head_dim=6, sight=SightSpec(causal=True), dropout=0.1)
DENSE = MlpSpec(STREAM, 96, ActivationSpec("gelu"))
LAYER = LayerSpec(STREAM, NORM, ATTENTION, mlp=DENSE)


def test_a_gpt():
    assert spec() == ModelSpec(
        "gpt",
        STREAM,
        NORM,
        EmbeddingSpec(STREAM, positions=16),
        HeadSpec(STREAM, NORM, binary=True),
        (LAYER, LAYER),
        encoder_layers=2,
        length=16,
        decoder_length=16,
        positions=16,
        further_weight=0.1,
    )


def test_experts_in_every_second_layer():
    four = spec(
        num_layers=4,
        num_experts=(8, 16),
        moe_layer_freq=(0, 1, 0, 1),
        moe_ffn_hidden_size=10,
        moe_shared_expert_intermediate_size=20,
        moe_expert_capacity_factor=1.5,
        moe_aux_loss_coeff=(0.01,),
        moe_n_hash_layers=2,
    )
    stream = replace(STREAM, out_std=0.02 / math.sqrt(8))
    expert = MlpSpec(stream, 10, ActivationSpec("gelu"))
    router = RouterSpec(balance=(("aux_loss", 0.01),), capacity=CapacitySpec(1.5))
    experts = MoeSpec(stream, 16, expert, router, routers=2, length=16, shared=replace(expert, width=20))
    hashed = replace(experts, experts=8, router=replace(router, hashed=True, balance=()))
    dense = MlpSpec(stream, 96, ActivationSpec("gelu"))
    assert [layer.mlp for layer in four.layers] == [dense, hashed, dense, experts]
    assert (four.expert_layers, four.router) == ((1, 3), router)
    assert [layer.experts for layer in four.layers] == [0, 8, 0, 16]


def test_a_pattern_of_mixers_attention_and_mlps():
    hybrid = spec(hybrid_layer_pattern="MM*-", num_layers=4, mamba_state_dim=5, mamba_head_dim=6)
    mixer = MixerSpec(STREAM, heads=8, head_dim=6, groups=8, state=5, min_step=0.0, eps=1e-5)
    assert (mixer.width, mixer.rows) == (48, 2 * (48 + 40) + 8)
    plain = LayerSpec(STREAM, NORM)
    mixed, attends = replace(plain, mixer=mixer), replace(plain, attention=ATTENTION)
    assert hybrid.layers == (mixed, mixed, attends, replace(plain, mlp=DENSE))
    assert [layer.sides for layer in hybrid.layers] == [1, 1, 1, 1]


def test_layers_of_their_own_sizes():
    text = text_of((LayerShape(2, 40), LayerShape(0, 30), LayerShape(4, 0), LayerShape(0, 0)))
    sizes = spec(num_layers=4, heterogeneous_layers_config_encoded_json=text, qk_layernorm=True)
    parts = [
        (layer.attention and layer.attention.groups, layer.mlp and layer.mlp.width) for layer in sizes.layers
    ]
    assert parts == [(2, 40), (None, 30), (4, None), (None, None)]
    assert sizes.layers[0].attention.k_norm == replace(NORM, features=6, scope="head")


@pytest.mark.parametrize("style", ["megatron", "google"])
def test_an_encoder_and_a_decoder(style):
    t5 = spec(
        family="t5",
        t5_encoder_layers=1,
        t5_decoder_layers=1,
        t5_decoder_seq_length=8,
        t5_style=style,
        position_embedding_type="relative",
    )
    scale = 1.0 if style == "google" else 1 / math.sqrt(6)
    own = replace(ATTENTION, scale=scale)
    encoder = replace(LAYER, attention=replace(own, sight=SightSpec(causal=False)))
    cross = replace(own, sight=SightSpec(causal=False))
    assert t5.layers == (encoder, replace(LAYER, attention=own, cross=cross))
    assert (t5.encoder_layers, t5.length, t5.decoder_length) == (1, 16, 8)
    assert t5.relative == RelativeSpec(kinds=32, furthest=128)
    assert t5.embedding.positions == 0
    assert (t5.head.factor, t5.head.bias) == ((24**-0.5, False) if style == "google" else (1.0, True))


def test_latent_attention_experts_and_a_further_token():
    deepseek = spec(
        num_layers=3,
        normalization="RMSNorm",
        add_bias_linear=False,
        activation="swiglu",
        multi_latent_attention=True,
        position_embedding_type="rope",
        q_lora_rank=14,
        kv_lora_rank=10,
        qk_head_dim=6,
        qk_pos_emb_head_dim=4,
        v_head_dim=5,
        qk_layernorm=True,
        apply_wd_to_qk_layernorm=True,
        rotary_scaling_factor=40.0,
        mscale_all_dim=0.707,
        num_experts=(8,),
        moe_layer_freq=(0, 1, 1),
        mtp_num_layers=2,
        mtp_loss_scaling_factor=0.3,
    )
    assert [layer.experts for layer in deepseek.every_layer] == [0, 8, 8, 8, 8]
    assert (deepseek.expert_layers, deepseek.further_weight) == ((1, 2, 3, 4), 0.3)
    stream = StreamSpec(24, 0.02, 0.02 / math.sqrt(6), bias=False, dropout=0.1)
    norm = NormSpec(14, by_mean=False, bias=False, eps=1e-5, decays=True)
    latent = LatentAttentionSpec(
        stream,
        heads=4,
        query_rank=14,
        rank=10,
        plain_dim=6,
        rotary_dim=4,
        value_dim=5,
        sight=SightSpec(causal=True),
        scale=pytest.approx(10**-0.5 * 1.2608042**2),
        query_norm=norm,
        latent_norm=replace(norm, features=10, decays=False),
        dropout=0.1,
    )
    assert {layer.attention == latent for layer in deepseek.every_layer} == {True}
    yarn = RotaryScaling("yarn", 40.0, 4096, 1.0, 32.0, True, (1.0, 0.707))
    assert deepseek.rotary == (RotarySpec(4, 10000.0, yarn, 16),)


def test_layers_with_a_window_have_a_rotary_base_of_their_own():
    """Gemma 3: every third layer sees all; and of SmolLM3, every second one turns nothing."""
    gemma = spec(
        num_layers=6,
        position_embedding_type="rope",
        window_size=(4, 0),
        window_attn_skip_freq=3,
        window_sink_tokens=2,
        window_rotary_base=100.0,
        rotary_seq_len_interpolation_factor=8.0,
        norm_position="both",
    )
    near, whole = SightSpec(True, (4, 0), 2), SightSpec(True)
    assert [layer.attention.sight for layer in gemma.layers] == [near, near, whole] * 2
    assert [layer.attention.rotary for layer in gemma.layers] == [1, 1, 0] * 2
    table = RotarySpec(6, 10000.0, RotaryScaling("linear", 8.0), 16)
    assert gemma.rotary == (table, replace(table, base=100.0, scaling=None))
    assert {layer.norms for layer in gemma.layers} == {"both"}
    smol = spec(num_layers=4, position_embedding_type="rope", no_rope_freq=2)
    assert [layer.attention.rotary for layer in smol.layers] == [0, None] * 2


def test_a_bert_and_its_classifier():
    bert = spec(family="bert", num_classes=3, bert_head_activation="gelu")
    assert {layer.attention.sight for layer in bert.layers} == {SightSpec(causal=False)}
    assert bert.embedding.token_types == 2
    head = HeadSpec(STREAM, NORM, bias=True, exact_gelu=False, binary=True, classes=3)
    assert bert.head == head
