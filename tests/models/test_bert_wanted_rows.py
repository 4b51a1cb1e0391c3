"""BERT's last layer computes only the rows that the heads read, and nothing comes out otherwise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from megazero.config.tree.model import ModelConfig
from megazero.config.tree.recompute import RecomputeConfig
from megazero.layers.initialize import initialize
from megazero.layers.placement import Placement
from megazero.models.bert import BERT
from megazero.models.bert_batch import BertBatch, BertCollate, random_samples
from megazero.models.chunk import Slice
from megazero.mpu.context import solo_context
from megazero.spec.resolve import model_spec
from tests.tables import over_table

CPU = torch.device("cpu")
VOCAB = 29
PLAIN = RecomputeConfig()
SHAPE = {"family": "bert", "num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 40}


def batch_of(packed: bool, seed: int | None = 3) -> BertBatch:
    """Five uneven samples, in 5 rows of 40 columns or packed into fewer."""
    arrays = random_samples(np.random.default_rng(2), 5, 40, VOCAB)
    return BertCollate(VOCAB, CPU, packed=packed, seed=seed)(arrays, (4, 5, 6, 7, 8))


def bert(recompute: RecomputeConfig = PLAIN, **settings) -> BERT:
    config = ModelConfig(**SHAPE, **settings)
    context = solo_context()
    placement = Placement.of(context, torch.float64)
    model = BERT(Slice(model_spec(config), (VOCAB, VOCAB), placement, recompute))
    initialize(model, 1, context.place)
    with torch.no_grad():  # otherwise a bias that is left out would not be missed
        for number, parameter in enumerate(model.parameters()):
            parameter += 0.03 * (number % 5)
    return model


def test_wanted_are_the_columns_of_masked_and_first_tokens_and_then_others():
    arrays = {
        "tokens": np.full((2, 24), 7),
        "token_types": np.zeros((2, 24), dtype=np.int64),
        "labels": np.full((2, 24), 9),
        "loss_mask": np.zeros((2, 24), dtype=np.float32),
        "lengths": np.array([24, 11]),
        "is_random": np.array([0, 1]),
    }
    arrays["loss_mask"][0, [5, 20]] = 1
    arrays["loss_mask"][1, 10] = 1
    batch = BertCollate(VOCAB, CPU)(arrays, (0, 1))
    assert batch.targets.wanted.t().tolist() == [[0, 5, 20, 1, 2, 3, 4, 6], [0, 10, 1, 2, 3, 4, 5, 6]]
    assert batch.targets.masked.tolist() == [10, 40, 21]  # column x 2 + row
    assert batch.places_among_wanted(batch.targets.masked).tolist() == [2, 4, 3]
    assert batch.places_among_wanted(batch.targets.firsts).tolist() == [0, 1]
    arrays["loss_mask"][0] = 1  # all of a row
    assert BertCollate(VOCAB, CPU)(arrays, (0, 1)).targets.wanted is None


def sums_and_gradients(model: BERT, batch: BertBatch) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    sums = model.run(batch).terms
    (sums["lm"] + 3 * sums.get("sop", 0)).backward()
    return [*(each.detach() for each in sums.values()), *(p.grad for p in model.parameters())]


@over_table("dropout", [0.0, 0.2])
@over_table("packed", [False, True])
@over_table(
    ("settings", "recompute"),
    [
        ({}, PLAIN),
        ({"apply_residual_connection_post_layernorm": True}, PLAIN),
        ({"position_embedding_type": "rope"}, PLAIN),
        ({"bert_binary_head": False, "num_query_groups": 1}, PLAIN),
        ({}, RecomputeConfig(granularity="selective")),
        ({}, RecomputeConfig(granularity="full", method="uniform", num_layers=2)),
    ],
)
def test_losses_and_gradients_are_those_of_all_rows(settings, recompute, packed, dropout):
    model = bert(recompute, hidden_dropout=dropout, attention_dropout=dropout, **settings)
    batch = batch_of(packed)
    assert batch.targets.wanted is not None
    narrowed = sums_and_gradients(model, batch)
    whole = sums_and_gradients(model, replace(batch, targets=replace(batch.targets, wanted=None)))
    assert len(narrowed) == len(whole) > 20
    for ours, theirs in zip(narrowed, whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def test_only_the_last_layer_with_the_head_narrows():
    model, batch = bert(), batch_of(False)
    rows, samples = batch.targets.wanted.shape
    assert rows < batch.tokens.shape[1]
    seen = []
    for layer in model.layers:
        layer.mlp.register_forward_hook(lambda _, given, __: seen.append(given[0].shape))
    model.run(batch)
    assert seen == [(40, 5, 16), (rows, samples, 16)]
    assert model.hidden(batch).shape == (40, 5, 16)
