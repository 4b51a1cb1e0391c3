"""Latent attention against transformers' DeepseekV2Attention and DeepseekV3Attention, and what it keeps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megazero.config.tree.model import ModelConfig
from megazero.inference.cache import KeyValueCache, SharedCache
from megazero.layers.attention_cores import CachedCore, LocalCore
from megazero.layers.context.cached import SharedCacheCore
from megazero.layers.inputs import AttentionCore, LayerInputs
from megazero.layers.latent import LatentAttention
from megazero.layers.placement import Placement
from megazero.layers.rotary import rotary_of
from megazero.layers.rows import Rows
from megazero.mpu.context import ParallelContext, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.param_spec import spec_of
from megazero.mpu.thread_group import ThreadWorld
from megazero.spec.resolve import model_spec
from tests.tables import over_table

S, B, H = 11, 2, 24
YARN = {
    "rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 8,
    "yarn_beta_fast": 2.0,
    "yarn_beta_slow": 0.5,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}


def model(**changes: object) -> ModelConfig:
    """Widths that all differ, so that a swap of two would not fit."""
    settings: dict[str, object] = {
        "num_layers": 2,
        "hidden_size": H,
        "num_attention_heads": 4,
        "seq_length": 64,
        "multi_latent_attention": True,
        "q_lora_rank": 14,
        "kv_lora_rank": 10,
        "qk_head_dim": 6,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 5,
        "qk_layernorm": True,
        "normalization": "RMSNorm",
        "norm_epsilon": 1e-6,  # transformers' own, whatever the model's is
        "position_embedding_type": "rope",
        "rope_type": "rope",
        "rotary_base": 500.0,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
    }
    return ModelConfig(**{**settings, **changes})


def theirs(config: ModelConfig, version: int) -> tuple[torch.nn.Module, torch.nn.Module]:
    """transformers' attention of the same shape, of random weights, and its rotary embedding."""
    if version == 3:
        from transformers.models.deepseek_v3 import configuration_deepseek_v3 as described
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as built

        made, attention = described.DeepseekV3Config, built.DeepseekV3Attention
        rotary = built.DeepseekV3RotaryEmbedding
    else:
        from transformers.models.deepseek_v2 import configuration_deepseek_v2 as described
        from transformers.models.deepseek_v2 import modeling_deepseek_v2 as built

        made, attention = described.DeepseekV2Config, built.DeepseekV2Attention
        rotary = built.DeepseekV2RotaryEmbedding
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": config.rotary_base}
    if config.scales_by_yarn:
        rope |= {
            "rope_type": "yarn",
            "factor": config.rotary_scaling_factor,
            "original_max_position_embeddings": config.yarn_original_max_position_embeddings,
            "beta_fast": config.yarn_beta_fast,
            "beta_slow": config.yarn_beta_slow,
            "mscale": config.mscale,
            "mscale_all_dim": config.mscale_all_dim,
        }
    description = made(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_attention_heads,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_head_dim,
        qk_rope_head_dim=config.qk_pos_emb_head_dim,
        v_head_dim=config.v_head_dim,
        max_position_embeddings=config.positions,
        rope_parameters=rope,
        attn_implementation="eager",
    )
    torch.manual_seed(3)
    module = attention(description, layer_idx=0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.dim() == 1))
    return module.double(), rotary(description)


NAMES = {
    "q_proj.weight": "query.weight",
    "q_a_proj.weight": "query_down.weight",
    "q_a_layernorm.weight": "query_norm.weight",
    "q_b_proj.weight": "query.weight",
    "kv_a_proj_with_mqa.weight": "latent_down.weight",
    "kv_a_layernorm.weight": "latent_norm.weight",
    "kv_b_proj.weight": "latent_up.weight",
    "o_proj.weight": "out.weight",
}


def ours(config: ModelConfig, module: torch.nn.Module, context: ParallelContext, sp: bool) -> LatentAttention:
    """Our attention with the same weights, each as it is: no channel is moved."""
    placement = Placement.of(context, torch.float64, sequence_parallel=sp)
    built = LatentAttention(0, model_spec(config).layers[0].attention, placement)
    weights = {NAMES[name]: value for name, value in module.state_dict().items()}
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            spec = spec_of(parameter)
            parameter.copy_(spec.shard(weights.pop(name).view(spec.shape), context.place))
    assert not weights
    return built


def expected(config: ModelConfig, module: torch.nn.Module, rotary: torch.nn.Module, x: Tensor) -> Tensor:
    """[s, b, h] by transformers."""
    positions = torch.arange(len(x)).unsqueeze(0)
    hidden = x.transpose(0, 1)
    angles = rotary(hidden, positions)
    mask = torch.full((len(x), len(x)), -torch.inf, dtype=x.dtype).triu(1)[None, None]
    out, _ = module(hidden_states=hidden, position_embeddings=angles, attention_mask=mask)
    return out.transpose(0, 1)


def inputs_of(config: ModelConfig, start: int, stop: int, core: AttentionCore | None = None) -> LayerInputs:
    tables = rotary_of(model_spec(config).rotary, torch.arange(start, stop))
    return LayerInputs(Rows(range(start, stop), rotary=tables), core)


CASES = {
    "v3-yarn": (3, {"rope_type": None, **YARN}),
    "v3-rope": (3, {}),
    "v2-yarn": (2, {"rope_type": "yarn", **YARN}),
    "v2-lite": (2, {"q_lora_rank": None, "rope_type": "yarn", **YARN}),
    "v2-lite-rope": (2, {"q_lora_rank": None, "v_head_dim": 12}),
}


@over_table(("tp", "sp"), [(1, False), (2, False), (4, True)])
@over_table("name", CASES)
def test_it_equals_transformers(name, tp, sp):
    """Results, and the gradients of inputs and of all weights, on any number of tensor-parallel ranks."""
    pytest.importorskip("transformers")
    version, changes = CASES[name]
    config = model(**changes)
    module, rotary = theirs(config, version)
    length = 12
    x = torch.randn(length, B, H, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    given = x.clone().requires_grad_()
    wanted = expected(config, module, rotary, given)
    grad = torch.randn(wanted.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    wanted.backward(grad)
    world = ThreadWorld(tp)

    def work(rank: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        context = thread_context(world, ProcessGrid(tp=tp), rank)
        built = ours(config, module, context, sp)
        own = slice(rank * length // tp, (rank + 1) * length // tp) if sp else slice(None)
        mine = x[own].clone().requires_grad_()
        out, bias = built(mine, inputs_of(config, 0, length))
        assert bias is None
        out.backward(grad[own])
        grads = {}
        for name, parameter in built.named_parameters():
            spec, summed = spec_of(parameter), parameter.grad.clone()
            if spec.partial_grad:
                context.tp.all_reduce(summed).wait()
            grads[name] = spec.unshard(summed, context.groups)
        return out.detach(), mine.grad, grads

    results = world.run(work)
    tables = rotary_of(model_spec(config).rotary, torch.arange(2))[0].dtype
    close = {"rtol": 1e-5, "atol": 1e-5} if tables == torch.float32 else {}
    for what, reference in ((0, wanted.detach()), (1, given.grad)):
        whole = torch.cat([result[what] for result in results]) if sp else results[0][what]
        torch.testing.assert_close(whole, reference, **close)
    for name, parameter in module.named_parameters():
        for result in results:
            mine = result[2][NAMES[name]].view_as(parameter)
            torch.testing.assert_close(mine, parameter.grad, **close, msg=lambda text, n=name: f"{n}: {text}")


def test_yarn_sharpens_the_scores():
    """1 / sqrt(d), times the square of 0.1 mscale_all_dim ln(factor) + 1; nothing without YaRN."""
    assert model_spec(model()).layers[0].attention.scale == pytest.approx(10**-0.5)
    yarn = model(rope_type="yarn", rotary_scaling_factor=40.0, mscale_all_dim=0.707)
    assert model_spec(yarn).layers[0].attention.scale == pytest.approx(10**-0.5 * 1.2608042**2)


@over_table(("first", "rank"), [(1, 10), (4, 10), (8, 40), (8, 4)])
def test_generation_keeps_the_small_vectors_alone(first, rank):
    """r + c numbers of a token and layer, of however many heads; the results are those of the whole text.

    Of a wide small vector, keys and values are made for many rows at once, and none for few.
    """
    config = model(rope_type=None, kv_lora_rank=rank, **YARN)
    context = thread_context(ThreadWorld(1), ProcessGrid(), 0)
    built = _filled(config, context)
    x = torch.randn(S, B, H, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole, _ = built(x, inputs_of(config, 0, S))
    cache = KeyValueCache(16)
    core = CachedCore(cache, LocalCore(context.tp))
    with torch.inference_mode():
        parts = [built(x[:first], inputs_of(config, 0, first, core))[0]]
        parts += [built(x[i : i + 1], inputs_of(config, i, i + 1, core))[0] for i in range(first, S)]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-6, atol=1e-6)
    of_a_token = rank + config.qk_pos_emb_head_dim
    assert cache.bytes == 16 * B * of_a_token * 8
    heads = config.num_attention_heads * (config.head_dim + config.v_head_dim)
    assert heads == 60  # a cache of keys and values would hold so many numbers of a token


def test_ranks_may_share_the_cache():
    config = model()
    x = torch.randn(S, B, H, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    world = ThreadWorld(2)

    def work(rank: int) -> tuple[Tensor, Tensor, int]:
        context = thread_context(world, ProcessGrid(cp=2), rank)
        alone = thread_context(ThreadWorld(1), ProcessGrid(), 0)
        built = _filled(config, alone)
        whole, _ = built(x, inputs_of(config, 0, S))
        cache = SharedCache(context.groups["cp"], block=3)
        core = SharedCacheCore(cache, context.groups["cp"])
        with torch.inference_mode():
            parts = [built(x[:5], inputs_of(config, 0, 5, core))[0]]
            parts += [built(x[i : i + 1], inputs_of(config, i, i + 1, core))[0] for i in range(5, S)]
        return torch.cat(parts), whole, cache.bytes

    results = world.run(work)
    for parts, whole, _ in results:
        torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-6)
    assert sum(size for *_, size in results) == S * B * 14 * 8


def _filled(config: ModelConfig, context: ParallelContext) -> LatentAttention:
    built = LatentAttention(0, model_spec(config).layers[0].attention, Placement.of(context, torch.float64))
    dice = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=dice, dtype=torch.float64) * 0.3)
    return built
