"""An engine over a model that `zero.Init` built, and what a script may do with cut parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import megazero
from megazero.deepspeed.zero.gathered import GatheredParameters, register_external_parameter
from megazero.deepspeed.zero.init import Init
from megazero.deepspeed.zero.sharding import user_units
from megazero.errors import ConfigError
from megazero.mpu.context import ParallelContext, solo_context
from tests.deepspeed.user_models import (
    ADAMW,
    WIDTH,
    Encoder,
    Tied,
    assert_same,
    batch,
    build,
    on_ranks,
    settings,
    start,
    train_engine,
    train_plain,
)


def build_cut(kind, context: ParallelContext, seed: int = 0, **config) -> nn.Module:
    """Cut while it is built; threads draw random numbers from each other, so values are written later."""
    values = build(kind, seed).state_dict()
    with Init(mpu=context, **config):
        model = kind()
    for name, param in model.named_parameters():
        with GatheredParameters(param, modifier_rank=0):
            param.copy_(values[name])
    return model


@pytest.mark.parametrize("kind", [Tied, Encoder])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_that_is_cut_while_built_trains_as_plain_torch(kind, stage, ranks):
    optimizer = {"type": "AdamW", "params": {**ADAMW["params"], "eps": 1e-3}}

    def work(context: ParallelContext):
        model = build_cut(kind, context)
        engine = start(context, model, settings(stage, 2, optimizer=optimizer))
        if stage == 3 and ranks > 1:
            assert model.embedding.weight.isnan().all()
        return train_engine(engine, context, range(3))

    model = build(kind)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-3)
    expected = train_plain(model, plain, ranks=ranks, accumulation=2, steps=3)
    if kind is Encoder:
        expected.weights["seen"] /= ranks
    assert_same(on_ranks(ranks, work)[0], expected)


def test_taking_over_never_makes_the_model_whole():
    """Storages that are alive while buckets are filled: the slices, and one bucket."""
    ranks, layers = 4, 6

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])

        def forward(self, x):
            return self.parts(x).sum()

    def work(context: ParallelContext):
        with Init(mpu=context):
            model = Deep()
        live = []
        homes = [param.shard_holder for param in model.parameters()]
        for home in homes:
            inner = home.whole

            def spy(inner=inner):
                storages = {
                    p.data.untyped_storage().data_ptr(): p.data.untyped_storage().nbytes()
                    for p in model.parameters()
                    if not p.is_meta
                }
                live.append(sum(storages.values()))
                return inner()

            home.whole = spy
        start(context, model, settings(3, optimizer=ADAMW))
        return max(live), len(live)

    bucket = 4 * WIDTH * WIDTH
    for peak, fills in on_ranks(ranks, work):
        assert fills == layers
        assert peak <= bucket + 4 * layers  # one bucket, and placeholders


def test_weights_can_be_read_and_changed_between_steps():
    def work(context: ParallelContext):
        engine = start(context, build(Tied), settings(3, optimizer=ADAMW))
        train_engine(engine, context, range(1))
        weight = engine.module.up.weight
        assert weight.isnan().all()
        with GatheredParameters([weight, engine.module.scale], modifier_rank=1):
            assert not weight.isnan().any()
            if context.rank == 1:
                weight.zero_()
        after = engine.module_state_dict()["up.weight"]
        train_engine(engine, context, range(1, 2))
        return not after.any(), bool(engine.module_state_dict()["up.weight"].any())

    assert on_ranks(2, work) == [(True, True)] * 2


def test_a_registered_read_is_gathered_with_the_reading_module():
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH, bias=False)
            self.second = nn.Linear(WIDTH, WIDTH, bias=False)
            register_external_parameter(self, self.second.weight)

        def forward(self, x):
            return (self.first(x) @ self.second.weight).sum()

    def work(context: ParallelContext):
        engine = start(context, build(Reader), settings(3, optimizer=ADAMW))
        x = torch.ones(2, WIDTH)
        engine.backward(engine(x))
        engine.step()
        return engine.get_global_grad_norm()

    model = build(Reader)
    model(torch.ones(2, WIDTH)).backward()
    expected = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    assert on_ranks(2, work) == pytest.approx([expected] * 2, rel=1e-5)


def test_evaluation_between_steps_changes_nothing():
    def work(context: ParallelContext):
        engine = start(context, build(Tied), settings(3, 2, optimizer=ADAMW))
        losses = []
        for step in range(2):
            for micro in range(2):
                engine.backward(engine(*batch(step, micro, context.data.rank)))
                engine.eval()
                with torch.no_grad():
                    losses.append(float(engine(*batch(5, 0, 0))))
                engine.train()
                engine.step()
        return losses, engine.module_state_dict()

    model = build(Tied)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    expected = train_plain(model, plain, ranks=2, accumulation=2, steps=2)
    for losses, weights in on_ranks(2, work):
        assert losses[0] == losses[1]
        assert losses[1] != losses[2]
        for name, value in expected.weights.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)


def test_evaluation_may_read_weights_that_training_does_not():
    """In evaluation, torch's transformer layer hands all its weights to one function."""

    def work(context: ParallelContext):
        engine = start(context, build(Encoder), settings(3, optimizer=ADAMW))
        engine.eval()
        with torch.no_grad():
            loss = float(engine(*batch(0, 0, 0)))
        assert engine.module.layers.layers[0].linear1.weight.isnan().all()
        engine.train()
        return loss, train_engine(engine, context, range(1)).losses

    model = build(Encoder).eval()
    with torch.no_grad():
        expected = float(model(*batch(0, 0, 0)))
    model = build(Encoder)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = train_plain(model, plain, ranks=2, accumulation=1, steps=1).losses
    for evaluated, trained in on_ranks(2, work):
        assert evaluated == pytest.approx(expected, rel=1e-5)
        assert trained == pytest.approx(losses, rel=1e-5)


def test_recompute_of_the_scripts_own_works_where_weights_are_cut():
    from torch.utils.checkpoint import checkpoint

    class Recomputed(Tied):
        def forward(self, tokens, labels):
            return checkpoint(super().forward, tokens, labels, use_reentrant=False)

    def work(context: ParallelContext):
        engine = start(context, build(Recomputed), settings(3, optimizer=ADAMW))
        return train_engine(engine, context, range(2))

    model = build(Tied)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    assert_same(on_ranks(2, work)[0], train_plain(model, plain, ranks=2, accumulation=1, steps=2))


def test_a_model_on_the_meta_device_has_no_values():
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="`weight` must have values, but is on the meta device"):
        megazero.initialize(model=model, config=settings(3, optimizer=ADAMW), mpu=solo_context())


def test_attention_of_torch_is_gathered_together():
    """Its output layer is never called, so that alone it would be gathered too early and freed too late."""
    layer = nn.TransformerEncoderLayer(WIDTH, 2)
    units = {type(unit.module).__name__: len(unit.params) for unit in user_units(layer, 1)}
    assert units == {"MultiheadAttention": 4, "Linear": 2, "LayerNorm": 2}
