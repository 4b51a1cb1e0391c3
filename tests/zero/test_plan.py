"""Which parameters share a bucket, drawn by hand."""

from __future__ import annotations

import torch

from megazero.mpu.param_spec import Cut, InitialValues, ParamSpec
from megazero.zero.plan import BucketKey, BucketMember, ParameterUse, plan_buckets
from tests.zero.policies import make_policy

F32 = torch.float32
SLICED, EXPERT = (Cut(0, "tp"),), (Cut(0, "ep"),)


def slot(name: str, numel: int = 4, *, unit: int = 0, **changes) -> BucketMember:
    own = {key: changes.pop(key) for key in ("dtype", "trainable", "group") if key in changes}
    use = {key: changes.pop(key) for key in ("chunk", "alone") if key in changes}
    spec = ParamSpec(name, (numel,), InitialValues("zeros"), **changes)
    return BucketMember(spec, (numel,), own.pop("dtype", F32), use=ParameterUse(unit=unit, **use), **own)


def plan(slots: list[BucketMember], replicas: int = 2, **policy) -> list[tuple[int, str]]:
    """(row, names of the members) of each bucket."""
    found = plan_buckets(slots, make_policy(**policy), lambda group: replicas)
    return [(key.row, "".join(slots[i].spec.name for i in members)) for key, members in found]


def test_from_the_last_parameter_on_up_to_the_size():
    slots = [slot("a"), slot("b"), slot("c"), slot("d", 100), slot("e")]
    assert plan(slots, bucket_size=8) == [(0, "e"), (0, "d"), (0, "bc"), (0, "a")]


def test_equal_kinds_are_adjacent():
    slots = [
        slot("a"),
        slot("b", weight_decay=False),
        slot("c", cuts=SLICED),
        slot("d", partial_grad=True),
        slot("e", group=1),
        slot("f"),
    ]
    assert plan(slots, bucket_size=100) == [(0, "cafdbe")]


def test_dtypes_experts_chunks_and_frozen_ones_do_not_mix():
    slots = [
        slot("a", chunk=0),
        slot("b", chunk=1),
        slot("c", chunk=1, cuts=EXPERT),
        slot("d", chunk=1, dtype=torch.bfloat16),
        slot("e", chunk=1, trainable=False),
        slot("f", chunk=1),
    ]
    assert plan(slots, bucket_size=100) == [(0, "e"), (0, "d"), (0, "c"), (0, "bf"), (0, "a")]


def test_a_tied_parameter_is_alone():
    slots = [slot("a"), slot("b", alone=True), slot("c")]
    assert plan(slots, bucket_size=100) == [(0, "b"), (0, "ac")]


def test_order_is_that_of_completion():
    # The expert's bucket opens first but takes a until it is complete.
    slots = [slot("a", cuts=EXPERT), slot("b"), slot("c"), slot("d", cuts=EXPERT)]
    assert plan(slots, bucket_size=100) == [(0, "bc"), (0, "ad")]


def test_rows_of_the_stages():
    slots = [slot("a", unit=0), slot("b", 2, unit=0), slot("c", unit=1), slot("d", 2, unit=1)]
    many = {"bucket_size": 100, "persistence_threshold": 3}
    for stage in (0, 1, 2):
        assert plan(slots, stage=stage, **many) == [(stage, "abcd")]
    # In stage 3 weights are gathered unit by unit, and what is small stays whole like in stage 2.
    assert plan(slots, stage=3, **many) == [(3, "c"), (2, "bd"), (3, "a")]


def test_frozen_parameters_are_sharded_in_stage_3_alone():
    slots = [slot("a", trainable=False), slot("b", 2, trainable=False)]
    for stage in (0, 1, 2):
        assert plan(slots, stage=stage, bucket_size=100, persistence_threshold=3) == [(0, "ab")]
    assert plan(slots, stage=3, bucket_size=100, persistence_threshold=3) == [(0, "b"), (3, "a")]


def test_one_replica_has_nothing_to_cut():
    assert plan([slot("a")], replicas=1, stage=3, persistence_threshold=0) == [(0, "a")]
    slots = [slot("a"), slot("b", cuts=EXPERT)]
    found = plan_buckets(slots, make_policy(stage=2), {"replica": 4, "expert_replica": 1}.__getitem__)
    assert [key for key, _ in found] == [
        BucketKey(0, F32, "expert_replica", True, 0),
        BucketKey(0, F32, "replica", True, 2),
    ]
