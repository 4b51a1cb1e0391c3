"""Each collective's backward is the transpose of its forward."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megazero.config.resolve import parse_config
from megazero.config.steps import Progress
from megazero.config.training_plan import training_plan_of
from megazero.layers import collectives
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.still_group import StillGroup
from megazero.mpu.thread_group import ThreadWorld
from megazero.mpu.traffic import TrafficLog, recording_context
from megazero.train.step.timers import Timers
from megazero.verify.record import micro_batches, verification_engine
from tests.tables import over_table

# function, each rank's input shape, whether inputs (outputs) are equal on all ranks
CASES = {
    "reduce_from_slices": ((3, 2), False, True),
    "reduce_scatter_sequence": ((6, 2), False, False),
    "gather_features": ((3, 2), False, True),
}


@over_table("name", CASES)
def test_backward_is_the_transpose(name):
    """<f(x), y> over all ranks equals <x, f'(y)>: a value held by all ranks counts once."""
    shape, same_in, same_out = CASES[name]
    world, ranks = ThreadWorld(2), (0, 1)

    def work(rank: int):
        group = world.group("tp", rank, ranks)
        torch_rng = torch.Generator().manual_seed(1 if same_in else 10 + rank)
        x = torch.randn(shape, generator=torch_rng, dtype=torch.float64).requires_grad_()
        out = getattr(collectives, name)(x, group)
        torch_rng = torch.Generator().manual_seed(2 if same_out else 20 + rank)
        y = torch.randn(out.shape, generator=torch_rng, dtype=torch.float64)
        out.backward(y)
        return float((out.detach() * y).sum()), float((x.detach() * x.grad).sum())

    left, right = zip(*world.run(work), strict=True)
    outputs = left[0] if same_out else sum(left)
    inputs = right[0] if same_in else sum(right)
    assert outputs == pytest.approx(inputs, rel=1e-12)


def test_a_group_of_one_is_the_identity():
    from megazero.mpu.solo_group import SoloGroup

    x = torch.randn(2, 2)
    assert all(getattr(collectives, name)(x, SoloGroup()) is x for name in CASES)


def summed(given_away: bool, make) -> list[tuple[bool, list[float], list[float]]]:
    """On each rank: whether the sum lies where the partial result did, the sum, and the input's gradient."""
    world = ThreadWorld(2)

    def work(rank: int) -> tuple[bool, list[float], list[float]]:
        leaf = torch.tensor([[rank + 1.0, 2.0], [-3.0, 0.5]], requires_grad=True)
        partial = make(leaf)
        place = partial.data_ptr()
        total = collectives.reduce_from_slices(
            partial, world.group("tp", rank, (0, 1)), given_away=given_away
        )
        total.backward(torch.full_like(total, 2.0))
        return total.data_ptr() == place, total.flatten().tolist(), leaf.grad.flatten().tolist()

    return world.run(work)


TWICE = torch.tensor([[2.0, 0.0], [0.0, 2.0]])


def test_a_partial_result_that_is_given_away_is_summed_where_it_lies():
    linear = [(True, [6.0, 8.0, -12.0, 2.0], [4.0, 4.0, 4.0, 4.0])] * 2
    assert summed(True, lambda x: torch.nn.functional.linear(x, TWICE)) == linear
    assert summed(False, lambda x: torch.nn.functional.linear(x, TWICE)) == [(False, *linear[0][1:])] * 2


@pytest.mark.parametrize("make", [lambda x: (x @ TWICE).t(), lambda x: (x @ TWICE).view(4)])
def test_a_view_is_copied_even_if_it_is_given_away(make):
    """Its base has a history that autograd would rewrite."""
    assert [here for here, _, _ in summed(True, make)] == [False, False]
    assert summed(True, make) == summed(False, make)


def test_autograd_refuses_if_the_old_values_were_saved():
    """As tanh saves its result: a wrong claim that a tensor was given away fails, and changes no gradient."""
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        summed(True, torch.tanh)
    assert [here for here, _, _ in summed(False, torch.tanh)] == [False, False]
    # Even if the group writes to memory behind autograd's back.
    still = StillGroup("tp", 0, (0, 1))
    total = collectives.reduce_from_slices(
        torch.tanh(torch.ones(2, requires_grad=True)), still, given_away=True
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.sum().backward()


def test_a_gradient_that_two_readers_share_is_not_overwritten():
    """A sum hands the same gradient to both that it added."""
    world = ThreadWorld(2)

    def work(rank: int) -> tuple[list[float], list[float]]:
        x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
        shared = collectives.share_for_parts(x, world.group("tp", rank, (0, 1)))
        (shared + y).backward(torch.tensor([rank + 1.0, 10.0]))
        return x.grad.tolist(), y.grad.tolist()

    assert world.run(work) == [([3.0, 20.0], [1.0, 10.0]), ([3.0, 20.0], [2.0, 10.0])]


class Copies(TorchDispatchMode):
    """Counts copies by shape."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.clone.default:
            self.shapes[tuple(args[0].shape)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("head", [[], ["--recompute-logits"]])
def test_a_model_copies_no_activations_to_sum_them(head):
    """Embedding, two layers and head of one of two tensor-parallel ranks."""
    words = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 32"
    flags = f"{words} --mock-data --micro-batch-size 2 --global-batch-size 2 --train-iters 1 --lr 1e-3"
    flags += " --tensor-model-parallel-size 2 --attention-dropout 0 --hidden-dropout 0"
    config = parse_config([*flags.split(), *head], world_size=2).config
    context = recording_context(ProcessGrid(tp=2), 0, TrafficLog(), "cpu")
    plan = training_plan_of(config, 1)
    engine, first = verification_engine(config, plan, context), plan.at(Progress())
    batches = micro_batches(config, context, first)
    with Copies() as copies:
        engine.train_step(batches, first.before, Timers())
    assert copies.shapes[8, 2, 16] == 0
