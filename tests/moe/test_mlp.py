"""The whole mixture in the place of an MLP: its formulas, and that nothing but the tokens decides."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.layers.collectives import own_rows
from megazero.layers.inputs import LayerInputs
from megazero.layers.placement import Placement
from megazero.layers.rows import Rows
from megazero.moe.losses import terms_of
from megazero.moe.mlp import MoEMLP
from megazero.mpu.context import solo_context
from megazero.mpu.rng import sample_keys
from megazero.ops.attention import Documents
from megazero.spec.resolve import model_spec
from tests.moe.samples import SEED, built, config, on_ranks, randn
from tests.tables import over_table

S, B, H = 8, 2, 8
SHAPE = {"moe_ffn_hidden_size": 12, "init_method_std": 0.4, "activation": "squared_relu"}
KINDS = {
    "plain": {"add_bias_linear": False},
    "biases": {},
    "top-1": {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    "shared": {"moe_shared_expert_intermediate_size": 16},
    "gate": {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True},
    "residual": {"mlp_type": "residual"},
    "swiglu": {"activation": "swiglu", "mlp_type": "residual", "add_bias_linear": False},
    "capacity": {"moe_expert_capacity_factor": 0.6, "moe_token_drop_policy": "position"},
    "padded to capacity": {"moe_expert_capacity_factor": 0.6, "moe_pad_expert_input_to_capacity": True},
}
BALANCED = {
    "moe_router_load_balancing_type": ("seq_aux_loss", "global_aux_loss", "aux_loss"),
    "moe_aux_loss_coeff": (0.5, 0.3, 0.2),
    "moe_z_loss_coeff": 0.1,
}


def x_of(seed: int = 1, b: int = B) -> Tensor:
    return randn(seed, S, b, H).float()


def inputs(b: int = B, ids: Tensor | None = None, s: int = S) -> LayerInputs:
    keys = torch.from_numpy(sample_keys(SEED, range(b)))
    return LayerInputs(Rows(range(s), None if ids is None else Documents(ids), keys))


def mixture(context=None, *, split: bool = False, dispatcher: str = "alltoall", **settings) -> MoEMLP:
    placement = Placement.of(
        context or solo_context(), torch.float32, sequence_parallel=split, token_dispatcher=dispatcher
    )
    return built(MoEMLP(1, model_spec(config(**{**SHAPE, **settings})).layers[1].mlp, placement), placement)


def dense(w: dict[str, Tensor], name: str, x: Tensor, activation: str, e: int | None = None) -> Tensor:
    """An MLP of one token, x [h]; of expert e if the weights are stacked."""

    def part(which: str) -> Tensor | None:
        found = w.get(f"{name}.{which}")
        return found if found is None or e is None else found[e]

    up, down, up_bias, down_bias = map(part, ("up.weight", "down.weight", "up.bias", "down.bias"))
    inner = up.flatten(0, -2) @ x
    inner = inner if up_bias is None else inner + up_bias.flatten()
    if activation == "swiglu":
        gate, value = inner.chunk(2)
        inner = F.silu(gate) * value
    else:
        inner = inner.relu() ** 2
    out = down @ inner
    return out if down_bias is None else out + down_bias


def formula(mlp: MoEMLP, x: Tensor, dropped=()) -> Tensor:
    """Token by token; `dropped` lists the (token, expert) pairs that count nothing."""
    w = {each.spec.name.removeprefix("layers.1.mlp."): each.detach() for each in mlp.parameters()}
    spec, out = mlp.spec, []
    k, activation = spec.router.topk, spec.expert.activation.name
    for number, row in enumerate(x.reshape(-1, H)):
        logits = w["router.weight"] @ row
        chosen = logits.argsort(descending=True, stable=True)[:k]
        shares = logits.softmax(0)[chosen] if spec.router.pre_softmax else logits[chosen].softmax(0)
        found = torch.zeros(H)
        for weight, e in zip(shares, chosen.tolist(), strict=True):
            if (number, e) not in dropped:
                found = found + weight * dense(w, "experts", row, activation, e)
        if spec.shared is not None:
            every = dense(w, "shared", row, activation)
            if spec.shared_gate:
                every = every * torch.sigmoid(w["shared_gate.weight"] @ row)
            found = found + every
        if spec.dense is not None:
            mix = torch.softmax(w["coefficient.weight"] @ row + w["coefficient.bias"], 0)
            found = mix[0] * found + mix[1] * dense(w, "dense", row, activation)
        out.append(found)
    return torch.stack(out).view_as(x)


@over_table("kind", [kind for kind in KINDS if "capacity" not in kind])
def test_formula(kind):
    mlp, x = mixture(**KINDS[kind]), x_of()
    out, bias, sums = mlp(x, inputs())
    assert bias is None
    assert torch.allclose(out, formula(mlp, x), atol=1e-4, rtol=1e-4)
    counts = sums.tallies["layers.1.mlp.router.tokens"]
    assert counts.sum() == S * B * mlp.spec.router.topk
    names = {each.spec.name.removeprefix("layers.1.mlp.") for each in mlp.parameters()}
    assert ("shared_gate.weight" in names) == (kind == "gate")
    assert {"coefficient.weight", "coefficient.bias"} <= names or mlp.spec.dense is None


@pytest.mark.parametrize("kind", ["capacity", "padded to capacity"])
def test_formula_with_capacity(kind):
    """Room for ceil(8 * 2 / 4 * 0.6) = 3 choices of each sequence; a choice that has none counts nothing."""
    mlp, x = mixture(**KINDS[kind]), x_of()
    logits = (x @ mlp.router.weight.t()).detach()
    dropped = set()
    for b in range(B):
        chosen = logits[:, b].argsort(dim=1, descending=True, stable=True)[:, :2]
        shares = logits[:, b].gather(1, chosen).softmax(1)
        for e in range(4):
            wanting = [(j, i) for j in range(2) for i in range(S) if chosen[i, j] == e]
            if kind != "capacity":
                wanting.sort(key=lambda each: -float(shares[each[1], each[0]]))
            dropped |= {(i * B + b, e) for _, i in wanting[3:]}
    assert len(dropped) > 4
    out, _, sums = mlp(x, inputs())
    assert torch.allclose(out, formula(mlp, x, dropped), atol=1e-4, rtol=1e-4)
    share = pytest.approx(len(dropped) / 2 / 2)  # of two choices, in two layers
    assert sums.terms["dropped_tokens"].item() == share


@over_table("kind", ["biases", "gate", "residual", "capacity", "padded to capacity"])
def test_padding_is_neither_routed_nor_counted(kind):
    """More columns of padding, with large numbers in them: tokens, terms and gradients stay as they are."""
    x, to = x_of(), randn(3, S, B, H).float()
    settings = {**KINDS[kind], **BALANCED}

    def run(columns: int):
        ids = torch.full((B, columns), -1, dtype=torch.int32)
        ids[0, :S], ids[1, :5] = 0, 0
        padded = torch.cat([x, x.new_full((columns - S, B, H), 50.0)])
        leaf, mlp, rows = padded.requires_grad_(), mixture(**settings), []
        mlp.experts.register_forward_pre_hook(lambda _, given: rows.extend(given[1].read()))
        out, _, sums = mlp(leaf, inputs(ids=ids, s=columns))
        mask = (ids[:, :S] >= 0).t().unsqueeze(-1)
        trained = [sums.terms[term.name] * term.coefficient for term in terms_of(mlp.spec.router)]
        ((out[:S] * to * mask).sum() + sum(trained)).backward()
        grads = {each.spec.name: each.grad for each in mlp.parameters()}
        if not mlp.spec.router.capacity.padded:
            assert sum(rows) <= (S + 5) * mlp.spec.router.topk, "no expert computes what is no token"
        return {
            **{f"term {k}": v.detach() for k, v in {**sums.terms, **sums.tallies}.items()},
            "out": out[:S].detach() * mask,
            **grads,
        }

    narrow, wide = run(S), run(S + 6)
    assert wide["term layers.1.mlp.router.tokens"].sum() == (S + 5) * mixture(**settings).spec.router.topk
    assert narrow.keys() == wide.keys()
    for name, each in narrow.items():
        assert torch.allclose(wide[name], each, atol=1e-4, rtol=1e-4), name


def step(context, x: Tensor, to: Tensor | None, *, split: bool = False, **settings) -> dict[str, Tensor]:
    """Results and whole gradients of one pass; without `to`, of the routers' terms alone."""
    dispatcher = settings.pop("dispatcher", "alltoall")
    mlp = mixture(context, split=split, dispatcher=dispatcher, **settings)
    part, mine = context.groups["data"], x.shape[1] // context.groups["data"].size
    columns = slice(part.rank * mine, (part.rank + 1) * mine)
    leaf = (own_rows(x, context.tp) if split else x)[:, columns].clone().requires_grad_()
    keys = torch.from_numpy(sample_keys(SEED, range(x.shape[1])))[columns]
    out, _, sums = mlp(leaf, LayerInputs(Rows(range(S), keys=keys, spread=mlp.placement.spread)))
    trained = sum(sums.terms[t.name] * t.coefficient for t in terms_of(mlp.spec.router) if t.trained)
    if to is not None:
        given = (own_rows(to, context.tp) if split else to)[:, columns]
        trained = trained + (out * given).sum()
    trained.backward()
    grads = {}
    for each in mlp.parameters():
        grad = torch.zeros_like(each) if each.grad is None else each.grad.clone()
        if each.spec.partial_grad:
            context.tp.all_reduce(grad).wait()
        context.groups[each.spec.replicas].all_reduce(grad).wait()
        grads[each.spec.name] = each.spec.unshard(grad, context.groups)
    names = [term.name for term in terms_of(mlp.spec.router) if term.name != "load_balancing"]
    values = torch.stack([sums.terms[name].detach() for name in names])
    part.all_reduce(values).wait()
    return {"terms": values, **grads}


LAYOUTS = (
    {"tp": 2},
    {"tp": 2, "split": True},
    {"tp": 4, "split": True},
    {"dp": 2},
    {"dp": 2, "ep": 2},
    {"dp": 2, "ep": 2, "dispatcher": "allgather"},
    {"tp": 2, "split": True, "ep": 2, "etp": 1},
    {"tp": 2, "dp": 2, "ep": 4, "etp": 1},
    {"tp": 2, "dp": 2, "ep": 2, "split": True},
)


@over_table("layout", LAYOUTS, ids=str)
@over_table("of", ["terms alone", "all"])
def test_gradients_do_not_depend_on_the_layout(layout, of):
    """With the loss zeroed, the router's gradient is that of its own terms, whichever ranks share tokens.

    Expert gradients are sums over the tokens of all ranks, never divided by anything of the experts' layout.
    """
    x, to = x_of(), None if of == "terms alone" else randn(3, S, B, H).float()
    settings = {
        **KINDS["gate"],
        **BALANCED,
        "moe_router_load_balancing_type": ("seq_aux_loss", "global_aux_loss"),
        "moe_aux_loss_coeff": (0.5, 0.3),
    }
    (expected,) = on_ranks(lambda context: step(context, x, to, **settings))
    own = {name: layout[name] for name in ("split", "dispatcher") if name in layout}
    sizes = {name: layout[name] for name in ("tp", "ep", "etp") if name in layout}
    ranks = layout.get("tp", 1) * layout.get("dp", 1)
    router = expected["layers.1.mlp.router.weight"]
    assert router.abs().max() > 0.01
    for found in on_ranks(lambda context: step(context, x, to, **own, **settings), ranks, **sizes):
        assert found.keys() == expected.keys()
        for name, each in expected.items():
            assert torch.allclose(found[name], each, atol=2e-5, rtol=1e-4), name


def test_the_terms_reach_the_router_when_the_experts_cannot():
    """Elsewhere they were computed and thrown away: with experts of zeros, the loss cannot see the router."""
    for kind, coefficient in (("seq_aux_loss", 0.5), ("aux_loss", 0.5), ("global_aux_loss", 0.5)):
        mlp = mixture(moe_router_load_balancing_type=(kind,), moe_aux_loss_coeff=(coefficient,))
        with torch.no_grad():
            mlp.experts.down.zero_()
            mlp.experts.down_bias.zero_()
        mlp.router.load = torch.tensor([0.4, 0.3, 0.2, 0.1])
        out, _, sums = mlp(x_of().requires_grad_(), inputs())
        assert out.abs().max() == 0
        (term,) = (each for each in terms_of(mlp.spec.router) if each.trained)
        (grad,) = torch.autograd.grad(sums.terms[term.name], mlp.router.weight)
        assert grad.abs().max() > 0.01, kind


@over_table("factor", [None, 1.0])
@over_table("b", [1, 3])
@over_table("s", [1, 5])
def test_all_ties_and_one_token(s, b, factor):
    """A router of zeros, with which some models start: all tokens to the first experts, the others idle."""
    mlp = mixture(moe_expert_capacity_factor=factor, moe_token_drop_policy="position", **BALANCED)
    with torch.no_grad():
        mlp.router.weight.zero_()
    x = randn(1, s, b, H).float().requires_grad_()
    out, _, sums = mlp(x, inputs(b, s=s))
    out.sum().backward()
    assert sums.tallies["layers.1.mlp.router.tokens"].tolist() == [s * b, s * b, 0, 0]
    room = s if factor is None else -(-s * 2 // 4)
    dropped = {(i * b + j, e) for i in range(room, s) for j in range(b) for e in (0, 1)}
    assert torch.allclose(out, formula(mlp, x.detach(), dropped), atol=1e-4, rtol=1e-4)
    for each in mlp.experts.parameters():
        assert each.grad[2:].abs().max() == 0
        assert all(each.grad[e].abs().max() > 0 for e in (0, 1)) or each.spec.name.endswith("up.bias")


def test_evaluation_is_without_noise_and_with_its_own_factor():
    noisy = {"moe_input_jitter_eps": 0.3, "moe_router_sampling": "second"}
    mlp, x = mixture(**noisy), x_of()
    quiet = LayerInputs(Rows(range(S)))
    assert torch.allclose(mlp(x, quiet)[0], formula(mlp, x), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(mlp(x, inputs())[0], formula(mlp, x), atol=1e-2)
    capped = mixture(moe_expert_capacity_factor=0.25, moe_eval_capacity_factor=100.0)
    assert torch.allclose(capped(x, quiet)[0], formula(capped, x), atol=1e-4, rtol=1e-4)
    assert capped(x, inputs())[2].terms["dropped_tokens"] > 0
