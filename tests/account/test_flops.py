from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megazero.account.flops import attended_keys, attention_flops, logits_flops, mlp_flops
from megazero.config.heterogeneous.shapes import LayerShape, text_of
from megazero.config.tree.model import ModelConfig
from megazero.layers.patterns import pattern_of
from megazero.models.bert import bert_blocks
from megazero.models.gpt import gpt_blocks
from megazero.mpu.solo_group import SoloGroup
from megazero.spec.resolve import model_spec
from tests.config.samples import make_config
from tests.tables import over_table


def model(**fields):
    values = {"num_layers": 6, "hidden_size": 512, "num_attention_heads": 8, "seq_length": 512}
    return ModelConfig(**{**values, **fields})


def attention(shape: ModelConfig, causal: bool):
    """That of the first layer."""
    spec = model_spec(shape).layers[0].attention
    return replace(spec, sight=replace(spec.sight, causal=causal))


def trained(shape: ModelConfig, vocab: int, *, causal: bool = True) -> float:
    """Forward and backward, of equal layers."""
    mlp = mlp_flops(model_spec(shape).layers[0].mlp)
    layers = shape.num_layers * (attention_flops(attention(shape, causal), shape.seq_length) + mlp)
    return 3 * (layers + logits_flops(shape.hidden_size, vocab))


def test_blocks_of_a_gpt_are_an_embedding_its_layers_and_a_head():
    config = make_config().model_copy(update={"model": model(num_layers=2)})
    blocks = gpt_blocks(config, 8192)
    assert [block.kind for block in blocks] == ["Embedding", "TransformerLayer", "TransformerLayer", "Head"]
    assert 3 * sum(block.flops for block in blocks) == trained(model(num_layers=2), 8192)


def test_blocks_of_a_bert_by_hand():
    """The 345M at length 512: every key is seen, a quarter of the tokens is masked."""
    shape = ModelConfig(
        family="bert", num_layers=24, hidden_size=1024, num_attention_heads=16, seq_length=512
    )
    config = make_config({"data.mask_prob": 0.25}).model_copy(update={"model": shape})
    embedding, *layers, head = bert_blocks(config, 30592)
    projections, attention, mlp = 4 * 2 * 1024 * 1024, 2 * 2 * 512 * 1024, 2 * 2 * 1024 * 4096
    assert (embedding.kind, embedding.flops) == ("Embedding", 0.0)
    last = 3 * 2 * 1024 * 1024 + (2 * 1024 * 1024 + attention + mlp) / 4
    assert [(block.kind, block.flops) for block in layers] == [
        *[("TransformerLayer", projections + attention + mlp)] * 23,
        ("TransformerLayer", last),
    ]
    assert (projections + attention + mlp, last) == (27_262_976, 11_534_336)
    assert (head.kind, head.flops) == ("BertHead", (2 * 1024 * 1024 + 2 * 1024 * 30592) / 4)


@pytest.mark.fast
def test_the_benchmark_model_by_hand():
    projections = 4 * 2 * 512 * 512
    attention = 2 * 2 * 256 * 512
    mlp = 2 * 2 * 512 * 2048
    assert 3 * (6 * (projections + attention + mlp) + 2 * 512 * 8192) == 147_849_216
    assert trained(model(), 8192) == 147_849_216.0


def test_without_a_mask_it_is_the_paper_formula():
    """Narayanan et al. 2021: 72 l h^2 (1 + s / 6h + V / 12lh) where nothing is recomputed."""
    layers, hidden, length, vocab = 24, 1024, 2048, 51200
    shape = model(num_layers=layers, hidden_size=hidden, num_attention_heads=16, seq_length=length)
    expected = 72 * layers * hidden**2 * (1 + length / (6 * hidden) + vocab / (12 * layers * hidden))
    assert trained(shape, vocab, causal=False) == pytest.approx(expected, rel=1e-12)


def test_llama_2_70b_is_close_to_six_per_parameter():
    shape = model(
        num_layers=80,
        hidden_size=8192,
        num_attention_heads=64,
        num_query_groups=8,
        ffn_hidden_size=28672,
        activation="swiglu",
        seq_length=4096,
    )
    parameters_in_products = 80 * (8192 * (8192 + 2 * 1024) + 8192 * 8192 + 3 * 8192 * 28672) + 8192 * 32000
    assert trained(shape, 32000) == 6 * parameters_in_products + 3 * 80 * 4 * 2048 * 8192


@over_table(
    "fields",
    [
        {},
        {"num_query_groups": 2},
        {"activation": "swiglu"},
        {"activation": "quick_geglu"},
        {"kv_channels": 48},
        {"attention_output_gate": True},
    ],
    ids=str,
)
def test_equals_what_torch_counts_in_the_products(fields):
    """One layer and the head written out as products, forward and backward, counted by torch."""
    shape = model(num_layers=1, hidden_size=64, num_attention_heads=4, seq_length=32, **fields)
    length, hidden, heads, vocab = 32, 64, 4, 256
    query, key = heads * shape.head_dim, shape.kv_heads * shape.head_dim
    mlp = 3 if "activation" in fields else 2

    def weight(*size):
        return torch.ones(*size, requires_grad=True)

    x = weight(length, hidden)
    with FlopCounterMode(display=False) as counter:
        qkv = x @ weight(hidden, query + 2 * key)
        q = qkv[:, :query].view(length, heads, -1).transpose(0, 1)
        scores = q @ weight(heads, shape.head_dim, length)
        context = (scores @ weight(heads, length, shape.head_dim)).transpose(0, 1).reshape(length, query)
        if shape.attention_output_gate:
            context = context * (x @ weight(hidden, query))
        x = context @ weight(query, hidden)
        inner = sum(x @ weight(hidden, shape.ffn_size) for _ in range(mlp - 1))
        x = inner @ weight(shape.ffn_size, hidden)
        (x @ weight(hidden, vocab)).sum().backward()
    assert counter.get_total_flops() == length * trained(shape, vocab, causal=False)


@pytest.mark.parametrize("narrow", [None, 24])
def test_latent_attention_equals_what_torch_counts_in_the_products(narrow):
    """Forward and backward, counted by torch; of a head's key 8 channels are not made of the small vector."""
    widths = {"kv_lora_rank": 20, "qk_head_dim": 12, "qk_pos_emb_head_dim": 8, "v_head_dim": 10}
    shape = model(
        **{"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32},
        **{
            "multi_latent_attention": True,
            "position_embedding_type": "rope",
            "q_lora_rank": narrow,
            **widths,
        },
    )
    length, heads = 32, 4

    def weight(*size):
        return torch.ones(*size, requires_grad=True)

    x = weight(length, 64)
    with FlopCounterMode(display=False) as counter:
        small = x if narrow is None else x @ weight(64, narrow)
        q = (small @ weight(narrow or 64, heads * 20)).view(length, heads, 20).transpose(0, 1)
        down = x @ weight(64, 28)
        up = (down[:, :20] @ weight(20, heads * 22)).view(length, heads, 22).transpose(0, 1)
        key = torch.cat((up[..., :12], down[:, 20:].expand(heads, length, 8)), -1)
        context = (q @ key.transpose(1, 2)) @ up[..., 12:]
        (context.transpose(0, 1).reshape(length, heads * 10) @ weight(heads * 10, 64)).sum().backward()
    assert counter.get_total_flops() == length * 3 * attention_flops(attention(shape, False), length)


def test_a_further_token_has_a_layer_a_join_and_the_head():
    config = make_config().model_copy(update={"model": model(num_layers=2)})
    *_, layer, head = gpt_blocks(config, 8192)
    deeper = config.model_copy(update={"model": model(num_layers=2, mtp_num_layers=3)})
    *_, same, more = gpt_blocks(deeper, 8192)
    assert same == layer
    assert more.flops - head.flops == 3 * (layer.flops + 2 * 2 * 512 * 512 + head.flops)


@over_table(
    ("settings", "channels", "gates"),
    [
        ({}, 2 * 384, 4),
        ({"moe_router_topk": 1}, 384, 4),
        ({"moe_shared_expert_intermediate_size": 128}, 2 * 384 + 128, 4),
        ({"moe_shared_expert_intermediate_size": 128, "moe_shared_expert_gate": True}, 2 * 384 + 128, 5),
        ({"mlp_type": "residual", "moe_router_topk": 1}, 2 * 384, 6),
    ],
    ids=str,
)
def test_a_layer_with_experts_by_hand(settings, channels, gates):
    """A token goes through two products of each inner channel that it meets, and one for each score."""
    shape = model(num_experts=4, moe_ffn_hidden_size=384, **settings)
    assert mlp_flops(model_spec(shape).layers[0].mlp) == 2 * 2 * 512 * channels + 2 * 512 * gates


@over_table("causal", [True, False])
@over_table(
    ("window", "sinks"),
    [((7, 0), 0), ((511, -1), 0), ((20, 9), 0), ((-1, 5), 0), ((16, 3), 8), ((400, 0), 200)],
)
def test_attended_keys_are_those_of_the_mask(window, sinks, causal):
    """Up to half a key, as a triangle of s keys has s / 2 by this count and (s + 1) / 2 by the other."""
    window = (window[0], 0) if causal else window
    shape = model(family="gpt" if causal else "bert", window_size=window, window_sink_tokens=sinks)
    sight = attention(shape, causal).sight
    pattern = pattern_of(sight, 0, SoloGroup())
    mask = pattern.allowed(causal, range(512), range(512), torch.device("cpu"))
    if mask is None:
        mask = torch.ones(512, 512).tril()
    counted = mask.sum().item() / 512
    found = attended_keys(sight, 512)
    assert found == pytest.approx(counted, abs=0.51)


def test_layers_of_one_part_by_hand():
    """Megatron-LM's count of a mixer: the projections, and 7 for each number of all states."""
    shape = model(hybrid_layer_pattern="M*-", num_layers=3, mamba_state_dim=64, mamba_num_groups=4)
    config = make_config().model_copy(update={"model": shape})
    embedding, *layers, head = gpt_blocks(config, 8192)
    mixer = 2 * 512 * (2 * 1024 + 2 * 4 * 64 + 16) + 2 * 1024 * 512 + 7 * 1024 * 64
    attention = 4 * 2 * 512 * 512 + 2 * 2 * 256 * 512
    assert [(block.kind, block.flops) for block in layers] == [
        ("Mamba2", mixer),
        ("SelfAttention", attention),
        ("MLP", 2 * 2 * 512 * 2048),
    ]
    assert (embedding.flops, head.flops) == (0.0, 2 * 512 * 8192)


def test_layers_of_their_own_sizes_by_hand():
    text = text_of((LayerShape(2, 96), LayerShape(0, 64), LayerShape(8, 0), LayerShape(0, 0)))
    shape = model(num_layers=4, heterogeneous_layers_config_encoded_json=text)
    _, *layers, _ = gpt_blocks(make_config().model_copy(update={"model": shape}), 8192)
    width = 512 // shape.num_attention_heads
    scores = 2 * 2 * 256 * 512
    assert [(block.kind, block.flops) for block in layers] == [
        ("TransformerLayer", 2 * 512 * (2 * 512 + 2 * 2 * width) + scores + 2 * 2 * 512 * 96),
        ("MLP", 2 * 2 * 512 * 64),
        ("SelfAttention", 2 * 512 * (2 * 512 + 2 * 8 * width) + scores),
        ("SingleLayer", 0.0),
    ]


def test_a_window_is_that_of_its_layer():
    config = make_config().model_copy(
        update={"model": model(num_layers=4, window_size=(63, 0), window_attn_skip_freq=(2,))}
    )
    _, *layers, _ = gpt_blocks(config, 8192)
    near, whole = 2 * 2 * 512 * (64 - 64 * 64 / 1024), 2 * 2 * 512 * 256
    assert [layer.flops - layers[1].flops for layer in layers] == [near - whole, 0, near - whole, 0]
