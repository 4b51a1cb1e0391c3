from __future__ import annotations

import math

import pytest

from megazero.loss import LossTerm
from megazero.train.observe.metrics import EvalMetrics
from megazero.train.step.losses import Losses
from tests.tables import over_table
from tests.train.samples import evaluation, only_lm, step


@over_table(("loss", "expected"), [(0.0, 1.0), (math.log(50.0), 50.0), (1e9, math.exp(20))])
def test_perplexity_is_the_exponential_capped_at_twenty(loss, expected):
    assert evaluation(lm_loss=loss).perplexity == pytest.approx(expected)


def test_perplexity_of_nan_is_nan():
    assert math.isnan(evaluation(lm_loss=math.nan).perplexity)


def test_metrics_are_values():
    assert step(iteration=3) == step(iteration=3)
    with pytest.raises(AssertionError, match="no metrics"):
        step(loses=None)
    assert isinstance(evaluation(), EvalMetrics)


def test_a_record_has_the_losses_by_name_where_the_single_loss_was():
    assert list(step().record()) == [
        *("iteration", "consumed_samples", "consumed_tokens", "lm_loss", "grad_norm", "learning_rate"),
        *("loss_scale", "skipped", "seconds", "tokens_per_second", "tflops", "matmul_share"),
        *("global_batch_size", "num_micro_batches", "params_norm", "num_zeros", "first_bad_parameter"),
        "phase_seconds",
    ]
    assert list(evaluation().record()) == [
        *("iteration", "split", "lm_loss", "consumed_samples", "consumed_tokens", "num_tokens", "seconds"),
        "perplexity",
    ]
    assert (step().record()["lm_loss"], evaluation().record()["lm_loss"]) == (4.0, 2.0)


def test_a_term_cannot_take_the_place_of_a_metric():
    clash = Losses((LossTerm("lm"), LossTerm("skipped", 0.0)), (1.0, 2.0))
    with pytest.raises(AssertionError, match="skipped"):
        step(losses=clash).record()


def test_nothing_counted_has_no_perplexity():
    assert evaluation(losses=only_lm(None)).perplexity is None
