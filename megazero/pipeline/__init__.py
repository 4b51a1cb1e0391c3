"""pipeline: schedules as values, passes that lower them, what they cost on paper, and how layers are split.

Start with `actions.py` (the values), `schedules.py` (how they are built), `lower.py` (what the executor gets)
and `simulate.py`. Everything is pure except `executor.py`, which runs one stage's list.
"""

from megazero.pipeline.actions import (
    Action,
    Exchange,
    Instruction,
    Message,
    Op,
    Program,
    Schedule,
    ScheduleError,
)
from megazero.pipeline.check import check
from megazero.pipeline.executor import Evaluator, Executor
from megazero.pipeline.lower import add_gathers, add_reductions, add_transfers, lower
from megazero.pipeline.partition import partition, partition_blocks
from megazero.pipeline.schedules import (
    KINDS,
    activation_bound,
    build_schedule,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    zb_h1,
    zb_v,
)
from megazero.pipeline.simulate import Costs, Span, Timeline, simulate

__all__ = [
    "KINDS",
    "Action",
    "Costs",
    "Evaluator",
    "Exchange",
    "Executor",
    "Instruction",
    "Message",
    "Op",
    "Program",
    "Schedule",
    "ScheduleError",
    "Span",
    "Timeline",
    "activation_bound",
    "add_gathers",
    "add_reductions",
    "add_transfers",
    "build_schedule",
    "check",
    "forward_only",
    "gpipe",
    "interleaved",
    "lower",
    "one_f_one_b",
    "partition",
    "partition_blocks",
    "simulate",
    "zb_h1",
    "zb_v",
]
