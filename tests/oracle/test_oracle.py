"""The product trains as the oracle does: an error that all layouts share is one that law 1 cannot see."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from megazero.config.fields import FIELDS
from tests.oracle import product
from tests.oracle.cases import (
    BERT_FACTORS,
    FACTORS,
    HALF_FACTORS,
    NOT_STATED,
    RANKS,
    SECTIONS,
    STEPS,
    TOGETHER,
    all_pairs,
    bert_flags_of,
    covering,
    flags_of,
    pairs_of,
)
from tests.oracle.model import initial_spread
from tests.oracle.text import DATASETS
from tests.oracle.trainer import train

CASES = [*covering(FACTORS, least=60), *TOGETHER]
HALF_CASES = covering(HALF_FACTORS)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The folder of the datasets."""
    folder = tmp_path_factory.mktemp("data")
    product.write_datasets(folder, DATASETS)
    return folder


def both(flags, case, data, out):
    """The training by the product and by the oracle: (records, tensors), oracle's run, initial weights."""
    initial = product.initial_weights(flags, data)
    datasets = [DATASETS[name] for name in flags["data-path"] if isinstance(name, str)]
    wanted = train(flags, datasets, initial, partial(product.kept, flags["seed"]), STEPS)
    return product.train(flags, data, out, RANKS[case["layout"]]), wanted, initial


def check_spread(flags, initial):
    """The initial weights have the spread that the flags say: five standard errors."""
    for name, weight in initial.items():
        spread, n = initial_spread(flags, name), weight.numel()
        if isinstance(spread, str):
            assert torch.equal(weight, torch.full_like(weight, float(spread == "ones"))), name
            continue
        assert weight.std().item() == pytest.approx(spread, rel=5 / math.sqrt(2 * n)), name
        assert abs(weight.mean().item()) < 5 * spread / math.sqrt(n), name


def name_of(case):
    """A few of its values; a failure shows all."""
    return "-".join(case[name] for name in ("layout", "positions", "activation", "batch", "optimizer"))


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


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name_of(case), marks=[pytest.mark.fast] * (number % 16 == 0))
        for number, case in enumerate(CASES)
    ],
)
def test_product_trains_as_the_oracle(case, data, tmp_path):
    flags = flags_of(FACTORS, case)
    (records, tensors), wanted, initial = both(flags, case, data, tmp_path)
    check_spread(flags, initial)
    # LAMB's steps are as long as the weights: initial weights that are off by 6e-8 change the norm by 2e-5.
    amplified = 5 if flags["optimizer"] == "lamb" else 1
    check_steps(records, wanted.steps, 1e-6, factor=10 * amplified)
    moved = {name: (weight - initial[name]).abs().max() for name, weight in wanted.weights.items()}
    assert max(moved.values()) > 1e-3, "a training that moves nothing shows nothing"
    for name, weight in wanted.weights.items():
        torch.testing.assert_close(tensors[name]["weight"].double(), weight, rtol=2e-5, atol=5e-6, msg=name)
        assert tensors[name].keys() == {"weight", *wanted.state[name]}
        for kind, moment in wanted.state[name].items():
            saved = tensors[name][kind].double()
            torch.testing.assert_close(saved, moment, rtol=1e-3, atol=1e-6 * amplified)


@pytest.mark.parametrize("case", HALF_CASES, ids=name_of)
def test_half_precision_scales_as_the_oracle(case, data, tmp_path):
    flags = flags_of(HALF_FACTORS, case)
    (records, tensors), wanted, _ = both(flags, case, data, tmp_path)
    tolerance = {"fp16": 3e-4, "bf16": 1.5e-3}[flags["params-dtype"]]
    check_steps(records, wanted.steps, tolerance)
    if "initial-loss-scale" in flags:
        assert {step["skipped"] for step in wanted.steps} == {False, True}
        assert len({step["loss_scale"] for step in wanted.steps}) > 1
    for name, weight in wanted.weights.items():
        assert (weight - tensors[name]["weight"]).abs().max() < 4 * tolerance, name


def test_every_setting_is_stated_or_has_a_reason_not_to_be():
    cases = [flags_of(FACTORS, case) for case in CASES] + [
        flags_of(HALF_FACTORS, case) for case in HALF_CASES
    ]
    cases += [bert_flags_of(case) for case in covering(BERT_FACTORS)]
    stated = {f"--{name}" for flags in cases for name in flags}
    missing = [spec.path for spec in FIELDS if spec.section in SECTIONS and spec.flag not in stated]
    assert sorted(missing) == sorted(NOT_STATED)


@pytest.mark.parametrize(
    ("factors", "cases"), [(FACTORS, CASES), (HALF_FACTORS, HALF_CASES)], ids=["fp32", "half"]
)
def test_every_pair_of_settings_meets(factors, cases):
    met = set().union(*map(pairs_of, cases))
    assert met == all_pairs(factors)
    assert factors is HALF_FACTORS or len(cases) >= 60
