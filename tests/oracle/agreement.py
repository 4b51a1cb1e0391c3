"""Checks that the product trains as the oracle does."""

from __future__ import annotations

import math

import pytest
import torch

from tests.oracle.cases import STEPS
from tests.oracle.model import initial_spread


def check_spread(flags, initial):
    """The initial weights have the spread that the flags say: five standard errors."""
    for name, weight in initial.items():
        if ".activation.alpha_" in name:  # the slopes of xIELU: 0.8, to which 1/2 belongs below 0
            slope = torch.nn.functional.softplus(weight).item() + 0.5 * name.endswith("n")
            assert slope == pytest.approx(0.8, rel=1e-6), name
            continue
        spread, n = initial_spread(flags, name), weight.numel()
        if isinstance(spread, str):
            assert torch.equal(weight, torch.full_like(weight, float(spread == "ones"))), name
            continue
        assert weight.std().item() == pytest.approx(spread, rel=5 / math.sqrt(2 * n)), name
        assert abs(weight.mean().item()) < 5 * spread / math.sqrt(n), name


EXACT = ("skipped", "loss_scale", "consumed_samples")


def check_steps(records, steps, tolerance, factor=10):
    """Each step's metrics; those that are no measurement must be equal. The norm may be off by more."""
    assert len(records) == len(steps) == STEPS
    for number, (found, wanted) in enumerate(zip(records, steps, strict=True)):
        assert {k: found[k] for k in EXACT} == {k: wanted[k] for k in EXACT}, f"step {number}"
        assert found["learning_rate"] == pytest.approx(wanted["learning_rate"], rel=1e-12), f"step {number}"
        for name, most in (("lm_loss", tolerance), ("grad_norm", factor * tolerance)):
            if math.isfinite(wanted["grad_norm"]):
                expected = pytest.approx(wanted[name], rel=most)
                assert found[name] == expected, f"{name} of step {number}"


def check_tensors(tensors, wanted, amplified=1):
    """The final weights and moments; moments may be off by more where an optimizer makes more of rounding."""
    for name, weight in wanted.weights.items():
        torch.testing.assert_close(tensors[name]["weight"].double(), weight, rtol=2e-5, atol=5e-6, msg=name)
        assert tensors[name].keys() == {"weight", *wanted.state[name]}
        for kind, moment in wanted.state[name].items():
            saved = tensors[name][kind].double()
            torch.testing.assert_close(saved, moment, rtol=1e-3, atol=1e-6 * amplified)
