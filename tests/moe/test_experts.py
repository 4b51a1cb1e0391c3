"""The experts of a layer: each one's formula, halves of their backward, slices of their width."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.layers.placement import Placement
from megazero.moe.experts import Experts
from megazero.mpu.context import solo_context
from megazero.ops.grouped_linear import Groups
from megazero.spec.resolve import model_spec
from tests.moe.samples import built, config, on_ranks, randn
from tests.tables import over_table

SIZES = [3, 0, 1, 4]
CPU = torch.device("cpu")
ACTIVATIONS = ("gelu", "gelu_exact", "swiglu", "squared_relu")


def grouped(sizes: list[int]) -> Groups:
    return Groups.of(sizes, CPU)


def model(activation: str = "gelu", *, bias: bool = True):
    settings = {"add_bias_linear": bias, "moe_ffn_hidden_size": 12, "init_method_std": 0.4}
    return model_spec(config(activation=activation, **settings)).layers[1].mlp.expert


def experts_of(context, activation: str = "gelu", *, bias: bool = True, dtype=torch.float64) -> Experts:
    own = Experts(1, 4, model(activation, bias=bias), Placement.of(context, dtype))
    return built(own, Placement.of(context, dtype))


def formula(rows: Tensor, weights: dict[str, Tensor], activation: str, sizes: list[int]) -> Tensor:
    """Row by row, from whole weights."""
    out, row = [], 0
    for e, count in enumerate(sizes):
        for _ in range(count):
            inner = weights["up"][e].flatten(0, -2) @ rows[row]
            if "up_bias" in weights:
                inner = inner + weights["up_bias"][e].flatten()
            if activation == "swiglu":
                gate, value = inner.chunk(2)
                inner = gate / (1 + (-gate).exp()) * value
            elif activation == "squared_relu":
                inner = inner.clamp_min(0) ** 2
            elif activation == "gelu_exact":
                inner = inner * (1 + torch.erf(inner / math.sqrt(2))) / 2
            else:
                inner = F.gelu(inner, approximate="tanh")
            result = weights["down"][e] @ inner
            out.append(result + weights["down_bias"][e] if "down_bias" in weights else result)
            row += 1
    return torch.stack(out)


def gradients(run, x: Tensor, leaves: dict[str, Tensor], to: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    out = run(x)
    found = torch.autograd.grad(out, [x, *leaves.values()], to)
    return {"out": out.detach(), "x": found[0], **dict(zip(leaves, found[1:], strict=True))}


@over_table("bias", [True, False], ids=["bias", "no-bias"])
@over_table("activation", ACTIVATIONS)
def test_each_expert_is_its_formula(activation, bias):
    own = experts_of(solo_context(), activation, bias=bias)
    leaves = dict(own.named_parameters())
    assert leaves.keys() == ({"up", "down", "up_bias", "down_bias"} if bias else {"up", "down"})
    x, to = randn(1, sum(SIZES), 8), randn(2, sum(SIZES), 8)
    found = gradients(lambda x: own(x, grouped(SIZES)), x, leaves, to)
    again = {name: each.detach().clone().requires_grad_() for name, each in leaves.items()}
    expected = gradients(lambda x: formula(x, again, activation, SIZES), x, again, to)
    for name, each in expected.items():
        assert torch.allclose(found[name], each, atol=1e-10), name
    for name in leaves:
        assert found[name][1].abs().max() == 0, "an expert without rows has gradients of zeros"
        assert all(found[name][e].abs().max() > 1e-3 for e in (0, 2, 3))


def test_names_shapes_and_spread():
    own = Experts(1, 4, model("swiglu"), Placement.of(solo_context(), torch.float32))
    shapes = {each.spec.name: each.spec.shape for each in own.parameters()}
    assert shapes == {
        "layers.1.mlp.experts.up.weight": (4, 2, 12, 8),
        "layers.1.mlp.experts.down.weight": (4, 8, 12),
        "layers.1.mlp.experts.up.bias": (4, 2, 12),
        "layers.1.mlp.experts.down.bias": (4, 8),
    }
    decays = {each.spec.name.rsplit(".", 1)[1]: each.spec.weight_decay for each in own.parameters()}
    assert decays == {"weight": True, "bias": False}
    stds = [own.up.spec.init.std, own.down.spec.init.std]
    assert stds == pytest.approx([0.4, 0.4 / math.sqrt(2 * 2)]), "two layers add to the residual stream twice"


def test_no_two_experts_start_equal():
    """Copies of one expert, as DeepSpeed makes them, would get equal gradients for equal rows."""
    wide = config(num_experts=(16,), moe_ffn_hidden_size=12)
    layers = [
        Experts(i, 16, model_spec(wide).layers[i].mlp.expert, Placement.of(solo_context(), torch.float32))
        for i in (0, 1)
    ]
    blocks = [block for own in layers for block in built(own, Placement.of(solo_context(), torch.float32)).up]
    for one, other in combinations(blocks, 2):
        correlation = torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]
        assert abs(correlation) < 0.5


@over_table("activation", ["gelu", "swiglu"])
@over_table("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_two_halves_of_a_backward_are_the_whole(activation, dtype):
    x, to = randn(1, 8, 8).to(dtype), randn(2, 8, 8).to(dtype)

    def backward(deferred: list | None) -> dict[str, Tensor]:
        own = experts_of(solo_context(), activation, dtype=dtype)
        leaf = x.clone().requires_grad_()
        for _ in range(2):  # the second use adds to the first one's gradients
            own(leaf, grouped(SIZES), deferred).backward(to)
        if deferred is not None:
            assert own.up.grad is None
            assert own.down.grad is None
            assert own.up_bias.grad is not None
            assert [half() for half in deferred][:2] == [own.down, own.up]
            with pytest.raises(AssertionError, match="computed already"):
                deferred[0]()
        return {"x": leaf.grad} | {name: each.grad for name, each in own.named_parameters()}

    whole, halves = backward(None), backward([])
    assert whole.keys() == halves.keys()
    assert all(torch.equal(halves[name], each) for name, each in whole.items())
    assert all(each.abs().max() > 0 for each in whole.values())


@over_table("split", [False, True], ids=["whole", "halves"])
@over_table(("tp", "ep"), [(2, 1), (1, 2), (2, 2), (4, 1)])
@over_table("activation", ["gelu", "swiglu"])
def test_slices_of_the_width_add_up_and_biases_count_once(activation, tp, ep, split):
    """Experts over `ep`, their width over `etp`: each slice gets the same rows, and the whole gradient."""
    x, to = randn(1, sum(SIZES), 8), randn(2, sum(SIZES), 8)
    starts = [sum(SIZES[:e]) for e in range(5)]

    def work(context):
        own = experts_of(context, activation)
        part = context.place.index("ep")
        mine = slice(starts[part * own.count], starts[(part + 1) * own.count])
        leaf, deferred = x[mine].clone().requires_grad_(), [] if split else None
        out = own(leaf, grouped(SIZES[part * own.count : (part + 1) * own.count]), deferred)
        out.backward(to[mine])
        for half in deferred or ():
            half()
        grads = {name: each.spec.unshard(each.grad, context.groups) for name, each in own.named_parameters()}
        weights = {
            name: each.spec.unshard(each.detach(), context.groups) for name, each in own.named_parameters()
        }
        return part, out.detach(), leaf.grad, grads, weights

    ranks = on_ranks(work, tp * ep, tp=tp, ep=ep)
    weights = {name: each.clone().requires_grad_() for name, each in ranks[0][-1].items()}
    expected = gradients(lambda x: formula(x, weights, activation, SIZES), x, weights, to)
    for field, name in ((1, "out"), (2, "x")):
        parts = [torch.zeros(0)] * ep
        for part in range(ep):
            parts[part] = sum(rank[field] for rank in ranks if rank[0] == part)
        assert torch.allclose(torch.cat(parts), expected[name], atol=1e-10), name
    for *_, grads, whole in ranks:
        for name, each in grads.items():
            assert torch.equal(whole[name], weights[name])
            assert torch.allclose(each, expected[name], atol=1e-10), name
