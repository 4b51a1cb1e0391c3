"""Rows computed tile by tile: values, gradients and hooks of all rows at once, in the memory of one tile."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megazero.account.memory import PeakOfOutputs
from megazero.config.tree.model import ModelConfig
from megazero.layers.inputs import LayerInputs
from megazero.layers.linear import sum_in_products
from megazero.layers.mlp import MLP
from megazero.layers.placement import Placement
from megazero.layers.rows import Rows
from megazero.layers.tiled import tile_size, tiled
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.thread_group import ThreadWorld
from megazero.ops.product_sum import Blas
from megazero.spec.resolve import model_spec
from megazero.train import build
from megazero.verify.record import Record, record_training
from tests.layouts.layout import Layout
from tests.ops.test_product_sum import gemm_ex

S, B, H, F = 14, 2, 6, 10


def mlp(tiles: int, dtype=torch.float64, **changes) -> tuple[MLP, LayerInputs]:
    given = {"add_bias_linear": True, "activation": "swiglu", **changes}
    config = ModelConfig(
        num_layers=1, hidden_size=H, num_attention_heads=2, seq_length=S, ffn_hidden_size=F, **given
    )
    module = MLP(
        "layers.0.mlp", model_spec(config).layers[0].mlp, Placement.of(solo_context(), dtype), tiles=tiles
    )
    g = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        nn.init.normal_(parameter, generator=g)
    return module, LayerInputs(Rows(range(S)))


def given(dtype=torch.float64) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(2)
    x, grad = torch.randn(S, B, H, generator=g), torch.randn(S, B, H, generator=g)
    return x.to(dtype).requires_grad_(), grad.to(dtype)


@pytest.mark.parametrize(("tiles", "size"), [(1, 14), (2, 7), (3, 5), (7, 2), (14, 1), (99, 1)])
def test_a_number_of_tiles(tiles: int, size: int) -> None:
    assert tile_size(torch.empty(14, 2, 6), tiles) == size


def test_tiles_of_about_as_many_rows_as_a_row_is_wide() -> None:
    assert tile_size(torch.empty(1000, 1, 64), 0) == 63  # 16 tiles
    assert tile_size(torch.empty(1000, 2, 64), 0) == 32  # of twice the samples
    assert tile_size(torch.empty(64, 1, 64), 0) == 64


@pytest.mark.parametrize("activation", ["swiglu", "gelu", "squared_relu"])
@pytest.mark.parametrize("tiles", [2, 3, 7, 14])
def test_tiles_equal_the_whole(tiles: int, activation: str) -> None:
    """Every parameter has its gradient, biases too; neither the input nor its gradient is written over."""
    x, grad = given()
    results = []
    for number in (1, tiles):
        module, inputs = mlp(number, activation=activation)
        before = x.detach().clone(), x._version, grad._version
        out, bias, _ = module(x, inputs)
        assert bias is None
        named = dict(module.named_parameters())
        grads = torch.autograd.grad(out, [x, *named.values()], grad)
        assert torch.equal(x, before[0])
        assert (x._version, grad._version) == before[1:]
        results.append([out, *grads])
        assert all(gradient.abs().max() > 0 for gradient in grads), list(named)
    for ours, whole in zip(*results, strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-12, atol=1e-12)


def test_gradcheck() -> None:
    module, inputs = mlp(3, activation="gelu")
    x, _ = given()
    assert torch.autograd.gradcheck(lambda x, *_: module(x, inputs)[0], (x, *module.parameters()))


def test_a_hook_sees_one_gradient_of_all_tiles() -> None:
    """Whoever reduces it over ranks must neither start with the first tile nor count one twice."""
    (whole, inputs), (cut, _) = mlp(1), mlp(5)
    x, grad = given()
    whole(x, inputs)[0].backward(grad)
    seen = Counter()
    for name, parameter in cut.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.update([name]))
    for micro_batch in (1, 2):
        cut(x, inputs)[0].backward(grad)
        assert set(seen.values()) == {micro_batch}
    for ours, other in zip(cut.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, 2 * other.grad)


def test_many_tiles_round_as_one_does() -> None:
    """In bf16 a sum of a thousand gradients, rounded at each, would stop to grow at 256 equal ones."""
    weight = nn.Parameter(torch.ones((), dtype=torch.bfloat16))
    x = torch.ones(1000, 1, dtype=torch.bfloat16)
    tiled(lambda rows: rows * weight, x, 1, (weight,)).sum().backward()
    assert weight.grad == 1000


def test_frozen_weights_and_inputs_without_gradients() -> None:
    x, grad = given()
    for frozen in ("up.weight", "down.bias"):
        module, inputs = mlp(3)
        module.get_parameter(frozen).requires_grad_(False)
        module(x.detach(), inputs)[0].backward(grad)
        assert [n for n, p in module.named_parameters() if p.grad is None] == [frozen]
    module.requires_grad_(False)
    assert module(x.detach(), inputs)[0].grad_fn is None
    with torch.no_grad():
        torch.testing.assert_close(module(x, inputs)[0], mlp(1)[0](x, inputs)[0])


def test_the_memory_of_one_tile() -> None:
    """The inner width of all rows never exists, forward or backward."""
    rows, inner = 4096, 64
    x = torch.randn(rows, 1, 8, requires_grad=True)
    up, down = (nn.Parameter(torch.randn(*shape)) for shape in ((inner, 8), (8, inner)))

    def of_rows(rows: Tensor) -> Tensor:
        return nn.functional.linear(nn.functional.linear(rows, up).relu(), down)

    grad = torch.randn(rows, 1, 8)
    peaks = {}
    for size in (rows, rows // 16):
        with PeakOfOutputs() as outputs:
            tiled(of_rows, x, size, (up, down)).backward(grad)
        peaks[size] = outputs.most
    wide, narrow = (4 * rows * width for width in (inner, 8))
    assert peaks[rows] > 3 * wide
    assert peaks[rows // 16] < 3 * narrow + 4 * wide // 16


def test_products_are_not_handed_over_tile_by_tile() -> None:
    """A sum that is handed one tile's product would be reduced, and its weight let go of, too early."""
    module, inputs = mlp(3, torch.float32)
    handed: list[nn.Parameter] = []
    sum_in_products([module], lambda weight, product: handed.append(weight), Blas(gemm_ex, lambda: 77))
    x, grad = given(torch.float32)
    module(x, inputs)[0].backward(grad)
    assert not handed
    assert module.up.weight.grad is not None


LAYOUTS = [
    Layout(shape="gpt2", dp=2, zero=3, recompute="full"),
    Layout(shape="llama", tp=2, zero=2, micro_batch=2),
    Layout(shape="gpt2", tp=2, sequence_parallel=True, dp=2, zero=3, dropout=0.2),
    Layout(shape="gpt2", pp=2, schedule="zb-h1", zero=1, recompute="selective"),
    Layout(shape="llama", tp=2, pp=2, schedule="zb-h1", sequence_parallel=True, zero=2),
    Layout(shape="bert", dp=2, zero=3, packed=True),
    Layout(shape="llama", fp8="delayed", zero=2),
    Layout(shape="gpt2", tp=2, fp8="delayed", sequence_parallel=True),
    Layout(shape="llama", experts="shared", zero=3, dp=2),
    Layout(shape="gpt2", experts="residual", tp=2, sequence_parallel=True),
    Layout(shape="gpt2", dp=2, zero=3, method="both", layers=3),
]


def trained(layout: Layout, tiles: int, logits_tiles: int | None = None) -> list[Record]:
    config = layout.config()
    changes = {"mlp_tiles": tiles}
    if logits_tiles is not None:
        changes |= {"logits": True, "logits_tiles": logits_tiles}
    recompute = config.recompute.model_copy(update=changes)
    config = config.model_copy(update={"recompute": recompute})
    if layout.world_size == 1:
        return [record_training(config, solo_context(), 3)]
    world = ThreadWorld(layout.world_size)
    return world.run(lambda rank: record_training(config, thread_context(world, layout.grid, rank), 3))


def assert_alike(ours: list[Record], theirs: list[Record], near: float) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.losses[0] == pytest.approx(other.losses[0], rel=1e-6)
        assert one.grad_norms == pytest.approx(other.grad_norms, rel=near)
        for step in range(3):
            for name, gradient in one.gradients[step].items():
                size = other.gradients[step][name].abs().max() + 1e-6
                assert (gradient - other.gradients[step][name]).abs().max() <= near * size, (step, name)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_training_in_tiles_is_training(layout: Layout) -> None:
    """Three steps with an uneven last tile: losses, norms and gradients, on every layout."""
    assert_alike(trained(layout, 3), trained(layout, 1), 2e-2 if layout.fp8 else 2e-5)


@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=lambda layout: layout.name)
def test_training_with_both_in_tiles(layout: Layout) -> None:
    assert_alike(trained(layout, 0, 5), trained(layout, 1), 2e-5)


def test_training_in_tiles_with_products(monkeypatch) -> None:
    layout = replace(LAYOUTS[0], dtype="bf16")
    monkeypatch.setattr(build, "working_blas", lambda device: Blas(gemm_ex, lambda: 77))
    assert_alike(trained(layout, 3), trained(layout, 1), 4e-2)


@pytest.mark.parametrize("learns", [True, False])
def test_recompute_stops_before_the_tiles(learns: bool) -> None:
    """Within a recomputed unit a tile's forward runs twice, not three times, whether or not x learns."""
    module, inputs = mlp(4)
    calls = Counter()
    of_rows = module._of_rows

    def counted(x: Tensor, *rest: object) -> tuple[Tensor, Tensor | None]:
        calls.update(["call"])
        return of_rows(x, *rest)

    module._of_rows = counted
    x, grad = given()
    x = x if learns else x.detach()
    whole = torch.autograd.grad(module(x, inputs)[0], list(module.parameters()), grad)
    calls.clear()
    out = checkpoint(lambda x: module(2 * x, inputs)[0] + 1, x / 2, use_reentrant=False)
    grads = torch.autograd.grad(out, list(module.parameters()), grad)
    assert calls["call"] == (8 if learns else 12)
    for ours, other in zip(grads, whole, strict=True):
        torch.testing.assert_close(ours, other)
