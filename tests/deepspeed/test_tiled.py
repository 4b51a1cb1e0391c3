"""DeepSpeed's tiled layers and losses: the values and gradients of the whole, where DeepSpeed's are not."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.deepspeed.initialize import initialize
from megazero.deepspeed.models.tiled import (
    SequenceTiledCompute,
    TiledFusedLogitsLoss,
    TiledMLP,
    sequence_tiled_compute,
)
from megazero.deepspeed.zero.gathered import GatheredParameters
from megazero.errors import ConfigError
from tests.tables import over_table

B, S, H, V = 2, 10, 6, 13


class Mlp(nn.Module):
    def __init__(self, p: float = 0.0):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.p = nn.Linear(H, 12), nn.Linear(12, H), p
        self.unused = nn.Linear(2, 2)
        self.double()

    def plain(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(F.silu(self.up(x)), self.p))

    def used(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.named_parameters() if "unused" not in name}


class Head(nn.Module):
    """A head whose loss is the mean, or the sum, over the tokens that count."""

    def __init__(self, reduction: str = "mean"):
        super().__init__()
        torch.manual_seed(1)
        self.lm_head, self.reduction = nn.Linear(H, V, bias=False).double(), reduction

    def loss(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            x, y = x[mask.bool()], y[mask.bool()]
        return F.cross_entropy(self.lm_head(x).view(-1, V), y.reshape(-1), reduction=self.reduction)


def hidden(dims: int = 3) -> Tensor:
    g = torch.Generator().manual_seed(2)
    x = torch.randn(B, S, H, generator=g, dtype=torch.float64)
    return (x if dims == 3 else x[0]).requires_grad_()


def labels() -> Tensor:
    return torch.randint(V, (B, S), generator=torch.Generator().manual_seed(3))


def same(ours, others) -> None:
    for one, other in zip(ours, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@over_table("dims", [2, 3])
@over_table("shards", [1, 2, 3, 10])
def test_an_mlp_in_tiles(shards: int, dims: int) -> None:
    """Without a list of parameters, which DeepSpeed answers with a TypeError."""
    module, x = Mlp(), hidden(dims)
    grad = torch.randn(x.shape, dtype=torch.float64)
    out, whole = TiledMLP.apply(Mlp.plain, module, x, shards), module.plain(x)
    leaves = [x, *module.used().values()]
    same([out], [whole])
    same(torch.autograd.grad(out, leaves, grad), torch.autograd.grad(whole, leaves, grad))


def test_dropout_draws_the_same_in_backward() -> None:
    """A linear function of its kept values: its gradient tells which were kept, and its result, too."""
    module, x = Mlp(0.5), torch.ones(1, 8, H, dtype=torch.float64, requires_grad=True)

    def drops(module: nn.Module, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)

    torch.manual_seed(5)
    out = TiledMLP.apply(drops, module, x, 3)
    torch.rand(7)  # others draw in between
    state = torch.get_rng_state()
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, out)
    assert 0 < (out == 0).double().mean() < 1
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    again = torch.cat([F.dropout(part, 0.5) for part in x.tensor_split(3, 1)], 1)
    assert torch.equal(out, again)


def test_a_gradient_within_a_tile_is_refused() -> None:
    def penalty(module: nn.Module, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return x * torch.autograd.grad(module.plain(x).square().sum(), x)[0]

    with pytest.raises(ConfigError, match="`fn` must compute no gradients in its forward, but does"):
        TiledMLP.apply(penalty, Mlp(), hidden(), 2)


def test_hooks_see_one_gradient_and_the_unused_none() -> None:
    module, seen = Mlp(), Counter()
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.update([name]))
    TiledMLP.apply(Mlp.plain, module, hidden(), 4, list(module.parameters())).sum().backward()
    assert seen == Counter(dict.fromkeys(module.used(), 1))


def test_leaves_whose_gradients_are_one_tensor() -> None:
    """That of a sum is the same for both terms, and here an expanded one."""
    a, b = (nn.Parameter(torch.randn(1, 5, H).double()) for _ in range(2))
    fn = lambda module, x: x + (a + b)  # noqa: E731
    made = torch.autograd.grad(TiledMLP.apply(fn, Mlp(), hidden(), 2).sum(), [a, b])
    same(made, [torch.full_like(a, 2 * B)] * 2)


def test_tiles_that_depend_on_other_leaves() -> None:
    """As those of experts, of which a tile may choose a few."""
    experts, x = nn.ModuleList(nn.Linear(H, H).double() for _ in range(3)), hidden()

    def chosen(experts: nn.Module, x: Tensor) -> Tensor:
        out, kind = torch.zeros_like(x), x[..., 0].detach() > 0
        for number, expert in enumerate(experts):
            rows = kind == bool(number)
            if rows.any():
                out[rows] = expert(x[rows])
        return out

    with torch.no_grad():
        x[:, :4, 0], x[:, 4:6, 0], x[:, 6:, 0] = -1, torch.tensor([-1, 1]), 1
    out, whole = TiledMLP.apply(chosen, experts, x, 5), chosen(experts, x)
    same([out], [whole])
    leaves = [x, *experts.parameters()]
    same(*(torch.autograd.grad(y.square().sum(), leaves) for y in (out, whole)))


def test_forward_computes_a_tile_once_and_keeps_nothing_of_it() -> None:
    module, seen, kept = Mlp(), [], []

    def noted(module: nn.Module, x: Tensor) -> Tensor:
        seen.append(x.shape[1])
        return module.plain(x)

    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape), lambda x: x):
        TiledMLP.apply(noted, module, hidden(), 3)
    assert seen == [4, 3, 3]
    assert kept == [(B, S, H)]  # the input, which the tiles of backward are cut from


class Deep(nn.Module):
    """Two MLPs, in tiles if there are any."""

    def __init__(self, tiles: int):
        super().__init__()
        self.layers, self.tiles = nn.ModuleList(Mlp().float() for _ in range(2)), tiles
        for layer in self.layers:
            del layer.unused

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = TiledMLP.apply(Mlp.plain, layer, x, self.tiles) if self.tiles else layer.plain(x)
        return x


def _trained(rank: int, size: int, stage: int, tiles: int, cast: bool) -> list[Tensor]:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "torch_autocast": {"enabled": cast, "dtype": "bfloat16"},
    }
    model = Deep(tiles)
    engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config)
    for step in range(2):
        x = torch.randn(2, S, H, generator=torch.Generator().manual_seed(size * step + rank))
        engine.backward(engine(x).float().square().sum())
        engine.step()
    with GatheredParameters(list(model.parameters())):
        return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_an_engine_trains_in_tiles(pool, stage: int, cast: bool) -> None:
    """Also where it casts in forward, as backward must when it computes a tile again."""
    whole, tiled = (pool.run(_trained, 2, stage, tiles, cast)[0] for tiles in (0, 3))
    tolerance = 1e-2 if cast else 1e-5  # a tile's gradients are in 16 bits before they are added up
    for one, other in zip(whole, tiled, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@over_table("scale", [1.0, 0.25])
@over_table("shards", [1, 3, 4])
@over_table("reduction", ["mean", "sum"])
@over_table("masked", [False, True])
def test_a_fused_loss(scale: float, shards: int, reduction: str, masked: bool) -> None:
    """Also of tiles with few labels that count, or none: the mean is that of all, and scales everywhere."""
    head, x, y = Head(reduction), hidden(), labels()
    y[:, :5] = -100
    y[0] = -100
    mask = (torch.arange(S) % 3 > 0).expand(B, S) if masked else None
    loss = TiledFusedLogitsLoss.apply(Head.loss, head, x, y, mask, shards, None, reduction)
    whole = head.loss(x, y, mask)
    same([loss], [whole])
    leaves = [x, head.lm_head.weight]
    same(torch.autograd.grad(loss * scale, leaves), torch.autograd.grad(whole * scale, leaves))


def test_no_token_counts() -> None:
    head, x = Head(), hidden()
    y = torch.full((B, S), -100)
    for mask in (None, torch.zeros(B, S)):
        loss = TiledFusedLogitsLoss.apply(Head.loss, head, x, y, mask, 3)
        grads = torch.autograd.grad(loss, [x, head.lm_head.weight])
        assert loss == 0
        assert not any(grad.any() for grad in grads)


def test_gradcheck_of_a_loss() -> None:
    head, x, y = Head(), hidden(), labels()
    call = lambda x, _: TiledFusedLogitsLoss.apply(Head.loss, head, x, y, None, 3)  # noqa: E731
    assert torch.autograd.gradcheck(call, (x, head.lm_head.weight))


def of_two(a: Tensor, b: Tensor, factor: Tensor, weight: Tensor) -> Tensor:
    return F.linear(a * b, weight) * factor


@over_table("reduction", [None, "mean", "sum"])
@over_table("by_function", [True, False])
def test_any_function_in_tiles(reduction, by_function: bool) -> None:
    """Both sharded tensors learn, and a weight that is reached through `kwargs_to_pass`."""
    a, b, weight = hidden(), hidden().detach().requires_grad_(), nn.Parameter(torch.randn(4, H).double())
    cut, passed = {"a": a, "b": b}, {"factor": torch.tensor(3.0), "weight": weight}
    if by_function:
        how = ("a", None, 1, reduction)
        args = (*cut.values(), *passed.values())
        out = SequenceTiledCompute.apply(of_two, S, 3, list(cut), list(passed), *how, *args)
    else:
        out = sequence_tiled_compute(of_two, S, 3, cut, passed, "a", output_reduction=reduction)
    whole = of_two(**cut, **passed)
    whole = whole if reduction is None else getattr(whole, reduction)()
    same([out], [whole])
    leaves = [a, b, weight]
    same(*(torch.autograd.grad((x**2).sum(), leaves) for x in (out, whole)))


def test_scalars_are_stacked() -> None:
    x = hidden()
    out = sequence_tiled_compute(lambda x: x.sum(), S, 4, {"x": x}, {}, "x", output_reduction=None)
    assert out.shape == (4,)
    torch.testing.assert_close(out.sum(), x.sum())


def test_without_gradients() -> None:
    module, x = Mlp(), hidden()
    with torch.no_grad():
        same([TiledMLP.apply(Mlp.plain, module, x, 3)], [module.plain(x)])


@over_table(
    ("call", "said"),
    [
        (
            lambda x: TiledMLP.apply(Mlp.plain, Mlp(), x, 11),
            "`shards` must be from 1 to the length of the seq",
        ),
        (
            lambda x: TiledMLP.apply(Mlp.plain, Mlp(), x, 0),
            "`shards` must be from 1 to the length of the seq",
        ),
        (
            lambda x: sequence_tiled_compute(torch.sin, S, 2, {"x": x}, {}, "y"),
            "`grad_requiring_tensor_key` must be one of x, but is y",
        ),
        (
            lambda x: sequence_tiled_compute(torch.sin, S, 2, {"x": x.transpose(1, 2)}, {}, "x"),
            "`kwargs_to_shard` must hold tensors [batch, seqlen, ...] of seqlen 10, but `x` has shape",
        ),
        (
            lambda x: sequence_tiled_compute(torch.sin, S, 2, {"x": x}, {"z": x * 2}, "x"),
            "`kwargs_to_pass` must hold no tensor that needs a gradient, but `z` does",
        ),
        (
            lambda x: TiledFusedLogitsLoss.apply(Head.loss, Head(), x, labels(), None, 2, None, "max"),
            "`output_reduction` must be mean or sum, but is max",
        ),
    ],
)
def test_what_is_refused(call, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        call(hidden())
    assert said in str(raised.value)
