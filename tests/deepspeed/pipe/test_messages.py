"""Any tensors travel between stages, of any shape, which may change from batch to batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megazero.deepspeed.pipe.messages import MessageSpec, Pack, Unpack
from megazero.deepspeed.pipe.specs import PipelineError
from tests.deepspeed.pipe.models import engine_of, item, on_stages, settings
from tests.deepspeed.pipe.test_training import mean_square
from tests.tables import over_table

VALUES = {
    "a tensor": torch.randn(3, 2),
    "a pair": (torch.randn(3, 2), torch.tensor([True, False, True])),
    "integers": torch.arange(5),
    "of every kind": (
        torch.randn(2, 3).half(),
        torch.randn(1, dtype=torch.float64),
        torch.randn(3).bfloat16(),
        torch.randn(()),
        torch.zeros(0, 4),
        torch.randn(2, dtype=torch.complex64),
        torch.tensor([float("nan"), -0.0, float("inf")]),
        torch.arange(3, dtype=torch.int8),
    ),
    "nothing": (),
}


@over_table("name", VALUES)
def test_values_and_gradients_arrive_as_they_were(name):
    value = VALUES[name]
    single = isinstance(value, Tensor)
    tensors = [t.clone() for t in ([value] if single else value)]
    for tensor in tensors:
        tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex())
    spec = MessageSpec.of(tensors[0] if single else tuple(tensors), "layer 3")
    assert MessageSpec.decode(spec.encode()) == spec
    sent = Pack.apply(torch.zeros((), requires_grad=True), spec, *tensors)
    assert sent.requires_grad
    assert (tuple(sent.shape), sent.dtype) == spec.boundary
    received = sent.detach().clone().requires_grad_()
    token, *found = Unpack.apply(received, spec)
    for mine, theirs in zip(found, tensors, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
        assert mine.requires_grad == theirs.requires_grad
    wanted = [torch.full_like(t, 0.5 + i) for i, t in enumerate(found) if t.requires_grad]
    torch.autograd.backward([token, *(t for t in found if t.requires_grad)], [torch.zeros(()), *wanted])
    sent.backward(received.grad)
    for tensor, gradient in zip([t for t in tensors if t.requires_grad], wanted, strict=True):
        torch.testing.assert_close(tensor.grad, gradient, rtol=0, atol=0)


def test_a_stage_may_change_its_input_in_place():
    spec = MessageSpec.of(torch.ones(2, requires_grad=True), "layer 0")
    token, x = Unpack.apply(torch.ones(2, requires_grad=True), spec)
    assert x.mul_(2).sum().item() == 4
    assert token.item() == 0


@over_table("value", [None, {"x": torch.ones(2)}, (torch.ones(2), None), 3.0])
def test_what_is_no_tensor_is_refused_by_the_name_of_its_layer(value):
    with pytest.raises(
        PipelineError, match=r"^`layer 7 \(Linear\)` must give a tensor or a tuple of tensors"
    ):
        MessageSpec.of(value, "layer 7 (Linear)")


def test_shapes_may_change_from_batch_to_batch_and_within_one():
    lengths = [5, 5, 3, 5, 3, 7, 3, 5]

    def work(context):
        engine = engine_of(context, settings(1, 2))
        data = (item(step, 0, 0, length) for step, length in enumerate(lengths))
        losses = [float(engine.train_batch(data)) for _ in range(2)]
        losses.append(float(engine.eval_batch(item(9, i, 0, 9) for i in range(2))))
        return losses + [float(engine.train_batch(data)) for _ in range(2)], len(engine._runner._known)

    (expected, _), *_ = on_stages(1, 1, work)
    for losses, known in on_stages(2, 1, work):
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
        assert known == 4  # (5, 5), (3, 5), (9, 9) without gradients, (3, 7), and (3, 5) again


class Drop(nn.Module):
    """Keeps the rows whose first number is positive."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x[:, 0] > 0]


def some_rows(step: int) -> tuple[Tensor, Tensor]:
    return torch.sin(torch.arange(24.0).reshape(6, 4) + step), torch.zeros(1)


@pytest.mark.parametrize("dynamic", [True, False])
def test_shapes_that_depend_on_values(dynamic):
    def work(context):
        layers = [Drop(), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
        engine = engine_of(context, settings(0, 1), layers, loss_fn=mean_square, dynamic_shape=dynamic)
        data = map(some_rows, range(100))
        return [float(engine.train_batch(data)) for _ in range(4)]

    if dynamic:
        expected = on_stages(1, 1, work)[0]
        for losses in on_stages(2, 1, work):
            torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    else:
        with pytest.raises(PipelineError, match="`dynamic_shape` must be True where shapes depend on more"):
            on_stages(2, 1, work)


def test_unfreezing_needs_forms_anew():
    def work(context):
        layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
        engine = engine_of(context, settings(0, 1), layers, loss_fn=mean_square)
        engine.train_batch(iter([some_rows(0)]))
        engine.reset_activation_shape()
        return float(engine.train_batch(iter([some_rows(1)])))

    assert len(set(on_stages(2, 1, work))) == 1


def test_the_loss_must_be_a_scalar():
    def work(context):
        engine = engine_of(context, settings(0, 1), [nn.Linear(4, 4)] * 1, loss_fn=lambda x, y: x)
        engine.train_batch(iter([some_rows(0)]))

    with pytest.raises(
        PipelineError, match=r"`loss_fn` must give a scalar to train on, but gives a tensor of \[6, 4\]"
    ):
        on_stages(1, 1, work)
