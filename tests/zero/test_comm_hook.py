"""How weights and sums cross a group of replicas."""

from __future__ import annotations

import torch

from megazero.mpu.grid import ProcessGrid
from megazero.mpu.param_spec import InitialValues, ParamSpec
from megazero.mpu.solo_group import SoloGroup
from megazero.mpu.traffic import TrafficLog, recording_context
from megazero.mpu.wrapping_group import WrappingGroup
from megazero.zero.comm_hooks.exact import ExactCommHook
from megazero.zero.comm_hooks.node import NodeCommHook
from megazero.zero.layout import BucketLayout
from megazero.zero.plan import BucketMember
from megazero.zero.table import STAGES
from tests.tables import over_table
from tests.zero.harness import in_threads

F32, BF16 = torch.float32, torch.bfloat16


def layout(stage: int, group) -> BucketLayout:
    member = BucketMember(ParamSpec("w", (3,), InitialValues("zeros")), (3,), F32)
    return BucketLayout(STAGES[stage], (member,), group.size, group.rank, ProcessGrid().place(0))


def exact(stage: int, group, dtype=F32, *, leave_sums: bool = False) -> ExactCommHook:
    return ExactCommHook(group, layout(stage, group), dtype, leave_sums=leave_sums)


@over_table("dtype", [F32, BF16])
@over_table("stage", range(len(STAGES)))
def test_sums_are_those_of_the_wire_s_type(stage, dtype):
    # In bf16 257 is 256, and 256 + 1 is 256.
    def work(context):
        sums = torch.tensor([[257.0, 2.0, 3.0, 0.0], [1.0, 20.0, 30.0, 0.0]][context.rank])
        comm_hook = exact(stage, context.replica, dtype)
        assert comm_hook.extra_bytes(sums) == (0 if dtype == F32 else 8)
        reduction = comm_hook.reduce(sums)
        reduction.work.wait()
        return reduction.result.tolist()

    total = [258.0 if dtype == F32 else 256.0, 22.0, 33.0, 0.0]
    assert in_threads(2, work) == ([total, total] if stage == 0 else [total[:2], total[2:]])


@over_table("stage", range(len(STAGES)))
def test_sums_of_the_wire_s_type_are_reduced_in_place(stage):
    def work(context):
        sums = torch.full((4,), context.rank + 1.0)
        reduction = exact(stage, context.replica).reduce(sums)
        reduction.work.wait()
        return reduction.result.untyped_storage().data_ptr() == sums.untyped_storage().data_ptr()

    assert in_threads(2, work) == [True, True]


def test_there_is_nothing_to_reduce_for_one_replica_or_a_rule_that_does_it():
    assert not exact(0, SoloGroup("replica", 0)).reduces
    group = recording_context(ProcessGrid(dp=2), 0, TrafficLog(), "cpu").replica
    assert exact(0, group).reduces
    assert not exact(0, group, leave_sums=True).reduces


def test_a_second_partition_serves_all_gathers_but_the_first():
    """Four replicas on two nodes. What a later gather brings is what the first did, until weights change."""

    def work(context):
        group, node = context.replica, context.node
        comm_hook = NodeCommHook(exact(3, group), node)
        found = []
        for shard in (1.0, 5.0, 9.0):
            mine, whole = torch.full((1,), shard + group.rank), torch.zeros(4)
            comm_hook.gather(whole, mine).wait()
            found.append(whole.tolist())
            if shard == 5.0:
                comm_hook.weights_changed()
        return found

    first, last = [1.0, 2.0, 3.0, 4.0], [9.0, 10.0, 11.0, 12.0]
    assert in_threads(4, work, node_size=2) == [[first, first, last]] * 4


def test_a_second_partition_reduces_as_the_other_wire_does():
    log = TrafficLog()
    context = recording_context(ProcessGrid(dp=4), 0, log, "cpu", node_size=2)
    comm_hook = NodeCommHook(exact(3, context.replica, BF16), context.node)
    assert comm_hook.reduces
    assert comm_hook.extra_bytes(torch.zeros(4)) == 8
    comm_hook.reduce(torch.zeros(4)).work.wait()
    assert list(log.calls) == [(context.replica.name, "reduce_scatter")]


class Asked(WrappingGroup):
    """Writes down what is asked for, and whether the caller goes on meanwhile."""

    def __init__(self, inner):
        super().__init__(inner)
        self.calls = []

    def _collective(self, call):
        self.calls.append((call.operation, call.async_op))
        return super()._collective(call)


@over_table("stage", range(len(STAGES)))
def test_nothing_waits_where_it_starts(stage):
    """Or nothing would overlap with the computation."""
    replica = Asked(recording_context(ProcessGrid(dp=4), 0, TrafficLog(), "cpu").replica)
    node = Asked(recording_context(ProcessGrid(dp=2), 0, TrafficLog(), "cpu").replica)
    comm_hook = NodeCommHook(exact(stage, replica), node)
    whole = torch.zeros(4)
    comm_hook.gather(whole, whole[:1]).wait()
    comm_hook.gather(whole, whole[:1]).wait()
    comm_hook.reduce(whole)
    reduction = "all_reduce" if stage == 0 else "reduce_scatter"
    assert replica.calls == [("all_gather", True), (reduction, True)]
    assert node.calls == [("all_gather", True)]
