"""LAMB by hand; what it shares with all rules is in `test_conformance.py`."""

from __future__ import annotations

import pytest
import torch

from megazero.config.tree.optimizer import OptimizerConfig
from megazero.optim.build import build_update_rule
from megazero.optim.lamb import Lamb
from megazero.optim.rule import Pieces
from tests.tables import over_table

TINY = 1e-30  # an epsilon that does not show


def move(rule, param, grad, *, lr=0.1, decay=0.0, exempt=False, steps=1):
    param, state = torch.tensor(param), rule.init_state(torch.tensor(param))
    for step in range(1, steps + 1):
        piece = Pieces([param], [torch.tensor(grad)], [state], [decay], step)
        (measured,) = rule.prepare(piece)
        rule.step(piece, lr, [torch.stack(list(measured))], [exempt])
    return param.tolist()


@over_table(
    ("options", "call", "wanted"),
    [
        # The first update is the gradient's sign, of length sqrt(2); the weights' is 5: 0.1 x 5 / sqrt(2).
        ({}, {}, [2.6464466, 4.3535534]),
        ({"max_coeff": 2.0}, {}, [2.8, 4.2]),
        ({"min_coeff": 5.0}, {}, [2.5, 4.5]),
        ({}, {"exempt": True}, [2.9, 4.1]),
        ({"adapt_all": True}, {"exempt": True}, [2.6464466, 4.3535534]),
        # Weight decay is a part of what is measured: the update is (1 + 3, -1 + 4), as long as the weights.
        ({}, {"decay": 1.0}, [2.6, 3.7]),
        # Uncorrected moments make an update of sqrt(10) times the length, which the ratio undoes ...
        ({"bias_correction": "none"}, {}, [2.6464466, 4.3535534]),
        # ... and a rate corrected by 1 / sqrt(10) is not made up for.
        ({"bias_correction": "rate"}, {}, [2.8881966, 4.1118034]),
        ({"bias_correction": "rate"}, {"exempt": True}, [2.9, 4.1]),
    ],
)
def test_first_update_by_hand(options, call, wanted):
    assert move(Lamb(eps=TINY, **options), [3.0, 4.0], [2.0, -2.0], **call) == pytest.approx(wanted, rel=1e-6)


def test_weights_of_zero_move_by_the_learning_rate():
    assert move(Lamb(eps=TINY), [0.0, 0.0], [2.0, -2.0]) == pytest.approx([-0.1, 0.1])


def test_a_schedule_that_starts_without_weight_decay_adapts_what_is_not_exempt():
    """apex takes a decay of 0 for an exemption, so such a run would start as plain Adam."""
    assert move(Lamb(eps=TINY), [3.0, 4.0], [2.0, -2.0], decay=0.0, exempt=False)[0] < 2.65


def test_norms_are_of_what_the_weights_were():
    """Each of ten updates is a tenth of the weights as they then were, since all have one direction."""
    param = move(Lamb(eps=TINY, max_coeff=100.0), [1.0], [5.0], steps=10)
    assert param == pytest.approx([0.9**10], rel=1e-5)


def test_the_rule_of_a_configuration():
    config = OptimizerConfig(lr=1.0, optimizer="lamb")
    assert build_update_rule(config) == Lamb(0.9, 0.999, 1e-8, 0.01, 10.0, "moments", False)
    settings = {"lamb_min_coeff": 0.1, "lamb_max_coeff": 0.3, "lamb_bias_correction": "none"}
    told = {**settings, "lamb_adapt_all": True, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_eps": 1e-6}
    config = OptimizerConfig(lr=1.0, optimizer="lamb", **told)
    assert build_update_rule(config) == Lamb(0.8, 0.9, 1e-6, 0.1, 0.3, "none", True)
