"""The executor runs any program: one stage, many chunks, evaluation, shapes that follow the step."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from megazero.mpu import SoloGroup, ThreadWorld
from megazero.pipeline import (
    Exchange,
    Executor,
    Program,
    build_schedule,
    forward_only,
    lower,
)


class Piece(nn.Module):
    """A linear layer; the last one's loss is the sum of squares. Its weight gradient can be deferred."""

    hidden_dtype = torch.float32

    def __init__(self, number: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(number)) / 2)

    def hidden_shape(self, batch: Tensor) -> tuple[int, ...]:
        return tuple(batch.shape)

    def hidden(self, batch, hidden, *, deferred=None):
        x = batch if hidden is None else hidden
        if deferred is None:
            return x @ self.weight
        out = x @ self.weight.detach() if x.requires_grad else (x @ self.weight.detach()).requires_grad_()
        out.register_hook(lambda grad: deferred.append(lambda: self._gradient(x, grad)))
        return out

    def _gradient(self, x: Tensor, grad: Tensor) -> nn.Parameter:
        self.weight.grad = x.detach().t() @ grad
        return self.weight

    def loss(self, batch, hidden, *, deferred=None):
        out = self.hidden(batch, hidden, deferred=deferred)
        return (out**2).sum(), torch.tensor(float(batch.shape[0]))


class Sums:
    """Sums gradients as ZeRO stage 0 of one replica does, and writes down what it is told."""

    def __init__(self, pieces: dict[int, Piece]):
        self.pieces, self.told = pieces, []
        self.grads = {number: torch.zeros(4, 4) for number in pieces}
        for piece in pieces.values():
            piece.weight.register_post_accumulate_grad_hook(self.collect)

    def start(self):
        self.told.append("start")

    def gather(self, chunk, *, backward):
        self.told.append(f"gather {chunk} {'backward' if backward else 'forward'}")

    def release(self, chunk):
        self.told.append(f"release {chunk}")

    def begin_backward(self, chunk, *, reduce):
        self.told.append(f"backward {chunk}{' reduce' if reduce else ''}")

    def collect(self, param):
        number = next(n for n, piece in self.pieces.items() if piece.weight is param)
        self.grads[number] += param.grad
        param.grad = None

    def end_backward(self):
        pass

    def finish(self):
        self.told.append("finish")


# Micro-batches of other sizes: nothing may assume one shape.
BATCHES = [torch.randn(n, 4, generator=torch.Generator().manual_seed(n)) for n in (1, 3, 2, 5)]
KINDS = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)]


def serial(chunks: int) -> tuple[Tensor, list[Tensor]]:
    pieces = [Piece(n) for n in range(chunks)]
    total = torch.zeros(2, dtype=torch.float64)
    for batch in BATCHES:
        x = batch
        for piece in pieces:
            x = x @ piece.weight
        loss = (x**2).sum()
        (0.5 * loss).backward()
        total += torch.tensor([loss.item(), len(batch)])
    return total, [piece.weight.grad for piece in pieces]


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize(("kind", "per_stage"), KINDS)
def test_every_schedule_gives_the_serial_sums(kind, per_stage, stages):
    program = lower(
        build_schedule(kind, stages, len(BATCHES), per_stage), gather=False, reduce_every_microbatch=False
    )
    stage_of, world = program.schedule.stage_of, ThreadWorld(stages)

    def work(rank: int):
        pieces = {n: Piece(n) for n, stage in enumerate(stage_of) if stage == rank}
        sums = Sums(pieces)
        group = world.group("pp", rank, tuple(range(stages))) if stages > 1 else SoloGroup("pp", 0)
        executor = Executor(pieces, group, sums, torch.device("cpu"))
        return executor.train(program, BATCHES, 0.5), sums.grads

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
        pieces = {rank: Piece(rank)}
        sums = Sums(pieces)
        group = world.group("pp", rank, (0, 1))
        totals = Executor(pieces, group, sums, torch.device("cpu")).evaluate(program, BATCHES)
        return totals, sums.told, pieces[rank].weight.grad

    results = world.run(work)
    torch.testing.assert_close(results[0][0] + results[1][0], serial(2)[0])
    assert [told for _, told, _ in results] == [
        ["gather 0 forward", "release 0"],
        ["gather 1 forward", "release 1"],
    ]
    assert [grad for *_, grad in results] == [None, None]


def test_what_zero_is_told():
    pieces = {0: Piece(0)}
    sums = Sums(pieces)
    program = lower(build_schedule("1f1b", 1, 2), gather=True, reduce_every_microbatch=False)
    Executor(pieces, SoloGroup("pp", 0), sums, torch.device("cpu")).train(program, BATCHES[:2], 1.0)
    # One chunk is kept from its first use to its last.
    assert sums.told == [
        "start",
        "gather 0 forward",
        "backward 0",
        "backward 0 reduce",
        "release 0",
        "finish",
    ]


def test_the_observer_is_not_told_of_waiting():
    world, seen = ThreadWorld(2), {0: [], 1: []}
    program = lower(build_schedule("1f1b", 2, 2), gather=False, reduce_every_microbatch=False)

    class Slow(Piece):
        def hidden(self, batch, hidden, *, deferred=None):
            time.sleep(0.05)
            return super().hidden(batch, hidden, deferred=deferred)

    def work(rank: int):
        pieces = {rank: Slow(0) if rank == 0 else Piece(1)}
        observer = lambda action, seconds: seen[rank].append((str(action), seconds))  # noqa: E731
        group = world.group("pp", rank, (0, 1))
        Executor(pieces, group, Sums(pieces), torch.device("cpu"), observer).train(program, BATCHES[:2], 1.0)

    world.run(work)
    forward = {name: seconds for name, seconds in seen[0] + seen[1] if name.startswith("F")}
    assert min(forward["F0.0"], forward["F0.1"]) >= 0.05
    assert max(forward["F1.0"], forward["F1.1"]) < 0.04


def test_a_program_for_another_number_of_micro_batches_is_a_bug():
    program = lower(build_schedule("1f1b", 1, 3), gather=False, reduce_every_microbatch=False)
    executor = Executor({0: Piece(0)}, SoloGroup("pp", 0), Sums({}), torch.device("cpu"))
    with pytest.raises(AssertionError, match="a program for 3 micro-batches was given 2"):
        executor.train(program, BATCHES[:2], 1.0)


def test_a_program_that_leaves_a_message_lying_is_a_bug():
    program = lower(build_schedule("1f1b", 2, 1), gather=False, reduce_every_microbatch=False)
    lonely = tuple(i for i in program.stages[0] if not isinstance(i, Exchange))
    program = Program(replace(program.schedule), (lonely[:1], program.stages[1]))
    executor = Executor({0: Piece(0)}, SoloGroup("pp", 0), Sums({0: Piece(0)}), torch.device("cpu"))
    with pytest.raises(AssertionError, match="undone"):
        executor.train(program, BATCHES[:1], 1.0)
