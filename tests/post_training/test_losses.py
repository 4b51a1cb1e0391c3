"""The losses of pairs are the formulas of their papers, written out in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megazero.config.preference.settings import PreferenceConfig
from megazero.models.batch import ALL_COLUMNS
from megazero.mpu.context import solo_context
from megazero.mpu.solo_group import SoloGroup
from megazero.post_training.losses import KINDS, PreferenceLoss
from megazero.post_training.preference import PairCollate
from tests.tables import over_table

CP = SoloGroup("cp", 0)
# Two pairs and one that does not count, of rows of 6 tokens.
ARRAYS = {
    "tokens": np.arange(36).reshape(3, 2, 6) % 11,
    "lengths": np.array([[5, 6], [3, 4], [1, 1]]),
    "answers": np.array([[2, 2], [2, 1], [1, 1]]),
    "margins": np.zeros(3, np.float32),
    "reference": np.array([[-2.0, -5.0], [-1.5, -3.0], [0, 0]], np.float32),
}


def collated(**changes: np.ndarray):
    collate = PairCollate(11, solo_context(), 2, False, ALL_COLUMNS)
    return collate({**ARRAYS, **changes}, (0, 1, 2))


def test_a_label_counts_if_it_is_a_token_of_the_answer():
    batch = collated()
    assert batch.tokens.shape == (6, 6)
    # Row 0: tokens 0 to 4, whose answer is 2, 3, 4; they are the labels of the columns 1, 2 and 3.
    assert batch.learnt.labels[0].tolist() == [1, 2, 3, 4, 5, 0]
    assert batch.learnt.weights.sum(1).tolist() == [3, 4, 1, 3, 0, 0]
    assert batch.learnt.weights[0].tolist() == [0, 1, 1, 1, 0, 0]
    assert batch.counts == {
        **{"lm": 11.0, "tokens": 20.0, "sequences": 6.0, "micro_batches": 1.0},
        **{"pairs": 2.0, "chosen_tokens": 4.0},
    }


def expected(settings: PreferenceConfig, logs: torch.Tensor) -> dict[str, torch.Tensor]:
    """The sums by the papers, pair by pair."""
    beta, smooth, gamma = (
        settings.preference_beta,
        settings.preference_label_smoothing,
        settings.simpo_gamma,
    )
    total = {"preference": 0.0, "sft": 0.0, "rewards_margins": 0.0, "rewards_accuracies": 0.0}
    for pair in range(2):
        sums, means, ratios, mean_ratios = [], [], [], []
        for side in range(2):
            begin, end = int(ARRAYS["answers"][pair, side]), int(ARRAYS["lengths"][pair, side])
            answer = logs[begin - 1 : end - 1, 2 * pair + side]
            sums.append(answer.sum())
            means.append(answer.mean())
            ratios.append(answer.sum() - float(ARRAYS["reference"][pair, side]))
            mean_ratios.append(ratios[-1] / (end - begin))
        delta, mean_delta = ratios[0] - ratios[1], mean_ratios[0] - mean_ratios[1]

        def log_odds(mean):
            return (mean.exp() / (1 - mean.exp())).log()

        def log_sigmoid(value):
            return -(1 + (-value).exp()).log()

        loss = {
            "sigmoid": lambda d=delta: -log_sigmoid(beta * d),
            "robust": lambda d=delta: (
                (-(1 - smooth) * log_sigmoid(beta * d) + smooth * log_sigmoid(-beta * d)) / (1 - 2 * smooth)
            ),
            "ipo": lambda d=mean_delta: (d - 1 / (2 * beta)) ** 2,
            "hinge": lambda d=delta: (1 - beta * d).clamp(min=0),
            "sigmoid_norm": lambda d=mean_delta: -log_sigmoid(beta * d),
            "apo_zero": lambda r=ratios: 1 - (beta * r[0]).sigmoid() + (beta * r[1]).sigmoid(),
            "simpo": lambda m=means: -log_sigmoid(beta * (m[0] - m[1]) - gamma),
            "orpo": lambda m=means: -beta * log_sigmoid(log_odds(m[0]) - log_odds(m[1])),
        }[settings.preference_loss]()
        shown = means if settings.preference_loss in ("simpo", "orpo") else ratios
        total["preference"] += loss
        total["sft"] -= sums[0]
        total["rewards_margins"] += beta * (shown[0] - shown[1])
        total["rewards_accuracies"] += float(shown[0] > shown[1])
    return total


@pytest.mark.fast
@over_table("kind", list(KINDS))
def test_each_loss_and_its_gradient_are_the_formula_s(kind):
    given = {"preference_loss": kind, "preference_beta": 0.3}
    given |= {"preference_label_smoothing": 0.2} if kind == "robust" else {"preference_sft_coeff": 0.5}
    settings = PreferenceConfig(**given)
    objective, batch = PreferenceLoss(settings), collated()
    logs = -torch.rand(6, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 3 - 0.1
    results = []
    for of in (lambda values: objective(values, batch, CP), lambda values: expected(settings, values)):
        values = logs.clone().requires_grad_()
        sums = of(values)
        loss = sums["preference"] + objective.sft_weight * sums.get("sft", 0.0)
        results.append((sums, torch.autograd.grad(loss, values)[0]))
    (ours, gradient), (theirs, wanted) = results
    for name in ours.keys() & theirs.keys():
        assert float(ours[name]) == pytest.approx(float(theirs[name]), rel=1e-6), name
    torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-9)
    assert {"preference", "rewards_margins"} <= ours.keys()
    assert [term.name for term in objective.terms if term.trained] == (
        ["preference", "sft"] if objective.sft_weight else ["preference"]
    )
    assert {term.name for term in objective.terms} == ours.keys()


def test_robust_without_swapped_labels_is_sigmoid_and_equal_answers_have_its_loss():
    logs = -torch.rand(6, 6, generator=torch.Generator().manual_seed(3))
    sums = [
        PreferenceLoss(PreferenceConfig(preference_loss=kind))(logs, collated(), CP)["preference"]
        for kind in ("robust", "sigmoid")
    ]
    assert float(sums[0]) == float(sums[1])
    # Where policy and reference agree, every pair costs log 2.
    own = collated().learnt.weighted(logs).sum(0).numpy().reshape(3, 2)
    same = PreferenceLoss(PreferenceConfig())(logs, collated(reference=own), CP)
    assert float(same["preference"]) == pytest.approx(2 * math.log(2))
    assert float(same["rewards_margins"]) == 0.0


def test_answers_that_are_certain_have_finite_losses():
    for kind in KINDS:
        sums = PreferenceLoss(PreferenceConfig(preference_loss=kind))(
            torch.full((6, 6), -60.0).index_fill(1, torch.tensor([0, 2]), -1e-6), collated(), CP
        )
        assert all(bool(value.isfinite()) for value in sums.values()), kind
