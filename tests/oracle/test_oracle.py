"""The product trains as the oracle does: an error that all layouts share is one that law 1 cannot see."""

from __future__ import annotations

from functools import partial

import pytest

from megazero.config.fields import FIELDS
from tests.docs.pages import says
from tests.oracle import product
from tests.oracle.agreement import check_spread, check_steps, check_tensors
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
from tests.oracle.text import DATASETS
from tests.oracle.trainer import train

CASES = [*covering(FACTORS, least=60), *TOGETHER]
HALF_CASES = covering(HALF_FACTORS)


def both(flags, case, data, out):
    """The training by the product and by the oracle: (records, tensors), oracle's run, initial weights."""
    initial = product.initial_weights(flags, data)
    datasets = [DATASETS[name] for name in flags["data-path"] if isinstance(name, str)]
    wanted = train(flags, datasets, initial, partial(product.kept, flags["seed"]), STEPS)
    return product.train(flags, data, out, RANKS[case["layout"]]), wanted, initial


def name_of(case):
    """A few of its values; a failure shows all."""
    return "-".join(case[name] for name in ("layout", "positions", "activation", "batch", "optimizer"))


@pytest.mark.seconds(8)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name_of(case), marks=[pytest.mark.fast] * (number % 40 == 0))
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
    check_tensors(tensors, wanted, amplified)


@pytest.mark.seconds(5)
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
    assert factors is HALF_FACTORS or says("docs/features.md", f"trains {len(cases)} configurations of GPT")
