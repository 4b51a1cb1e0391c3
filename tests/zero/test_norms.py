"""Norms of single parameters over the ranks that hold parts of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megazero.errors import ConfigError
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.param_spec import Cut, InitialValues, ParamSpec
from megazero.mpu.thread_group import ThreadWorld
from megazero.mpu.traffic import TrafficLog, recording_context
from megazero.optim.elementwise import Adam, Sgd
from megazero.optim.grad_norm import local_square_sum
from megazero.zero import norms as norms_module
from megazero.zero.build import build_store
from megazero.zero.norms import ParameterNorms
from megazero.zero.optimizer import Optimizer
from megazero.zero.parallel import DataParallel
from megazero.zero.table import STAGES
from megazero.zero.unit import Unit
from tests.optim.rules import Lars, SelfSumming
from tests.tables import over_table
from tests.zero.harness import in_threads
from tests.zero.policies import make_policy

SLICED = (Cut(0, "tp"),)
SUMMING = SelfSumming.needs


def parameter(name: str, values: list[float], **traits) -> nn.Parameter:
    param = nn.Parameter(torch.tensor(values))
    param.spec = ParamSpec(name, tuple(param.shape), InitialValues("zeros"), **traits)
    return param


def store_of(params, context, stage, **changes):
    units = [Unit(0, nn.Module(), (param,)) for param in params]
    policy = make_policy(stage, **{"persistence_threshold": 0, "bucket_size": 4, **changes})
    return units, policy, build_store(units, policy, context)


def norms_of(store, context) -> dict[str, list[float]]:
    """Norms of each parameter's weights and of twice them."""
    norms = ParameterNorms(store.buckets, context, 2)
    for bucket in store.buckets:
        for number, _, piece in bucket.layout.member_pieces(store.at_rest(bucket)["weight"]):
            norms.add(bucket, number, [piece, 2 * piece])
    norms.reduce()
    return {
        spec.name: norms.of(bucket, number).tolist()
        for bucket in store.buckets
        for number, spec in enumerate(bucket.layout.specs)
    }


@over_table("stage", range(len(STAGES)))
def test_each_element_counts_once(stage):
    """Two replicas x two slices; tensor-parallel rank r has r + 1 in what is sliced."""
    world = ThreadWorld(4, 20.0)

    def work(rank):
        context = thread_context(world, ProcessGrid(dp=2, tp=2), rank)
        params = [
            parameter("sliced", [context.tp.rank + 1.0] * 5, cuts=SLICED),
            parameter("replicated", [3.0, 4.0]),
            parameter("copy", [6.0, 8.0], tied_with="elsewhere", shared=True),
            parameter("empty", []),
        ]
        _, _, store = store_of(params, context, stage)
        return norms_of(store, context)

    wanted = {"sliced": [5.0, 10.0], "replicated": [5.0, 10.0], "copy": [10.0, 20.0], "empty": [0.0, 0.0]}
    assert world.run(work) == [wanted] * 4


def test_norms_that_were_measured_are_squared_together(monkeypatch):
    """Other tensors are measured one by one; a norm of fp32 counts as it is."""
    calls = []
    monkeypatch.setattr(
        norms_module, "local_square_sum", lambda each: calls.append(each) or local_square_sum(each)
    )
    params = [parameter(str(number), [3.0 * number, 4.0 * number]) for number in range(6)]
    _, _, store = store_of(params, solo_context(), 0)
    norms = ParameterNorms(store.buckets, solo_context(), 2)
    for bucket in store.buckets:
        for number, _, piece in bucket.layout.member_pieces(store.at_rest(bucket)["weight"]):
            whole = bucket.layout.specs[number].name == "5"
            norms.add(bucket, number, [piece, piece] if whole else [piece.double().norm(), piece.norm()])
    norms.reduce()
    found = {
        spec.name: norms.of(bucket, number).tolist()
        for bucket in store.buckets
        for number, spec in enumerate(bucket.layout.specs)
    }
    assert found == {str(number): [5.0 * number] * 2 for number in range(6)}
    assert len(calls) == 2


@over_table("stage", range(len(STAGES)))
def test_experts_are_measured_as_one_parameter(stage):
    """Two replicas x two ranks of experts x two slices; expert rank e has 3 (e + 1), slice t that plus t."""
    world = ThreadWorld(8, 20.0)

    def work(rank):
        context = thread_context(world, ProcessGrid(dp=4, ep=2, tp=2), rank)
        value, slice_ = 3.0 * (context.groups["ep"].rank + 1), context.tp.rank
        params = [
            parameter("dense", [1.0] * 4),
            parameter("bias", [value] * 4, cuts=(Cut(0, "ep"),)),
            parameter("weight", [[value + slice_] * 3], cuts=(Cut(0, "ep"), Cut(1, "etp"))),
        ]
        _, _, store = store_of(params, context, stage)
        return norms_of(store, context)

    weight = (3 * (9 + 16 + 36 + 49)) ** 0.5
    wanted = {
        "dense": pytest.approx([2.0, 4.0]),
        "bias": pytest.approx([180**0.5, 2 * 180**0.5]),
        "weight": pytest.approx([weight, 2 * weight]),
    }
    assert world.run(work) == [wanted] * 8


def test_tied_copies_have_one_norm_bit_for_bit():
    """Each stage sums its copy by itself, so that the sums may round apart; then the copies would, too."""
    world = ThreadWorld(3, 20.0)

    def work(rank):
        context = thread_context(world, ProcessGrid(pp=3), rank)
        tied = {"shared": True, **({"tied_with": "words"} if rank == 2 else {})}
        params = [parameter("own", [2.0])]
        if rank != 1:
            params.append(parameter("words", [3.0 + rank * 2.0**-20, 4.0], **tied))
        _, _, store = store_of(params, context, 1)
        return norms_of(store, context)

    first, middle, last = world.run(work)
    assert first["words"] == last["words"]
    assert first["words"][0] == pytest.approx(((9 + (3 + 2.0**-19) ** 2) / 2 + 16) ** 0.5, rel=1e-15)
    assert middle == {"own": [2.0, 4.0]}


@over_table("count", [2, 30])
@over_table("rule", [Lars(), Adam()], ids=["asks", "does not ask"])
def test_all_parameters_take_one_call_over_each_group(rule, count):
    log = TrafficLog()
    context = recording_context(ProcessGrid(dp=2, tp=2), 0, log, "cpu")
    params = [parameter(str(i), [1.0] * 4, cuts=SLICED) for i in range(count)]
    _, _, store = store_of(params, context, 1)
    optimizer = Optimizer(store, rule, context, 0.0)
    for bucket in store.buckets:
        store.sums(bucket).fill_(1.0)
    assert optimizer.step(0.1, 0.0).applied
    calls = {name: n for (name, operation), n in log.calls.items() if operation == "all_reduce"}
    asked = {context.replica.name: 1, context.tp.name: 1} if rule == Lars() else {}
    assert calls == {context.world.name: 1, **asked}


def train(rule, context, stage: int = 0, **changes):
    """Norms and the weights after two steps, in which replica r has gradients (r + 1)."""
    param = parameter("w", [1.0, 2.0, 3.0])
    units, policy, store = store_of([param], context, stage, **changes)
    parallel, optimizer = DataParallel(units, store, policy, context), Optimizer(store, rule, context, 0.0)
    norms = []
    for _ in range(2):
        parallel.start()
        parallel.begin_backward(0, reduce=True)
        param.grad = torch.full((3,), context.rank + 1.0)
        parallel.collect(param)
        parallel.end_backward()
        parallel.finish()
        norms.append(optimizer.step(0.5, 0.1, 0.25).grad_norm)
    return norms, param.tolist()


def test_a_rule_that_sums_gradients_itself_finds_them_unsummed():
    own = in_threads(2, lambda context: train(SelfSumming(0.9), context, needs=SUMMING))
    comm_hook = in_threads(2, lambda context: train(Sgd(0.9), context))
    assert [weights for _, weights in own] == [weights for _, weights in comm_hook]
    # The whole is (1 + 2) / 4 in each of three elements; the replicas' estimates are twice 1/4 and twice 2/4.
    assert comm_hook[0][0] == pytest.approx([math_norm([0.75] * 3)] * 2)
    estimate = (0.5 * (math_norm([0.5] * 3) ** 2 + math_norm([1.0] * 3) ** 2)) ** 0.5
    assert own[0][0] == pytest.approx([estimate] * 2)


def math_norm(values: list[float]) -> float:
    return sum(value * value for value in values) ** 0.5


def test_the_wire_carries_nothing_for_such_a_rule():
    log = TrafficLog()
    context = recording_context(ProcessGrid(dp=2), 0, log, "cpu")
    train(Sgd(), context, needs=SUMMING)
    calls = {name: n for (name, operation), n in log.calls.items()}
    assert sum(calls.values()) == 2, "the norm of each step"


@over_table(
    ("changes", "message"),
    [
        ({}, "`needs.reduces` of the ZeRO policy must be true for SelfSumming"),
        ({"stage": 1, "needs": SUMMING}, "`stage` must be 0 for SelfSumming"),
        (
            {"needs": SUMMING, "accumulation_dtype": torch.bfloat16},
            "`accumulation_dtype` must be fp32 for SelfSumming.* but is torch.bfloat16",
        ),
    ],
)
def test_such_a_rule_is_refused_where_it_cannot_work(changes, message):
    context = recording_context(ProcessGrid(dp=2), 0, TrafficLog(), "cpu")
    settings = {"stage": 0, **changes}
    _, _, store = store_of([parameter("w", [1.0] * 4)], context, **settings)
    with pytest.raises(ConfigError, match=message):
        Optimizer(store, SelfSumming(), context, 0.0)


def test_one_process_has_nothing_to_sum():
    norms, weights = train(SelfSumming(0.0), solo_context())
    assert norms == pytest.approx([math_norm([0.25] * 3)] * 2)
    assert (norms, weights) == train(Sgd(0.0), solo_context())
