"""Both ways to bring tokens to experts, on ranks as threads, against a plain loop over tokens."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megazero.moe.dispatch import ExpertPlacement, SortedRows, all_gather_dispatch, all_to_all_dispatch
from megazero.mpu.thread_group import ThreadWorld
from tests.moe.samples import joined, randn
from tests.tables import over_table

E, H, K = 4, 3, 2
DISPATCHES = {"exchange": all_to_all_dispatch, "share": all_gather_dispatch}
# (ranks, ranks that share each expert)
GROUPS = ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2))


@dataclass(frozen=True)
class Load:
    """What one rank's tokens chose."""

    x: Tensor
    weights: Tensor
    chosen: Tensor
    kept: Tensor | None
    grad: Tensor


def expert(rows: Tensor, number: int) -> Tensor:
    """What expert `number` makes of rows: nothing that mixes them, and nothing linear in the number."""
    return (rows * (number + 1)).tanh() + number


def loads(kind: str, ranks: int) -> list[Load]:
    """Each rank has one token more than the one before."""
    found = []
    for rank in range(ranks):
        n = 5 + rank
        chosen = torch.stack([randn(10 * rank + i, E).argsort()[:K] for i in range(n)])
        kept = randn(90 + rank, n, K) > -0.5
        if kind == "dropless":
            kept = None
        elif kind == "one expert for all":
            chosen = torch.tensor([[2, 1]]).expand(n, K)
            kept = torch.tensor([[True, False]]).expand(n, K).contiguous()
        elif kind == "two experts idle":
            chosen, kept = torch.stack([torch.tensor([3, 0]).roll(i) for i in range(n)]), None
        elif kind == "a rank without any":
            kept = kept & (rank != ranks - 1)
        elif kind == "none":
            kept = torch.zeros_like(kept)
        weights = randn(60 + rank, n, K).softmax(1).float()
        found.append(Load(randn(30 + rank, n, H), weights, chosen, kept, randn(70 + rank, n, H)))
    return found


KINDS = ("dropped", "dropless", "one expert for all", "two experts idle", "a rank without any", "none")


def plain(load: Load) -> tuple[Tensor, Tensor, Tensor]:
    """The result and the gradients of x and of the weights, token by token."""
    x, weights = load.x.clone().requires_grad_(), load.weights.clone().requires_grad_()
    rows = []
    for i in range(len(x)):
        row = torch.zeros(H, dtype=x.dtype)
        for j in range(K):
            if load.kept is None or load.kept[i, j]:
                row = row + weights[i, j] * expert(x[i], int(load.chosen[i, j]))
        rows.append(row)
    out = torch.stack(rows)
    if out.requires_grad:
        out.backward(load.grad)
    zeros = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in (x, weights)]
    return out.detach(), *zeros


def dispatched(
    dispatch, ranks: int, slices: int, given: list[Load], room: int | None = None, reads_sizes: bool = True
) -> list:
    """On each rank: the result, the gradients of x and weights, and the sizes that its experts saw."""
    world = ThreadWorld(ranks, 20.0)

    def work(rank: int):
        group = world.group("expert", rank, tuple(range(ranks)))
        load, seen = given[rank], []

        def apply(rows: Tensor, groups) -> Tensor:
            sizes = groups.read()
            seen.append(sizes)
            first, part = (
                rank // slices * (E * slices // ranks),
                (0.25, 0.75)[rank % slices] if slices > 1 else 1.0,
            )
            blocks = rows.split(sizes)
            return torch.cat([part * expert(block, first + e) for e, block in enumerate(blocks)])

        experts_placement = ExpertPlacement(E, apply, group, slices, room, reads_sizes)
        x, weights = load.x.clone().requires_grad_(), load.weights.clone().requires_grad_()
        out = dispatch(experts_placement, x, weights, load.chosen, load.kept)
        out.backward(load.grad)
        return out.detach(), x.grad, weights.grad, *seen

    return world.run(work)


@over_table("kind", KINDS)
@over_table(("ranks", "slices"), GROUPS)
@over_table("name", DISPATCHES)
def test_equals_a_loop_over_tokens(name, ranks, slices, kind):
    given = loads(kind, ranks)
    found = dispatched(DISPATCHES[name], ranks, slices, given)
    for (out, grad_x, grad_weights, _), load in zip(found, given, strict=True):
        expected, expected_x, expected_weights = plain(load)
        assert torch.allclose(out, expected, atol=1e-5)
        assert torch.allclose(grad_x, expected_x, atol=1e-5)
        assert torch.allclose(grad_weights, expected_weights, atol=1e-5)
        assert (out.dtype, grad_x.dtype, grad_weights.dtype) == (torch.float64, torch.float64, torch.float32)
    counts = torch.zeros(E, dtype=torch.int64)
    for load in given:
        chosen = load.chosen.flatten() if load.kept is None else load.chosen[load.kept]
        counts += torch.bincount(chosen, minlength=E)
    sizes = [each for *_, each in found]
    for first in range(slices):
        assert joined(sizes[first::slices]) == counts.tolist(), "each expert gets its rows and no others"


@over_table(("ranks", "slices"), GROUPS)
@over_table("kind", ["dropped", "a rank without any", "none"])
def test_blank_rows_change_nothing(kind, ranks, slices):
    """With `room`, every expert gets so many rows of every rank, whatever was chosen."""
    given, room = loads(kind, ranks), 6
    found = dispatched(all_to_all_dispatch, ranks, slices, given, room)
    for (out, grad_x, grad_weights, sizes), load in zip(found, given, strict=True):
        assert sizes == [room * ranks] * (E * slices // ranks)
        for got, expected in zip((out, grad_x, grad_weights), plain(load), strict=True):
            assert torch.allclose(got, expected, atol=1e-5)


@over_table("name", DISPATCHES)
@over_table("kind", KINDS)
def test_sizes_that_stay_on_the_device_change_no_bit(kind, name):
    """Choices that are not kept are then blank rows of the last expert."""
    given = loads(kind, 1)
    ours, theirs = (
        dispatched(DISPATCHES[name], 1, 1, given, reads_sizes=reads)[0] for reads in (False, True)
    )
    assert all(torch.equal(a, b) for a, b in zip(ours[:3], theirs[:3], strict=True))
    blank = given[0].chosen.numel() - sum(theirs[3])
    assert ours[3] == [*theirs[3][:-1], theirs[3][-1] + blank]


@pytest.mark.parametrize("room", [None, 7])
def test_an_exchange_has_the_same_bits_on_any_number_of_ranks(room):
    given = loads("dropped", 4)
    alone = [dispatched(all_to_all_dispatch, 1, 1, [load], room)[0] for load in given]
    for ranks in (2, 4):
        for first in range(0, 4, ranks):
            found = dispatched(all_to_all_dispatch, ranks, 1, given[first : first + ranks], room)
            for ours, expected in zip(found, alone[first:], strict=False):
                assert all(torch.equal(a, b) for a, b in zip(ours[:3], expected[:3], strict=True))


def test_rows_are_sorted_by_expert_and_stay_in_order_of_token():
    chosen = torch.tensor([[2, 0], [0, 2], [2, 1], [0, 1]])
    kept = torch.tensor([[True, True], [True, False], [True, True], [False, True]])
    rows = SortedRows.sort(chosen, kept, 3)
    assert rows.counts.tolist() == [2, 2, 2]
    assert rows.choice[:6].tolist() == [1, 2, 5, 7, 0, 4]
    assert sorted(rows.choice[6:].tolist()) == [3, 6]
    first = rows.first(6)
    assert first.slots.tolist() == [[4, 0], [1, 6], [5, 2], [6, 3]]
    blank = SortedRows.sort(chosen, kept, 3, room=3)
    assert blank.choice.tolist() == [1, 2, -1, 5, 7, -1, 0, 4, -1]
    assert blank.slots.tolist() == [[6, 0], [1, 9], [7, 3], [9, 4]]
    assert blank.counts.tolist() == [3, 3, 3]


def test_a_sum_over_choices_is_in_their_order_and_in_fp32():
    """1e8 and 1 and -1e8 in bf16: from left to right in fp32 that is 0, from right to left 1."""
    x = torch.tensor([[1.0, 1.0]]).bfloat16()
    values = torch.tensor([1e8, 1.0, -1e8])
    world = ThreadWorld(1)

    def apply(rows: Tensor, groups) -> Tensor:
        return rows * values.bfloat16()[groups.numbers].unsqueeze(1)

    experts_placement = ExpertPlacement(3, apply, world.group("expert", 0, (0,)), 1)
    ones = torch.ones(1, 3)
    for order, expected in (([0, 1, 2], 0.0), ([0, 2, 1], 1.0)):
        out = all_to_all_dispatch(experts_placement, x, ones, torch.tensor([order]), None)
        assert (out.dtype, out.tolist()) == (torch.bfloat16, [[expected] * 2])
