"""Logits and gradients of T5 are those of transformers' T5ForConditionalGeneration."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megazero.config.training_plan import training_plan_of
from megazero.layers.initialize import initialize
from megazero.layers.placement import Placement
from megazero.models.chunk import Slice
from megazero.models.pairs.batch import PairCollate, random_pairs
from megazero.models.pairs.bias import relative_buckets
from megazero.models.pairs.t5 import T5
from megazero.mpu.context import solo_context
from megazero.spec.resolve import model_spec
from megazero.train.step.state import TrainState
from megazero.train.step.timers import Timers
from megazero.verify.record import micro_batches, verification_engine
from tests.layouts.layout import Layout
from tests.models.hf_weights import global_weights
from tests.models.pairs.hf_t5 import t5_model, t5_shape, to_theirs

KINDS = {
    "1.1": {},
    "1.0": {"activation": "relu", "untie_embeddings_and_output_weights": False},
}


def build(model, dtype=torch.float32):
    context = solo_context()
    ours = T5(Slice(model_spec(model), (model.vocab_size, 64), Placement.of(context, dtype)))
    initialize(ours, 5, context.place)
    return ours


def batch_of(model, count=3):
    arrays = random_pairs(np.random.default_rng(1), count, model.seq_length, model.vocab_size)
    lengths = model.seq_length, model.decoder_length
    return PairCollate(model.vocab_size, torch.device("cpu"), lengths, 8)(arrays, tuple(range(count)))


@pytest.mark.fast
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_equal_transformers(kind):
    model = t5_shape(**KINDS[kind])
    ours, theirs, batch = build(model), t5_model(model), batch_of(model)
    state = to_theirs(global_weights(ours, solo_context().groups), model)
    missing = theirs.load_state_dict(state, strict=True)
    assert not missing.missing_keys
    attends = None if batch.mask is None else batch.mask[:, 0, 0].long()
    assert attends is not None
    assert attends.sum(1).unique().numel() > 1
    logits = theirs(
        input_ids=batch.tokens, attention_mask=attends, decoder_input_ids=batch.decoder.tokens
    ).logits
    mine = ours(batch)[..., : model.vocab_size].transpose(0, 1)
    torch.testing.assert_close(mine, logits, rtol=1e-5, atol=1e-5)
    losses = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), batch.decoder.learnt.labels, reduction="none"
    )
    expected = (losses * batch.decoder.learnt.weights).sum()
    expected.backward()
    loss = ours.run(batch).terms["lm"]
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    loss.backward()
    gradients = to_theirs(global_weights(ours, solo_context().groups, lambda p: p.grad), model)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=2e-4, atol=2e-4, msg=name)


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (8, 12), (4, 20), (4, 3)])
def test_kinds_of_distance_equal_transformers(both_ways, buckets, furthest):
    from transformers.models.t5.modeling_t5 import T5Attention

    distances = torch.arange(-300, 301)
    mine = relative_buckets(distances, both_ways=both_ways, buckets=buckets, furthest=furthest)
    theirs = T5Attention._relative_position_bucket(distances, both_ways, buckets, furthest)
    assert mine.equal(theirs)
    assert mine.unique().numel() == buckets - both_ways


@pytest.mark.parametrize("kind", KINDS)
def test_ten_steps_equal_transformers_and_adamw(kind):
    """In float64 on their side, so that what differs is our rounding."""
    layout = Layout(shape="t5", samples=4, micro_batch=2)
    config = layout.config(10)
    shape = t5_shape(**KINDS[kind])
    shape = shape.model_copy(update={"num_attention_heads": 8, "init_method_std": 0.1})
    rate = {"lr": 1e-3, "weight_decay": 0.1, "lr_decay_style": "constant", "adam_eps": 1e-4}
    rate |= {"lr_warmup_iters": 0}
    optimizer = config.optimizer.model_copy(update=rate)
    config = config.model_copy(update={"model": shape, "optimizer": optimizer})
    context, plan = solo_context(), training_plan_of(config, 1)
    engine, state = verification_engine(config, plan, context), TrainState()
    theirs, groups = t5_model(shape).double(), context.groups

    def whole() -> dict[str, torch.Tensor]:
        weights = ((spec, tensors["weight"]) for spec, tensors in engine.optimizer.full_state(("weight",)))
        return {spec.name: spec.unshard(weight, groups).clone() for spec, weight in weights}

    theirs.load_state_dict({name: x.double() for name, x in to_theirs(whole(), shape).items()})
    decayed = [p for p in theirs.parameters() if p.dim() > 1]
    others = [p for p in theirs.parameters() if p.dim() == 1]
    betas = optimizer.adam_beta1, optimizer.adam_beta2
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=1e-3,
        betas=betas,
        eps=1e-4,
    )
    for _ in range(10):
        step = plan.at(state.progress)
        batches = micro_batches(config, context, step)
        counted = sum(batch.decoder.learnt.counted for batch in batches)
        loss = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            attends = None if batch.mask is None else batch.mask[:, 0, 0].long()
            logits = theirs(
                input_ids=batch.tokens, attention_mask=attends, decoder_input_ids=batch.decoder.tokens
            ).logits
            each = torch.nn.functional.cross_entropy(
                logits.transpose(1, 2), batch.decoder.learnt.labels, reduction="none"
            )
            loss = loss + (each * batch.decoder.learnt.weights).sum() / counted
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), config.optimizer.clip_grad)
        adamw.step()
        result = engine.train_step(batches, state.progress, Timers())
        assert result.losses.labelled()["lm loss"] == pytest.approx(loss.item(), rel=1e-6)
        state = state.after(step, result.skipped)
    mine = to_theirs(whole(), shape)
    for name, weight in theirs.named_parameters():
        torch.testing.assert_close(mine[name].double(), weight.detach(), rtol=1e-5, atol=1e-6, msg=name)
