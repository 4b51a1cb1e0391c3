"""The kernels of SGD, Lion and Adagrad against their formulas in fp64."""

import pytest
import torch

from megazero.ops.adagrad.cuda import adagrad_cuda
from megazero.ops.lion.cuda import lion_cuda
from megazero.ops.sgd.cuda import sgd_cuda
from tests.kernels.harness import DTYPES
from tests.kernels.updates import SIZES, check_cuts, check_extremes, check_signals, check_step, pieces

SGD = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}
LION = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1}
ADAGRAD = {"lr": 0.01, "eps": 1e-8, "weight_decay": 0.1}


def each(own):
    """Master, gradient, moment and weights of one piece after the other."""
    return zip(
        own.params,
        own.grads,
        own.moments[0] if own.moments else [None] * len(own.params),
        own.weights or [None] * len(own.params),
        strict=True,
    )


def sgd(own, **others):
    for piece in each(own):
        sgd_cuda(*piece, **SGD, **others)


def lion(own, **others):
    for piece in each(own):
        lion_cuda(*piece, **LION, **others)


def adagrad(own, **others):
    for piece in each(own):
        adagrad_cuda(*piece, **ADAGRAD, **others)


def sgd_formula(own):
    for p, grad, u, _ in each(own):
        direction = grad.to(p.dtype) + 0.1 * p
        if u is not None:
            direction = u.mul_(0.9).add_(direction)
        p.sub_(0.01 * direction)


def lion_formula(own):
    for p, grad, m, _ in each(own):
        g = grad.to(p.dtype)
        sign = (0.9 * m + 0.1 * g).sign()
        p.mul_(1 - 0.01 * 0.1).sub_(0.01 * sign)
        m.lerp_(g, 0.05)


def adagrad_formula(own):
    for p, grad, total, _ in each(own):
        g = grad.to(p.dtype) + 0.1 * p
        total.addcmul_(g, g)
        p.sub_(0.01 * (g / (total.sqrt() + 1e-8)))


STEPS = pytest.mark.parametrize(
    ("step", "formula", "kinds"),
    [(sgd, sgd_formula, 0), (sgd, sgd_formula, 1), (lion, lion_formula, 1), (adagrad, adagrad_formula, 1)],
    ids=["sgd", "sgd with momentum", "lion", "adagrad"],
)


@STEPS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_size(step, formula, kinds, dtype):
    check_step(step, formula, pieces(SIZES[:-2], kinds, dtype, torch.bfloat16), units=6)


@STEPS
def test_more_than_a_chunk(step, formula, kinds):
    check_step(step, formula, pieces(SIZES[-2:], kinds, torch.bfloat16, None), units=6)


@STEPS
def test_extremes(step, formula, kinds):
    check_extremes(step, formula, kinds)


@STEPS
def test_cuts(step, formula, kinds):
    check_cuts(step, pieces((700,), kinds, torch.bfloat16, torch.bfloat16), (1, 2, 5, 64, 71, 699))


@STEPS
def test_signals(step, formula, kinds):
    check_signals(step, pieces((130, 5, 33), kinds, torch.float16, torch.float16))
