"""Pipeline schedules as pure functions of their sizes. Each returns a `Schedule`; nothing runs here.

They accept any number of stages (one included) and micro-batches unless their docstring says otherwise.
Micro-batches are in ascending order, forward and backward, so every schedule sums a chunk's gradients in the
same order.
"""

from __future__ import annotations

from collections import deque
from typing import TypeVar

from megazero.config.derive import fills_groups
from megazero.errors import ConfigError
from megazero.pipeline.actions import Action, Op, Schedule

KINDS = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "forward")
T = TypeVar("T")


def loop_placement(stages: int, chunks_per_stage: int) -> tuple[int, ...]:
    """Chunk -> stage, round-robin: the placement of Narayanan et al. 2021."""
    return tuple(range(stages)) * chunks_per_stage


def v_placement(stages: int) -> tuple[int, ...]:
    """Chunk -> stage, down and up again: stage 0 holds the first and the last chunk."""
    return (*range(stages), *reversed(range(stages)))


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019, "GPipe"); all activations are alive at once."""
    actions = [
        [Action(op, stage, m) for op in (Op.FORWARD, Op.BACKWARD) for m in range(microbatches)]
        for stage in range(stages)
    ]
    return _schedule("gpipe", microbatches, loop_placement(stages, 1), actions)


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """One forward, one backward (PipeDream-Flush: Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel
    DNN Training"). Its bubble is that of `gpipe`, but stage s keeps at most `stages - s` micro-batches alive.
    """
    actions = []
    for stage in range(stages):
        forwards = [Action(Op.FORWARD, stage, m) for m in range(microbatches)]
        backwards = [Action(Op.BACKWARD, stage, m) for m in range(microbatches)]
        actions.append(_alternate(forwards, backwards, warmup=stages - stage - 1))
    return _schedule("1f1b", microbatches, loop_placement(stages, 1), actions)


def interleaved(stages: int, microbatches: int, chunks_per_stage: int, group: int | None = None) -> Schedule:
    """1F1B over several chunks per stage, which divide the bubble by their number (Narayanan et al. 2021,
    "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"). One chunk gives 1F1B.

    Args:
        stages, microbatches, chunks_per_stage: the sizes.
        group: how many micro-batches pass through a chunk before the next chunk's turn; by default the number
            of stages. A larger group keeps more activations and hides more communication.

    Raises:
        ConfigError: the micro-batches do not fill groups of this size (see `fills_groups`).
    """
    size = group or stages
    if not fills_groups(stages, microbatches, size):
        needed = f"fill groups of {size}, none smaller than" if group else "be a multiple of"
        fitting = f"the groups {stages}"
        if size >= stages:
            fitting = f"them {size * max(1, round(microbatches / size))}"
        raise ConfigError(
            f"The micro-batches of a step must {needed} the pipeline stages ({stages}) for the interleaved "
            f"schedule, but are {microbatches}; make {fitting}, or choose 1f1b or zb-v"
        )
    actions = []
    for stage in range(stages):
        own = range(stage, stages * chunks_per_stage, stages)
        forwards = [Action(Op.FORWARD, c, m) for c, m in _in_groups(own, size, microbatches)]
        backwards = [Action(Op.BACKWARD, c, m) for c, m in _in_groups(own[::-1], size, microbatches)]
        warmup = interleaved_warmup(stages, chunks_per_stage, stage, size)
        actions.append(_alternate(forwards, backwards, warmup))
    return _schedule("interleaved", microbatches, loop_placement(stages, chunks_per_stage), actions)


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """1F1B whose weight gradients are delayed to fill the bubble: ZB-H1 of Qi et al. 2023, "Zero Bubble
    Pipeline Parallelism". Its bubble is (P-1)(F+I-W), a third of 1F1B's if F, I and W take equal time, and
    its peak memory is that of 1F1B's first stage.

    On stage s, input gradients are s micro-batches ahead of weight gradients, so that they reach stage 0
    sooner.
    """
    actions = []
    for stage in range(stages):
        forwards = [Action(Op.FORWARD, stage, m) for m in range(microbatches)]
        inputs = [Action(Op.INPUT, stage, m) for m in range(microbatches)]
        merged = []
        for action in _alternate(forwards, inputs, warmup=stages - stage - 1):
            merged.append(action)
            if action.op is Op.INPUT and action.microbatch >= stage:
                merged.append(Action(Op.WEIGHT, stage, action.microbatch - stage))
        delayed = range(max(0, microbatches - stage), microbatches)
        merged += [Action(Op.WEIGHT, stage, m) for m in delayed]
        actions.append(merged)
    return _schedule("zb-h1", microbatches, loop_placement(stages, 1), actions)


class _VStage:
    """One stage of `zb_v` under construction. Each method appends its next action, if one is due."""

    def __init__(self, stages: int, stage: int, microbatches: int):
        self.down, self.up = stage, 2 * stages - 1 - stage
        self.microbatches = microbatches
        self.actions: list[Action] = []
        self.forwards = dict.fromkeys((self.down, self.up), 0)
        self.inputs = dict.fromkeys((self.down, self.up), 0)
        self.weights_due: deque[Action] = deque()

    def forward(self, chunk: int) -> None:
        if self.forwards[chunk] < self.microbatches:
            self.actions.append(Action(Op.FORWARD, chunk, self.forwards[chunk]))
            self.forwards[chunk] += 1

    def input(self, chunk: int) -> None:
        if self.inputs[chunk] < self.forwards[chunk]:
            microbatch = self.inputs[chunk]
            self.actions.append(Action(Op.INPUT, chunk, microbatch))
            self.weights_due.append(Action(Op.WEIGHT, chunk, microbatch))
            self.inputs[chunk] += 1

    def weight(self) -> None:
        if self.weights_due:
            self.actions.append(self.weights_due.popleft())


def zb_v(stages: int, microbatches: int) -> Schedule:
    """Two chunks per stage placed in a V, split backward: ZB-V of Qi et al. 2023, "Zero Bubble Pipeline
    Parallelism". With at least 2P - 1 micro-batches, and F, I and W of equal time, no stage idles between its
    first and last action. At most 2P half-sized chunks are alive, the memory of 1F1B's first stage.

    `down` and `up` are a stage's chunks in the falling and the rising half of the V.
    """
    actions = []
    for number in range(stages):
        stage = _VStage(stages, number, microbatches)
        down, up = stage.down, stage.up
        # Warm up until the first micro-batch has run down the V and back up to this stage ...
        for _ in range(2 * (stages - number) - 1):
            stage.forward(down)
        # ... until its gradient has reached this stage's upper chunk ...
        for _ in range(number):
            stage.forward(up)
            stage.forward(down)
        # ... and its lower chunk. From here on memory is full: each forward waits for a weight gradient.
        for _ in range(stages - number):
            stage.forward(up)
            stage.input(up)
            stage.weight()
        while stage.forwards[up] < microbatches:
            for chunk in (down, up):
                stage.forward(chunk)
                stage.input(chunk)
                stage.weight()
        # Drain: input gradients first, so that they reach stage 0 soon; weight gradients fill the rest.
        while stage.inputs[up] < microbatches:
            stage.input(down)
            stage.input(up)
        while stage.inputs[down] < microbatches:
            stage.input(down)
            stage.weight()
        while stage.weights_due:
            stage.weight()
        actions.append(stage.actions)
    return _schedule("zb-v", microbatches, v_placement(stages), actions)


def forward_only(
    stages: int, microbatches: int, chunks_per_stage: int = 1, v_shape: bool = False
) -> Schedule:
    """Forwards only, for evaluation. Chunks are placed as in `interleaved`, or as in `zb_v` if `v_shape`.

    Raises:
        ConfigError: `v_shape` is given with a number of chunks per stage other than two.
    """
    orders: list[list[tuple[int, int]]] = []
    if not v_shape:
        orders = [
            _in_groups(range(stage, stages * chunks_per_stage, stages), stages, microbatches)
            for stage in range(stages)
        ]
        placement = loop_placement(stages, chunks_per_stage)
    else:
        _refuse_unless_two(chunks_per_stage)
        for stage in range(stages):
            down = [(stage, m) for m in range(microbatches)]
            up = [(2 * stages - 1 - stage, m) for m in range(microbatches)]
            orders.append(_alternate(down, up, warmup=2 * (stages - stage) - 2))
        placement = v_placement(stages)
    actions = [[Action(Op.FORWARD, chunk, m) for chunk, m in order] for order in orders]
    return _schedule("forward", microbatches, placement, actions)


def build_schedule(
    kind: str,
    stages: int,
    microbatches: int,
    chunks_per_stage: int | None = None,
    *,
    v_shape: bool = False,
    group: int | None = None,
) -> Schedule:
    """Build the schedule of this kind.

    Args:
        kind: one of `KINDS`.
        stages: number of pipeline stages.
        microbatches: number of micro-batches in a step on one data-parallel rank.
        chunks_per_stage: number of chunks on each stage; by default 2 for interleaved, zb-v and `v_shape`,
            otherwise 1.
        v_shape: whether to place the chunks of ``forward`` as zb-v does.
        group: how many micro-batches of ``interleaved`` pass through a chunk before the next one's turn.

    Raises:
        ConfigError: the kind is unknown, a size is below 1, or the kind does not work with these sizes.
    """
    if kind not in KINDS:
        raise ConfigError(
            f"The schedule must be one of {', '.join(KINDS)}, but is `{kind}`; choose one of them"
        )
    if chunks_per_stage is None:
        chunks_per_stage = 2 if v_shape or kind in ("interleaved", "zb-v") else 1
    sizes = {
        "pipeline stages": stages,
        "micro-batches of a step": microbatches,
        "chunks per stage": chunks_per_stage,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"The number of {name} must be at least 1, but is {size}; raise it")
    if kind == "interleaved":
        return interleaved(stages, microbatches, chunks_per_stage, group)
    if kind == "forward":
        return forward_only(stages, microbatches, chunks_per_stage, v_shape)
    if kind == "zb-v":
        _refuse_unless_two(chunks_per_stage)
        return zb_v(stages, microbatches)
    if chunks_per_stage != 1:
        raise ConfigError(
            f"The number of chunks per stage must be 1 for the schedule {kind}, but is {chunks_per_stage}; "
            "choose interleaved, or zb-v for two chunks"
        )
    return (gpipe if kind == "gpipe" else one_f_one_b if kind == "1f1b" else zb_h1)(stages, microbatches)


def interleaved_warmup(stages: int, chunks_per_stage: int, stage: int, group: int | None = None) -> int:
    """The number of forwards before the first forward-backward pair. With several chunks it includes twice
    the distance to the last stage, because gradients arrive while forwards of later chunks are still due.
    """
    if chunks_per_stage == 1:
        return stages - stage - 1
    return (chunks_per_stage - 1) * (group or stages) + 2 * (stages - stage - 1)


def _alternate(first: list[T], second: list[T], warmup: int) -> list[T]:
    """`warmup` items of `first`, then one of each in turn, then the rest of `second` (of the same length)."""
    ahead = min(warmup, len(first))
    pairs = zip(first[ahead:], second, strict=False)
    return [*first[:ahead], *(item for pair in pairs for item in pair), *second[len(first) - ahead :]]


def _in_groups(chunks: range, group: int, microbatches: int) -> list[tuple[int, int]]:
    """Order (chunk, micro-batch) pairs: each group of micro-batches passes through all chunks in turn."""
    return [
        (chunk, m)
        for start in range(0, microbatches, group)
        for chunk in chunks
        for m in range(start, min(start + group, microbatches))
    ]


def _refuse_unless_two(chunks_per_stage: int) -> None:
    if chunks_per_stage != 2:
        raise ConfigError(
            f"The number of chunks per stage must be 2 for a placement in a V (zb-v), but is "
            f"{chunks_per_stage}; leave it unset, or choose interleaved"
        )


def _schedule(
    kind: str, microbatches: int, stage_of: tuple[int, ...], actions: list[list[Action]]
) -> Schedule:
    stages = max(stage_of) + 1
    return Schedule(kind, stages, microbatches, stage_of, tuple(map(tuple, actions)))
