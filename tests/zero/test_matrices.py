"""Whole matrices for rules that need them, whichever ranks hold parts of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import pytest
import torch

from megazero.errors import ConfigError
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.matrices import Matrices
from megazero.mpu.param_spec import Cut, InitialValues, ParamSpec
from megazero.mpu.thread_group import ThreadWorld
from megazero.mpu.traffic import TrafficLog, recording_context
from megazero.optim.elementwise import Adam
from megazero.optim.lamb import Lamb
from megazero.optim.muon import Muon
from megazero.zero.build import build_store
from megazero.zero.optimizer import Optimizer
from megazero.zero.unit import Unit
from tests.optim.sharded import sharded, trained, values
from tests.zero.policies import make_policy
from tests.zero.test_norms import parameter, store_of


def matrix(name: str, shape: tuple[int, ...], *cuts: Cut, **traits) -> ParamSpec:
    return ParamSpec(name, shape, InitialValues("zeros"), cuts, matrices=Matrices(**traits))


SPECS = (
    ParamSpec("words", (5, 3), InitialValues("zeros"), (Cut(0, "tp", padded_size=8),)),
    matrix("columns", (4, 6), Cut(0, "tp")),
    matrix("qkv", (2, 4, 2, 5), Cut(0, "tp"), parts=(2, 1, 1), dim=1),
    matrix("gated", (2, 6, 3), Cut(1, "tp"), stacked=1),
    ParamSpec("norm", (7,), InitialValues("zeros"), weight_decay=False),
    matrix("rows", (5, 4), Cut(1, "tp")),
    matrix("whole", (3, 5)),
    matrix("experts", (2, 2, 4, 3), Cut(0, "ep"), Cut(2, "etp"), stacked=2),
    matrix("experts' down", (2, 3, 4), Cut(0, "ep"), Cut(2, "etp"), stacked=1),
    ParamSpec("experts' bias", (2, 3), InitialValues("zeros"), (Cut(0, "ep"),)),
)


@cache
def alone(rule: Muon) -> dict[str, torch.Tensor]:
    return sharded(rule, ProcessGrid(), 0, SPECS)[0]


@pytest.mark.parametrize("rule", [Muon(), Muon(split_joined=False, rest=Lamb())], ids=["muon", "joined-lamb"])
@pytest.mark.parametrize(
    "grid", [{"dp": 2}, {"dp": 3}, {"tp": 2}, {"dp": 2, "tp": 2}, {"dp": 4, "ep": 2}], ids=str
)
def test_any_layout_moves_whole_matrices(rule, grid):
    for stage, bucket_size in ((0, 25), (1, 1000), (1, 1), (2, 25), (3, 25), (3, 1)):
        for found in sharded(rule, ProcessGrid(**grid), stage, SPECS, bucket_size):
            assert found.keys() == alone(rule).keys()
            for name, want in alone(rule).items():
                torch.testing.assert_close(found[name], want, rtol=1e-4, atol=1e-5, msg=f"{stage} {name}")


def test_one_process_moves_each_matrix_by_the_formula():
    """A matrix of experts, and the keys of a joined weight, by hand."""
    rule = Muon(nesterov=False)
    for name, where in (("experts", (1, 0)), ("qkv", (slice(None), 2)), ("rows", ())):
        spec = next(spec for spec in SPECS if spec.name == name)
        weight = values(spec, 0)[where]
        shape, momentum = weight.shape, torch.zeros_like(weight)
        for step in range(1, 6):
            momentum = 0.95 * momentum + 0.05 * values(spec, step)[where]
            update = rule.change(momentum.reshape(1, -1, shape[-1])).view(shape)
            weight = weight * (1 - 0.02 * 0.1) - 0.02 * update
        found = alone(rule)[f"{name}/weight"][where]
        torch.testing.assert_close(found, weight, rtol=1e-4, atol=1e-5)


def test_state_is_what_each_rule_needs():
    """Muon's parameters have one moment, 4 bytes instead of Adam's 8; so have the buckets."""
    kinds: dict[str, set[str]] = {}
    for key in alone(Muon()):
        name, kind = key.split("/")
        kinds.setdefault(name, set()).add(kind)
    for spec in SPECS:
        mine = {"momentum"} if spec.matrices else {"exp_avg", "exp_avg_sq"}
        assert kinds[spec.name] == {"weight", *mine}
    optimizer = trained(Muon(), 0, solo_context(), SPECS)
    assert optimizer.state_names == ("momentum", "exp_avg", "exp_avg_sq")
    for bucket in optimizer.store.buckets:
        assert {spec.matrices is not None for spec in bucket.layout.specs} == {bucket.key.matrices}


@dataclass(frozen=True)
class Counting(Muon):
    """Says which matrices it was given, by their numbers of rows."""

    seen: tuple[list[int], ...] = ()

    def change(self, matrices):
        self.seen[0].append(matrices.shape[-2])
        return super().change(matrices)


@pytest.mark.parametrize(("stage", "shares"), [(0, [[2, 3, 4, 5]] * 2), (1, [[2, 3, 4], [4, 5]])])
def test_a_rank_works_out_only_matrices_that_it_holds_parts_of(stage, shares):
    """14 rows of 2 in one bucket; each replica owns 7 rows, so that the matrix of 4 lies on both."""
    specs = [matrix(f"m{rows}", (rows, 2)) for rows in (2, 3, 4, 5)]
    world = ThreadWorld(2, 20.0)

    def work(rank):
        seen = []
        context = thread_context(world, ProcessGrid(dp=2), rank)
        trained(Counting(seen=(seen,)), stage, context, specs, bucket_size=1000)
        return sorted(set(seen))

    assert world.run(work) == shares


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_traffic_is_the_momentum_over_the_replicas_and_the_slices(stage):
    """Two replicas x two slices of 8 x 4 elements of fp32; stage 1 gathers weights after the update, too."""
    log = TrafficLog()
    context = recording_context(ProcessGrid(dp=2, tp=2), 0, log, "cpu")
    param = parameter("weight", [[1.0] * 4] * 4)
    param.spec = matrix("weight", (8, 4), Cut(0, "tp"))
    _, _, store = store_of([param], context, stage, needs=Muon().needs)
    optimizer = Optimizer(store, Muon(), context, 0.0)
    log.clear()
    optimizer.step(0.1, 0.0, norm=1.0)
    slices, whole = 16 * 4, 32 * 4
    over_replicas = {0: 0, 1: 2 * slices, 3: slices}[stage]
    assert log.payload[context.replica.name, "all_gather"] == over_replicas
    assert log.payload[context.tp.name, "all_gather"] == whole
    assert sum(log.payload.values()) == over_replicas + whole


def test_a_policy_that_mixes_matrices_with_others_is_refused():
    param = parameter("weight", [[1.0, 2.0]])
    param.spec = matrix("weight", (1, 2))
    units, policy = [Unit(0, torch.nn.Module(), (param,))], make_policy()
    store = build_store(units, policy, solo_context())
    with pytest.raises(ConfigError, match="`needs.matrices` of the ZeRO policy must be true for Muon"):
        Optimizer(store, Muon(), solo_context(), 0.0)
    Optimizer(store, Adam(), solo_context(), 0.0)


def test_bucket_sizes_do_not_show():
    sizes = [sharded(Muon(), ProcessGrid(), 0, SPECS, size)[0] for size in (1, 60, 10_000)]
    for one, other in pairwise(sizes):
        assert all(torch.equal(one[name], other[name]) for name in one)
