"""Norms: weights less 1, and those of queries and keys over the ranks that have their heads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megazero.config.tree.model import ModelConfig
from megazero.layers.attention import SelfAttention
from megazero.layers.latent import LatentAttention
from megazero.layers.norm import Norm
from megazero.layers.placement import Placement
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.param_spec import spec_of
from megazero.mpu.thread_group import ThreadWorld
from megazero.ops.layer_norm import LAYER_NORM
from megazero.spec.resolve import model_spec

KINDS = pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])


def config(kind: str, **settings) -> ModelConfig:
    shape = {"num_layers": 1, "hidden_size": 24, "num_attention_heads": 4, "seq_length": 8}
    return ModelConfig(**shape, normalization=kind, **settings)


def formula(x: torch.Tensor, kind: str, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    x = x.double()
    x = x - x.mean(-1, keepdim=True) if kind == "LayerNorm" else x
    y = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    return y if bias is None else y + bias.double()


def filled(norm: Norm, whole: dict[str, torch.Tensor], place) -> Norm:
    """The norm with its part of the whole vectors."""
    for name, parameter in norm.named_parameters():
        parameter.data.copy_(spec_of(parameter).shard(whole[name], place))
    return norm


@KINDS
def test_a_weight_is_stored_less_one(kind):
    """In bf16 1 + 2^-9 is 1: the sum is made in fp32, and whatever kernel runs gets weight and bias alike."""
    norm = Norm(
        "n",
        model_spec(config(kind, apply_layernorm_1p=True)).norm,
        Placement.of(solo_context(), torch.bfloat16),
    )
    assert {spec_of(p).init.kind for p in norm.parameters()} == {"zeros"}
    draw = torch.Generator().manual_seed(3)
    small = {"weight": torch.full((24,), 2.0**-9), "bias": torch.full((24,), 0.25)}
    filled(norm, small, solo_context().place)
    x = torch.randn(400, 2, 24, generator=draw).bfloat16()
    bias = small["bias"] if kind == "LayerNorm" else None
    expected = formula(x, kind, 1 + small["weight"], bias)
    plain = formula(x, kind, torch.ones(24), bias)
    alike, without = ((norm(x) == y.bfloat16()).float().mean() for y in (expected, plain))
    assert alike > 0.99  # but for ties of rounding
    assert without < 0.8
    if kind == "LayerNorm":
        wide = 1 + norm.weight.float(), norm.bias.float()
        for row in LAYER_NORM.implementations:
            if row.name in ("torch", "reference"):
                torch.testing.assert_close(row.fn(x, *wide, 1e-5), norm(x), rtol=1e-2, atol=1e-2)


@KINDS
@pytest.mark.parametrize("scope", ["head", "projection"])
def test_heads_on_ranks_are_normalized_as_on_one(kind, scope):
    heads, width, tp = 4, 6, 2
    features = width * (heads if scope == "projection" else 1)
    draw = torch.Generator().manual_seed(7)
    whole = {name: torch.randn(features, generator=draw) for name in ("weight", "bias")}
    x, grad = (torch.randn(5, 2, heads, width, generator=draw) for _ in range(2))
    given = replace(model_spec(config(kind)).norm, features=features, scope=scope)

    def work(context):
        placement = Placement.of(context, torch.float32)
        norm = filled(Norm("n", given, placement), whole, context.place)
        own = slice(
            context.tp.rank * heads // context.tp.size, (context.tp.rank + 1) * heads // context.tp.size
        )
        rows = x[:, :, own].clone().requires_grad_()
        out = norm.of_heads(rows)
        out.backward(grad[:, :, own])
        spec = spec_of(norm.weight)
        return out.detach(), rows.grad, norm.weight.grad, (spec.partial_grad, len(spec.cuts))

    alone = work(solo_context())
    expected = x if scope == "head" else x.flatten(2)
    bias = whole["bias"] if kind == "LayerNorm" else None
    expected = formula(expected, kind, whole["weight"], bias).view(x.shape).float()
    torch.testing.assert_close(alone[0], expected)
    world = ThreadWorld(tp)
    parts = world.run(lambda rank: work(thread_context(world, ProcessGrid(tp=tp), rank)))
    for place in (0, 1):
        torch.testing.assert_close(torch.cat([part[place] for part in parts], 2), alone[place])
    grads = [part[2] for part in parts]
    together = sum(grads) if scope == "head" else torch.cat(grads)
    torch.testing.assert_close(together, alone[2])
    assert {part[3] for part in parts} == {(True, 0) if scope == "head" else (False, 1)}


def test_norms_of_heads_decay_as_megatron_lm_has_it():
    """Weights and biases of both; of latent attention's two norms that of the queries alone."""
    context = solo_context()
    decays = {"qk_layernorm": True, "apply_wd_to_qk_layernorm": True}
    latent = {"multi_latent_attention": True, "position_embedding_type": "rope", "q_lora_rank": 8}
    placement = Placement.of(context, torch.float32)

    def attention(**settings):
        return model_spec(config("LayerNorm", **settings)).layers[0].attention

    plain = SelfAttention(0, attention(**decays), placement)
    small = LatentAttention(0, attention(**decays, **latent), placement)
    found = {s.name: s.weight_decay for m in (plain, small) for s in map(spec_of, m.parameters())}
    assert {name: found[name] for name in found if "_norm." in name} == {
        **{f"layers.0.attention.{n}_norm.{kind}": True for n in "qk" for kind in ("weight", "bias")},
        **{f"layers.0.attention.query_norm.{kind}": True for kind in ("weight", "bias")},
        **{f"layers.0.attention.latent_norm.{kind}": False for kind in ("weight", "bias")},
    }
