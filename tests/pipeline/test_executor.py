"""The executor runs any program: one stage, many chunks, evaluation, shapes that follow the step."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from megazero.loss import LossTerm
from megazero.mpu.solo_group import SoloGroup
from megazero.mpu.thread_group import ThreadWorld
from megazero.mpu.wrapping_group import WrappingGroup
from megazero.pipeline.actions import Exchange, Program
from megazero.pipeline.chunk import Boundary, ChunkResult
from megazero.pipeline.executor import Executor
from megazero.pipeline.lower import lower
from megazero.pipeline.schedules import build_schedule, forward_only
from tests.pipeline.samples import action
from tests.tables import over_table


class Piece(nn.Module):
    """A linear layer. Its weight gradient can be deferred.

    The last chunk's output gives the sum of squares, every other chunk's the sum of fourth powers; the first
    chunk also reports something that must not be differentiated.
    """

    terms = (LossTerm("squares"), LossTerm("fourths", 0.25), LossTerm("reported", 0.0))

    def __init__(self, number: int, last: int):
        super().__init__()
        self.number, self.last = number, last
        self.weight = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(number)) / 2)

    def input_boundary(self, batch: Tensor) -> Boundary:
        return Boundary(tuple(batch.shape), torch.float32)

    output_boundary = input_boundary

    def run(self, batch, hidden, *, deferred):
        out = self.product(batch, hidden, deferred)
        sums = {"squares": (out**2).sum()} if self.number == self.last else {"fourths": (out**4).sum()}
        if self.number == 0:
            sums["reported"] = Forbidden.apply(out)
        return ChunkResult(None if self.number == self.last else out, sums)

    def product(self, batch, hidden, deferred):
        x = batch if hidden is None else hidden
        if deferred is None:
            return x @ self.weight
        out = x @ self.weight.detach() if x.requires_grad else (x @ self.weight.detach()).requires_grad_()
        out.register_hook(lambda grad: deferred.append(lambda: self._gradient(x, grad)))
        return out

    def _gradient(self, x: Tensor, grad: Tensor) -> nn.Parameter:
        self.weight.grad = x.detach().t() @ grad
        return self.weight


class Forbidden(torch.autograd.Function):
    """How many rows there are; its backward must not run."""

    @staticmethod
    def forward(ctx, x):
        return torch.tensor(float(len(x)))

    @staticmethod
    def backward(ctx, grad):
        raise AssertionError("a term of coefficient 0 was differentiated")


class Sums:
    """Sums gradients as ZeRO stage 0 of one replica does, and writes down what it is told."""

    def __init__(self, pieces: dict[int, Piece]):
        self.pieces, self.told = pieces, []
        self.grads = {number: torch.zeros(4, 4) for number in pieces}
        for piece in pieces.values():
            piece.weight.register_post_accumulate_grad_hook(self.collect)

    def start(self, step):
        self.told.append("start")

    def gather(self, chunk, *, backward):
        self.told.append(f"gather {chunk} {'backward' if backward else 'forward'}")

    def release(self, chunk):
        self.told.append(f"release {chunk}")

    def begin_backward(self, chunk, *, reduce, ends):
        self.told.append(f"{'backward' if ends else 'input'} {chunk}{' reduce' if reduce else ''}")

    def collect(self, param):
        number = next(n for n, piece in self.pieces.items() if piece.weight is param)
        self.grads[number] += param.grad
        param.grad = None

    def end_backward(self):
        pass

    def reduce(self, chunk):
        self.told.append(f"reduce {chunk}")

    def finish(self):
        self.told.append("finish")


# Micro-batches of other sizes: nothing may assume one shape.
BATCHES = [torch.randn(n, 4, generator=torch.Generator().manual_seed(n)) for n in (1, 3, 2, 5)]
FACTORS = torch.tensor([0.5, 0.01, 3.0])
KINDS = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)]


def serial(chunks: int) -> tuple[Tensor, list[Tensor]]:
    pieces = [Piece(n, chunks - 1) for n in range(chunks)]
    totals = torch.zeros(3, dtype=torch.float64)
    for batch in BATCHES:
        x, fourths = batch, torch.zeros(())
        for piece in pieces:
            x = x @ piece.weight
            fourths = fourths + (x**4).sum() * (piece.number < piece.last)
        squares = (x**2).sum()
        (0.5 * squares + 0.01 * fourths).backward()
        totals += torch.tensor([squares.item(), fourths.item(), len(batch)])
    return totals, [piece.weight.grad for piece in pieces]


@over_table("stages", [1, 2, 4])
@over_table(("kind", "per_stage"), KINDS)
def test_every_schedule_gives_the_serial_sums_of_terms_from_every_stage(kind, per_stage, stages):
    program = lower(
        build_schedule(kind, stages, len(BATCHES), per_stage), gather=False, reduce_every_microbatch=False
    )
    stage_of, world = program.schedule.stage_of, ThreadWorld(stages)

    def work(rank: int):
        pieces = {n: Piece(n, len(stage_of) - 1) for n, stage in enumerate(stage_of) if stage == rank}
        sums = Sums(pieces)
        group = world.group("pp", rank, tuple(range(stages))) if stages > 1 else SoloGroup("pp", 0)
        executor = Executor(pieces, group, sums, torch.device("cpu"))
        return executor.train(program, BATCHES, FACTORS).terms, sums.grads

    total, grads = serial(len(stage_of))
    results = world.run(work)
    torch.testing.assert_close(sum(totals for totals, _ in results), total)
    found = {n: grad for _, each in results for n, grad in each.items()}
    for n, want in enumerate(grads):
        torch.testing.assert_close(found[n], want)


def test_evaluation_sums_losses_and_leaves_no_gradient():
    world = ThreadWorld(2)
    program = lower(forward_only(2, len(BATCHES)), gather=True, reduce_every_microbatch=False)

    def work(rank: int):
        pieces = {rank: Piece(rank, 1)}
        sums = Sums(pieces)
        group = world.group("pp", rank, (0, 1))
        found = Executor(pieces, group, sums, torch.device("cpu")).evaluate(program, BATCHES)
        return found.terms, sums.told, pieces[rank].weight.grad

    results = world.run(work)
    torch.testing.assert_close(results[0][0] + results[1][0], serial(2)[0])
    assert [told for _, told, _ in results] == [
        ["gather 0 forward", "release 0"],
        ["gather 1 forward", "release 1"],
    ]
    assert [grad for *_, grad in results] == [None, None]


def test_what_zero_is_told():
    pieces = {0: Piece(0, 0)}
    sums = Sums(pieces)
    program = lower(build_schedule("1f1b", 1, 2), gather=True, reduce_every_microbatch=False)
    Executor(pieces, SoloGroup("pp", 0), sums, torch.device("cpu")).train(program, BATCHES[:2], FACTORS)
    # One chunk is kept from its first use to its last.
    assert sums.told == [
        "start",
        "gather 0 forward",
        "backward 0",
        "backward 0 reduce",
        "release 0",
        "finish",
    ]


def told(program: Program) -> list[str]:
    """What the backwards of a program of one stage and two micro-batches tell ZeRO."""
    chunks = program.schedule.chunks
    pieces = {chunk: Piece(chunk, chunks - 1) for chunk in range(chunks)}
    sums = Sums(pieces)
    Executor(pieces, SoloGroup("pp", 0), sums, torch.device("cpu")).train(program, BATCHES[:2], FACTORS)
    return [each for each in sums.told if each not in ("start", "finish")]


def test_each_micro_batch_is_reduced_by_the_backward_that_ends_it():
    program = lower(build_schedule("zb-h1", 1, 2), gather=False, reduce_every_microbatch=True)
    assert told(program) == ["input 0", "backward 0 reduce", "input 0", "backward 0 reduce"]


def test_without_overlap_the_reduction_is_told_of_after_the_backward():
    program = lower(
        build_schedule("1f1b", 1, 2), gather=False, reduce_every_microbatch=True, overlap_reduce=False
    )
    assert told(program) == ["backward 0", "reduce 0", "backward 0", "reduce 0"]


@over_table(
    ("instructions", "expected"),
    [
        ("F0.0 S0.0 B0.0 F0.1 B0.1 S0.1", ["backward 0 reduce", "backward 0", "reduce 0"]),
        ("S0.1 F0.0 B0.0 F0.1 B0.1", ["backward 0", "backward 0 reduce"]),
        ("F0.0 F0.1 B0.0 S0.0 B0.1", ["backward 0", "reduce 0", "backward 0"]),
        ("F0.0 F0.1 B0.0 B0.1 S0.0", ["backward 0", "backward 0", "reduce 0"]),
        ("F0.0 I0.0 S0.0 F0.1 I0.1 W0.0 W0.1", ["input 0", "input 0", "backward 0 reduce", "backward 0"]),
        (
            "F0.0 F0.1 I0.0 I0.1 W0.0 S0.0 S0.1 W0.1",
            ["input 0", "input 0", "backward 0", "reduce 0", "backward 0 reduce"],
        ),
    ],
)
def test_a_reduction_happens_where_a_program_made_by_hand_has_it(instructions, expected):
    kind = "zb-h1" if "I0.0" in instructions else "1f1b"
    schedule = build_schedule(kind, 1, 2)
    assert told(Program(schedule, (tuple(map(action, instructions.split())),))) == expected


def test_a_reduction_that_no_backward_makes_is_a_bug():
    instructions = tuple(map(action, ("F0.0", "S0.7", "B0.0")))
    program = Program(build_schedule("1f1b", 1, 1), (instructions,))
    pieces = {0: Piece(0, 0)}
    executor = Executor(pieces, SoloGroup("pp", 0), Sums(pieces), torch.device("cpu"))
    with pytest.raises(AssertionError, match=r"left \[\(0, 7\)\] undone"):
        executor.train(program, BATCHES[:1], FACTORS)


def test_the_observer_is_not_told_of_waiting():
    world, seen = ThreadWorld(2), {0: [], 1: []}
    program = lower(build_schedule("1f1b", 2, 2), gather=False, reduce_every_microbatch=False)

    class Slow(Piece):
        def run(self, batch, hidden, *, deferred):
            time.sleep(0.05)
            return super().run(batch, hidden, deferred=deferred)

    def work(rank: int):
        pieces = {rank: Slow(0, 1) if rank == 0 else Piece(1, 1)}
        observer = lambda action, seconds: seen[rank].append((str(action), seconds))  # noqa: E731
        group = world.group("pp", rank, (0, 1))
        executor = Executor(pieces, group, Sums(pieces), torch.device("cpu"), observer)
        executor.train(program, BATCHES[:2], FACTORS)

    world.run(work)
    forward = {name: seconds for name, seconds in seen[0] + seen[1] if name.startswith("F")}
    assert min(forward["F0.0"], forward["F0.1"]) >= 0.05
    assert max(forward["F1.0"], forward["F1.1"]) < 0.04


class Counting(WrappingGroup):
    """Counts the sends that nobody has waited for yet, and notes how many there were at each exchange."""

    def __init__(self, inner):
        super().__init__(inner)
        self.flying, self.seen = set(), []

    def exchange(self, transfers):
        self.seen.append(len(self.flying))
        works = [Counted(work, self.flying) for work in self.inner.exchange(transfers)]
        self.flying |= {work for work, each in zip(works, transfers, strict=True) if each.kind == "send"}
        return works


class Counted:
    def __init__(self, inner, flying):
        self.inner, self.flying = inner, flying

    def wait(self):
        self.flying.discard(self)
        return self.inner.wait()


def test_sends_are_waited_for_one_exchange_later_and_none_is_left_at_the_end():
    """A tensor whose send is under way must not be freed: on a GPU its memory would be used again."""
    world = ThreadWorld(2)
    program = lower(build_schedule("gpipe", 2, 4), gather=False, reduce_every_microbatch=False)

    def work(rank: int):
        pieces = {rank: Piece(rank, 1)}
        group = Counting(world.group("pp", rank, (0, 1)))
        executor = Executor(pieces, group, Sums(pieces), torch.device("cpu"))
        executor.train(program, BATCHES, FACTORS)
        return group.seen, len(group.flying)

    (first, left_first), (second, left_second) = world.run(work)
    assert (left_first, left_second) == (0, 0)
    assert first == [0, 1, 1, 1, 1, 1, 1, 1]  # four sends forward, then four receives
    assert second == [0, 0, 0, 0, 0, 1, 1, 1]


def test_a_program_for_another_number_of_micro_batches_is_a_bug():
    program = lower(build_schedule("1f1b", 1, 3), gather=False, reduce_every_microbatch=False)
    executor = Executor({0: Piece(0, 0)}, SoloGroup("pp", 0), Sums({}), torch.device("cpu"))
    with pytest.raises(AssertionError, match="a program for 3 micro-batches was given 2"):
        executor.train(program, BATCHES[:2], FACTORS)


def test_a_program_that_leaves_a_message_lying_is_a_bug():
    program = lower(build_schedule("1f1b", 2, 1), gather=False, reduce_every_microbatch=False)
    lonely = tuple(i for i in program.stages[0] if not isinstance(i, Exchange))
    program = Program(replace(program.schedule), (lonely[:1], program.stages[1]))
    pieces = {0: Piece(0, 1)}
    executor = Executor(pieces, SoloGroup("pp", 0), Sums(pieces), torch.device("cpu"))
    with pytest.raises(AssertionError, match="undone"):
        executor.train(program, BATCHES[:1], FACTORS)
