"""Layers as graphs, through a stand-in: a replay computes from the buffers of its capture alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megazero.config.training_plan import training_plan_of
from megazero.errors import ConfigError
from megazero.layers.graphed import CudaGraphs, graph_layers
from megazero.layers.inputs import LayerInputs
from megazero.layers.rows import Rows
from megazero.mpu.context import solo_context
from megazero.ops import native
from megazero.ops.attention import Documents
from megazero.train.step.timers import Timers
from megazero.verify.record import micro_batches, verification_engine
from tests.layers.pooled_graphs import PooledGraphs
from tests.layouts.layout import Layout


class StandIn:
    """Replays by doing the captured work again, with its inputs and results where they were."""

    def __init__(self):
        self.captures = self.replays = 0

    def capture(self, work):
        self.captures += 1
        # A capture launches nothing, so its results must not be used before a replay.
        results = [None if each is None else torch.full_like(each, torch.nan) for each in work()]

        def replay():
            self.replays += 1
            for result, value in zip(results, work(), strict=True):
                if result is not None:
                    result.copy_(value)

        return results, replay


def engine_of(layout):
    config = layout.config()
    return config, verification_engine(config, training_plan_of(config, 1), solo_context())


def train(layout, graphs=None, steps=3):
    """Losses, gradient norms and final weights."""
    config, engine = engine_of(layout)
    context, training_plan = solo_context(), training_plan_of(config, 1)
    if graphs is not None:
        for chunk in engine.executor.chunks.values():
            graph_layers(chunk.blocks(), graphs, warm_calls=1)
    found = []
    for number in range(steps):
        progress = training_plan.before(number)
        batches = micro_batches(config, context, training_plan.at(progress))
        result = engine.train_step(batches, progress, Timers())
        engine.evaluate([batches])
        found.append((result.losses.total, result.grad_norm))
    weights = {spec.name: state["weight"].clone() for spec, state in engine.optimizer.full_state(("weight",))}
    return found, weights


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dropout=0.1, micro_batch=2),
        Layout(shape="llama", dropout=0.1, zero=2, recompute="selective", dtype="bf16"),
        Layout(fp8="delayed", dropout=0.1),
    ],
    ids=lambda layout: layout.name,
)
def test_graphs_train_as_launches_do(layout):
    """With dropout: each micro-batch has keys of its own, which a graph must not take for constants."""
    layout, graphs = replace(layout, samples=4), StandIn()
    wanted, wanted_weights = train(layout)
    found, weights = train(layout, graphs)
    assert found == wanted
    assert all(torch.equal(weights[name], wanted_weights[name]) for name in wanted_weights)
    micro_batches = 3 * layout.samples // layout.micro_batch
    assert graphs.captures == 2 * layout.layers
    assert graphs.replays == 2 * layout.layers * (micro_batches - 1)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(layers=3, dropout=0.1, micro_batch=2),
        Layout(layers=3, shape="llama", zero=2, recompute="selective", dtype="bf16"),
        Layout(layers=3, fp8="delayed"),  # whose graphs would hold the codes of the step of their capture
    ],
    ids=lambda layout: layout.name,
)
def test_backward_reads_what_no_other_layer_has_overwritten(layout, monkeypatch):
    """What a backward freed while it was captured went to the next layer's forward, which ran before it."""
    monkeypatch.setitem(vars(native._BACKEND), "built", False)  # the recorder sees torch's operators
    layout = replace(layout, samples=4)
    wanted, wanted_weights = train(layout)
    found, weights = train(layout, PooledGraphs())
    assert found == wanted
    assert all(torch.equal(weights[name], wanted_weights[name]) for name in wanted_weights)


def one_layer(**values):
    graphs = StandIn()
    _, engine = engine_of(Layout(dropout=0.5, **values))
    layer = next(iter(engine.executor.chunks.values())).layers[0]
    graph_layers([layer], graphs, warm_calls=0)
    return layer, graphs


def test_keys_are_read_at_each_replay():
    layer, graphs = one_layer()
    x = torch.randn(16, 2, 32, requires_grad=True)

    def run(seed):
        keys = torch.arange(seed, seed + 2)
        return layer(x, LayerInputs(Rows(range(16), keys=keys)))[0].detach().clone()

    first, second, again = run(1), run(5), run(1)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert graphs.captures == 2


def test_another_shape_or_other_weights_are_captured_anew():
    layer, graphs = one_layer()
    for rows in (16, 8, 16):
        layer(torch.randn(rows, 2, 32, requires_grad=True), LayerInputs(Rows(range(rows))))
    assert graphs.captures == 4
    layer.input_norm.weight.data = layer.input_norm.weight.data.clone()
    layer(torch.randn(16, 2, 32, requires_grad=True), LayerInputs(Rows(range(16))))
    assert graphs.captures == 6


def test_documents_and_evaluations_are_not_captured():
    layer, graphs = one_layer()
    x = torch.randn(16, 2, 32, requires_grad=True)
    layer(x, LayerInputs(Rows(range(16), documents=Documents(torch.zeros(2, 16, dtype=torch.int32)))))
    with torch.no_grad():
        layer(x, LayerInputs(Rows(range(16))))
    assert graphs.captures == 0


def test_a_machine_without_cuda_is_refused():
    config = Layout().config()
    section = config.acceleration.model_copy(update={"cuda_graph": True})
    config = config.model_copy(update={"acceleration": section})
    with pytest.raises(ConfigError, match="`cuda_graph` must be off on a CPU, but is on"):
        verification_engine(config, training_plan_of(config, 1), solo_context())


@pytest.mark.gpu
def test_cuda_replays_with_new_inputs():
    x, graphs = torch.ones(4, device="cuda"), CudaGraphs()
    (y,), replay = graphs.capture(lambda: (x * 2,))
    x.fill_(3.0)
    replay()
    assert y.tolist() == [6.0] * 4
