"""DeepSpeed's schedules describe what our executor runs."""

from __future__ import annotations

from megazero.deepspeed.pipe.schedule import BackwardPass, ForwardPass, InferenceSchedule, TrainSchedule
from megazero.pipeline.actions import Op
from megazero.pipeline.schedules import build_schedule
from tests.tables import over_table

OPS = {ForwardPass: Op.FORWARD, BackwardPass: Op.BACKWARD}


@over_table(("kind", "described"), [("1f1b", TrainSchedule), ("forward", InferenceSchedule)])
@over_table("stages", [1, 2, 3, 4])
@over_table("micro_batches", [1, 2, 5, 8])
def test_forwards_and_backwards_come_in_the_order_of_our_program(kind, described, stages, micro_batches):
    ours = build_schedule(kind, stages, micro_batches)
    for stage in range(stages):
        steps = described(micro_batches, stages, stage)
        work = [OPS[type(each)] for step in steps for each in step if type(each) in OPS]
        assert work == [action.op for action in ours.actions[stage]]


def test_buffers_are_as_many_as_micro_batches_in_flight():
    assert [TrainSchedule(8, 4, stage).num_pipe_buffers() for stage in range(4)] == [4, 3, 2, 2]
    assert [TrainSchedule(3, 4, stage).num_pipe_buffers() for stage in range(4)] == [3, 3, 2, 2]
