from __future__ import annotations

import dataclasses
import math

import pytest

from megazero.train.metrics import EvalMetrics
from tests.train.samples import evaluation, step


@pytest.mark.parametrize(("loss", "expected"), [(0.0, 1.0), (math.log(50.0), 50.0), (1e9, math.exp(20))])
def test_perplexity_is_the_exponential_capped_at_twenty(loss, expected):
    assert evaluation(lm_loss=loss).perplexity == pytest.approx(expected)


def test_perplexity_of_nan_is_nan():
    assert math.isnan(evaluation(lm_loss=math.nan).perplexity)


def test_metrics_are_values():
    assert step(iteration=3) == step(iteration=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        step().lm_loss = 1.0
    assert isinstance(evaluation(), EvalMetrics)
