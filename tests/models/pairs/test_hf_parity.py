"""Logits and gradients of T5 are those of transformers' T5ForConditionalGeneration."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megazero.layers.initialize import initialize
from megazero.layers.placement import Placement
from megazero.models.chunk import Slice
from megazero.models.pairs.batch import PairCollate, random_pairs
from megazero.models.pairs.bias import relative_buckets
from megazero.models.pairs.t5 import T5
from megazero.mpu.context import solo_context
from tests.models.hf_weights import global_weights
from tests.models.pairs.hf_t5 import t5_model, t5_shape, to_theirs

KINDS = {
    "1.1": {},
    "1.0": {"activation": "relu", "untie_embeddings_and_output_weights": False},
}


def build(model, dtype=torch.float32):
    context = solo_context()
    ours = T5(Slice(model, (model.vocab_size, 64), Placement.of(context, dtype)))
    initialize(ours, 5, context.place)
    return ours


def batch_of(model, count=3):
    arrays = random_pairs(np.random.default_rng(1), count, model.seq_length, model.vocab_size)
    lengths = model.seq_length, model.decoder_length
    return PairCollate(model.vocab_size, torch.device("cpu"), lengths, 8)(arrays, tuple(range(count)))


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
        input_ids=batch.tokens, attention_mask=attends, decoder_input_ids=batch.decoder_tokens
    ).logits
    mine = ours(batch)[..., : model.vocab_size].transpose(0, 1)
    torch.testing.assert_close(mine, logits, rtol=1e-5, atol=1e-5)
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch.labels, reduction="none")
    expected = (losses * batch.loss_mask).sum()
    expected.backward()
    loss = ours.run(batch).terms["lm"]
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    loss.backward()
    gradients = to_theirs(global_weights(ours, solo_context().groups, lambda p: p.grad), model)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=2e-4, atol=2e-4, msg=name)


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (8, 12), (4, 20)])
def test_kinds_of_distance_equal_transformers(both_ways, buckets, furthest):
    from transformers.models.t5.modeling_t5 import T5Attention

    distances = torch.arange(-300, 301)
    mine = relative_buckets(distances, both_ways=both_ways, buckets=buckets, furthest=furthest)
    theirs = T5Attention._relative_position_bucket(distances, both_ways, buckets, furthest)
    assert mine.equal(theirs)
    assert mine.unique().numel() == buckets - both_ways
