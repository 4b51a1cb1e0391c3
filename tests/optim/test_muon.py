"""Muon by itself: torch's class, its singular values, and how parameters fall into matrices."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from megazero.config.tree.optimizer import OptimizerConfig
from megazero.mpu.matrices import Matrices
from megazero.optim.build import build_update_rule
from megazero.optim.elementwise import Adam, Lion
from megazero.optim.muon import NEWTON_SCHULZ, Muon, NewtonSchulz, newton_schulz
from megazero.optim.rescaled import Rescaled
from megazero.optim.rule import Pieces
from tests.tables import over_table

LR, STEPS = 0.02, 100
SIMPLE, QUINTIC = NEWTON_SCHULZ["simple"] * 5, NEWTON_SCHULZ["quintic"]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def train(rule: Muon, param: Tensor, grads: list[Tensor], decay: float = 0.1) -> Tensor:
    """Updates of one matrix in one process."""
    param, state = param.clone(), rule.init_state(param)
    for number, grad in enumerate(grads, start=1):
        pieces = Pieces([param], [grad], [state], [decay], number)
        (prepared,) = rule.prepare(pieces)
        rule.step(pieces, LR, [rule.change(prepared.clone()[None])[0]])
    return param


@over_table("shape", [(6, 10), (10, 6), (7, 7), (1, 5)])
@over_table("nesterov", [True, False])
@over_table("match", [None, "match_rms_adamw"])
def test_a_hundred_updates_equal_those_of_torch(shape, nesterov, match):
    """torch's products are in bf16, so that the two are equal within its rounding only."""
    twin = torch.nn.Parameter(drawn(*shape))
    optimizer = torch.optim.Muon([twin], lr=LR, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn=match)
    grads = [drawn(*shape, seed=number) for number in range(1, STEPS + 1)]
    for grad in grads:
        twin.grad = grad.clone()
        optimizer.step()
    start, scale = drawn(*shape), ("spectral", 0.2) if match else ("shape_scaling", 1.0)
    reach = (twin.detach() - start).norm()
    for dtype in ("fp32", "bf16"):
        rule = Muon(
            nesterov=nesterov, scale=scale[0], extra_scale=scale[1], orthogonalized=NewtonSchulz(dtype=dtype)
        )
        assert (train(rule, start, grads) - twin.detach()).norm() < 0.02 * reach


@over_table("shape", [(6, 10), (10, 6), (7, 7)])
@over_table("nesterov", [True, False])
def test_a_hundred_updates_equal_the_formula(shape, nesterov):
    param = drawn(*shape).double()
    grads = [drawn(*shape, seed=number) for number in range(1, STEPS + 1)]
    momentum, (a, b, c) = torch.zeros_like(param), NEWTON_SCHULZ["simple"][0]
    for grad in grads:
        momentum = 0.95 * momentum + 0.05 * grad
        x = 0.95 * momentum + 0.05 * grad if nesterov else momentum
        x = x / x.norm()
        for _ in range(5):
            x = a * x + b * x @ x.T @ x + c * x @ x.T @ x @ x.T @ x
        param = param * (1 - LR * 0.1) - LR * max(1.0, shape[0] / shape[1]) ** 0.5 * x
    found = train(Muon(nesterov=nesterov), drawn(*shape), grads)
    torch.testing.assert_close(found.double(), param, rtol=1e-4, atol=1e-5)


@over_table("coefficients", [SIMPLE, QUINTIC], ids=["simple", "quintic"])
@over_table("shape", [(16, 16), (8, 40), (40, 8)])
def test_singular_values_come_near_one_and_vectors_stay(coefficients, shape):
    matrix = drawn(3, *shape)
    found = newton_schulz(matrix, coefficients, torch.float32)
    before, after = torch.linalg.svd(matrix, full_matrices=False), torch.linalg.svdvals(found)
    assert after.max() < 1.25
    assert (after > 0.65).float().mean() > 0.9  # the smallest of a square matrix may take more steps
    inner = before.U.mT @ found @ before.Vh.mT  # diagonal if the vectors are the same
    assert (inner - torch.diag_embed(inner.diagonal(dim1=-2, dim2=-1))).abs().max() < 1e-3


def test_the_polynomial_in_fp64():
    matrix, (a, b, c) = drawn(4, 6).double(), NEWTON_SCHULZ["simple"][0]
    x = matrix / matrix.norm()
    for _ in range(2):
        x = a * x + b * x @ x.T @ x + c * x @ x.T @ x @ x.T @ x
    found = newton_schulz(matrix[None], [(a, b, c)] * 2, torch.float64)[0]
    torch.testing.assert_close(found, x)


def test_of_nothing_comes_nothing():
    assert not newton_schulz(torch.zeros(2, 3, 4), SIMPLE, torch.float32).any()


@over_table(
    ("scale", "shape", "factor"),
    [
        ("shape_scaling", (9, 4), 1.5),
        ("shape_scaling", (4, 9), 1.0),
        ("spectral", (9, 4), 3.0),
        ("spectral", (4, 9), 3.0),
        ("unit_rms_norm", (9, 4), 1.5),
        ("unit_rms_norm", (4, 9), 2 / 3),
    ],
)
def test_updates_are_scaled_by_shape(scale, shape, factor):
    matrix = drawn(1, *shape)
    plain = newton_schulz(matrix, SIMPLE, torch.float32)
    torch.testing.assert_close(Muon(scale=scale, extra_scale=2.0).change(matrix), 2 * factor * plain)


class TestMatrices:
    """Which rows and columns belong together; `change` is tried with a sum over each matrix."""

    @staticmethod
    def sums(matrices: Matrices, whole: Tensor, **options) -> Tensor:
        return matrices.change(whole, lambda m: m.sum((-2, -1), keepdim=True).expand_as(m), **options)

    def test_one_matrix_has_all_rows(self):
        whole = drawn(3, 2, 5)
        torch.testing.assert_close(self.sums(Matrices(), whole), whole.sum().expand(3, 2, 5))

    def test_stacked_matrices_are_apart(self):
        whole = drawn(3, 2, 4, 5)
        torch.testing.assert_close(
            self.sums(Matrices(stacked=2), whole), whole.sum((2, 3), keepdim=True).expand_as(whole)
        )

    def test_queries_keys_and_values_are_three_matrices_over_all_groups(self):
        whole, qkv = drawn(2, 5, 4, 6), Matrices(parts=(3, 1, 1), dim=1)
        found = self.sums(qkv, whole)
        for part in (slice(0, 3), slice(3, 4), slice(4, 5)):
            torch.testing.assert_close(found[:, part], whole[:, part].sum().expand_as(whole[:, part]))
        torch.testing.assert_close(self.sums(qkv, whole, split=False), whole.sum().expand_as(whole))


def test_rule_of_a_configuration():
    plain = Muon(0.9, False, NewtonSchulz(QUINTIC), "spectral", rest=Adam(0.9, 0.999, 1e-8))
    assert build_update_rule(OptimizerConfig(lr=1.0, optimizer="muon")) == plain
    told = {
        "muon_momentum": 0.95,
        "muon_nesterov": True,
        "muon_coefficient_type": "simple",
        "muon_num_ns_steps": 3,
        "muon_ns_dtype": "bf16",
        "muon_scale_mode": "unit_rms_norm",
        "muon_extra_scale_factor": 0.2,
        "muon_split_qkv": False,
        "muon_scalar_optimizer": "lion",
        "muon_scalar_lr": 0.01,
        "lion_beta1": 0.9,
    }
    found = build_update_rule(OptimizerConfig(lr=0.1, optimizer="muon", **told))
    rest = Rescaled(Lion(0.9, 0.98), 0.1)
    orthogonalized = NewtonSchulz(NEWTON_SCHULZ["simple"], 3, "bf16")
    wanted = Muon(0.95, True, orthogonalized, "unit_rms_norm", 0.2, False, rest)
    assert replace(found, rest=Rescaled(found.rest.rule, round(found.rest.factor, 12))) == wanted
    assert math.isclose(found.rest.factor, 0.1)


def test_the_rest_moves_at_its_own_rate():
    rule, param, alone = Rescaled(Adam(), 0.25), torch.ones(3), torch.ones(3)
    states = [rule.init_state(param)], [rule.init_state(alone)]
    rule.step(Pieces([param], [torch.ones(3)], states[0], [0.1], 1), 0.4)
    Adam().step(Pieces([alone], [torch.ones(3)], states[1], [0.1], 1), 0.1)
    assert torch.equal(param, alone)
    assert rule.state_names == ("exp_avg", "exp_avg_sq")
    assert rule.needs == Adam().needs
