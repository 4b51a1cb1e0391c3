"""Counts, factors and means of loss terms."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from megazero.loss import LossTerm
from megazero.models.batch import Batch
from megazero.mpu.context import solo_context
from megazero.train.step.losses import Losses, local_counts, loss_factors
from tests.tables import over_table

TERMS = (LossTerm("lm"), LossTerm("aux", 0.25), LossTerm("accuracy", 0.0))


@dataclass(frozen=True)
class Counted:
    counts: dict[str, float]

    def counts_of_share(self, sharers: int) -> dict[str, float]:
        assert sharers == 1
        return self.counts


def test_counts_are_summed_over_micro_batches_in_the_order_of_the_terms():
    batches = [
        Counted({"accuracy": 2.0, "aux": 0.0, "lm": 3.0}),
        Counted({"lm": 4.5, "aux": 1.0, "accuracy": 2.0}),
    ]
    counts = local_counts(TERMS, batches, solo_context())
    assert (counts.tolist(), counts.dtype) == ([7.5, 1.0, 4.0], torch.float64)


def test_counts_of_whole_sequences_are_shared_by_the_ranks_that_have_parts_of_them():
    text = Batch(torch.zeros(3, 8, dtype=torch.int64))
    assert text.counts_of_share(1) == text.counts
    assert text.counts_of_share(4) == {"lm": 24.0, "tokens": 24.0, "sequences": 0.75, "micro_batches": 0.25}


def test_factors_are_scale_times_coefficient_over_count():
    counts = torch.tensor([8.0, 0.0, 4.0], dtype=torch.float64)
    factors = loss_factors(TERMS, counts, 16.0)
    assert (factors.tolist(), factors.dtype) == ([2.0, 0.0, 0.0], torch.float32)


@over_table("count", [1, 3, 7, 128, 4_194_301])
@over_table("scale", [1.0, 65536.0])
def test_a_factor_has_the_bits_of_a_python_number(count, scale):
    # Without masks training must not depend on where the division is done.
    (factor,) = loss_factors(TERMS[:1], torch.tensor([count], dtype=torch.float64), scale)
    loss = torch.tensor(3.7)
    assert torch.equal(loss * factor, loss * (scale / count))


def test_factors_follow_the_device_of_the_counts():
    counts = local_counts(TERMS, [], solo_context(torch.device("meta")))
    assert loss_factors(TERMS, counts, 1.0).device.type == "meta"


def test_means_and_the_total_of_what_is_trained():
    losses = Losses.of(TERMS, [12.0, 6.0, 3.0], [4.0, 3.0, 4.0])
    assert (losses["lm"], losses["aux"], losses["accuracy"]) == (3.0, 2.0, 0.75)
    assert (losses.main, losses.total) == (3.0, 3.5)
    assert losses.labelled() == {"lm loss": 3.0, "aux loss": 2.0, "accuracy": 0.75, "total loss": 3.5}
    assert list(losses.record()) == ["lm_loss", "aux_loss", "accuracy", "total_loss"]
    with pytest.raises(KeyError):
        losses["sop"]


def test_the_total_of_one_trained_term_is_not_said_twice():
    terms = (TERMS[0], TERMS[2])
    assert Losses.of(terms, [1.0, 1.0], [2.0, 4.0]).labelled() == {"lm loss": 0.5, "accuracy": 0.25}


def test_what_nothing_counts_for_has_no_mean():
    losses = Losses.of(TERMS, [0.0, 6.0, 1.0], [0.0, 3.0, 1.0])
    assert (losses["lm"], losses["accuracy"], losses.total) == (None, 1.0, 0.5)
    # An accuracy alone is nothing to train on.
    assert Losses.of(TERMS, [0.0, 0.0, 1.0], [0.0, 0.0, 1.0]).total is None


def test_the_share_of_padding_is_that_of_the_term_of_this_name():
    terms = (LossTerm("lm"), LossTerm("padding", 0.0))
    assert Losses.of(terms, [1.0, 3.0], [1.0, 4.0]).padding == 0.75
    assert Losses.of(terms, [1.0, 0.0], [1.0, 0.0]).padding == 0.0
    assert Losses.of(TERMS, [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]).padding == 0.0
