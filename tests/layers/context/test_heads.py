"""Pieces of a sequence exchanged for heads: entries arrive where they belong, attention is the whole's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megazero.errors import ConfigError
from megazero.layers.context.heads import HeadPlan, exchange_heads, return_heads
from megazero.mpu.solo_group import SoloGroup
from megazero.mpu.thread_group import ThreadWorld
from megazero.mpu.traffic import CountingGroup, TrafficLog
from megazero.ops.attention import attention
from tests.tables import over_table

LAYOUTS = [
    (8, 2, 4),
    (8, 1, 8),
    (12, 3, 6),
    (7, 7, 4),
    (24, 8, 12),
    (12, 6, 4),
    (14, 7, 4),
    (5, 1, 3),
    (4, 4, 2),
]


def coded(rows: int, batch: int, heads: int, width: int, first: int = 0) -> Tensor:
    """Entries that say their row, sample, head and channel, from row `first` on."""
    axes = (torch.arange(first, first + rows), *map(torch.arange, (batch, heads, width)))
    grid = torch.meshgrid(*axes, indexing="ij")
    return sum(axis * 100**place for place, axis in enumerate(reversed(grid))).double()


@pytest.mark.fast
@over_table(
    ("layout", "queries", "keys"),
    [
        ((7, 7, 4), [2, 2, 2, 1], [2, 2, 2, 1]),
        ((8, 2, 4), [2, 2, 2, 2], [1, 1, 1, 1]),
        ((24, 8, 12), [2] * 12, [1, 2, 1] * 4),
        ((12, 6, 4), [3, 3, 3, 3], [2, 2, 2, 2]),  # evenly, as whole groups would be 4, 4, 2, 2
        ((14, 7, 4), [4, 4, 4, 2], [2, 2, 2, 1]),  # whole groups, as no rank has more heads for it
    ],
)
def test_heads_are_shared_out(layout, queries, keys):
    plan = HeadPlan(*layout, rank=0)
    assert [len(heads) for heads in plan.queries] == queries
    assert [len(heads) for heads in plan.keys] == keys
    together = plan.heads // plan.kv_heads
    for own, used in zip(plan.queries, plan.keys, strict=True):
        assert {head // together for head in own} == set(used)


def test_groups_stay_together_where_that_is_wanted():
    plan = HeadPlan(12, 6, 4, rank=0, groups=6)
    assert [len(heads) for heads in plan.queries] == [4, 4, 2, 2]
    assert HeadPlan(12, 3, 4, rank=0, groups=3).queries == HeadPlan(12, 3, 4, rank=0).queries


@over_table("layout", LAYOUTS)
@over_table("batch", [1, 2, 3])
def test_coded_entries_arrive_where_they_belong_and_come_back(layout, batch):
    heads, kv_heads, size = layout
    world, rows = ThreadWorld(size), 2

    def work(rank: int) -> None:
        group, plan = world.group("cp", rank, tuple(range(size))), HeadPlan(*layout, rank)
        q, k, v = (
            coded(rows, batch, count, width, rows * rank)
            for count, width in ((heads, 3), (kv_heads, 3), (kv_heads, 2))
        )
        whole = exchange_heads(q, k, v, plan, group)
        own = plan.queries[rank]
        assert torch.equal(whole[0], coded(rows * size, batch, heads, 3)[:, :, own.start : own.stop])
        each, rest = divmod(whole[0].shape[2], whole[1].shape[2])
        assert rest == 0
        together = heads // kv_heads
        for x, width in ((whole[1], 3), (whole[2], 2)):
            wanted = coded(rows * size, batch, kv_heads, width)[:, :, [head // together for head in own]]
            assert torch.equal(x.repeat_interleave(each, 2), wanted)
        back = return_heads(whole[0].flatten(2), plan, group)
        assert torch.equal(back, q.flatten(2))

    world.run(work)


@over_table("layout", LAYOUTS)
def test_attention_and_gradients_are_those_of_the_whole(layout):
    """Gradients of key/value heads that several ranks use are sums over them, neither one nor too many."""
    heads, kv_heads, size = layout
    draw = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(2 * size, 2, count, 4, generator=draw, dtype=torch.float64, requires_grad=True)
        for count in (heads, kv_heads, kv_heads)
    )
    seen = torch.randn(2 * size, 2, heads * 4, generator=draw, dtype=torch.float64)
    whole = attention(q, k, v, causal=True)
    whole.backward(seen)
    world = ThreadWorld(size)

    def work(rank: int) -> tuple[Tensor, ...]:
        group, plan = world.group("cp", rank, tuple(range(size))), HeadPlan(*layout, rank)
        own = [x.detach().chunk(size)[rank].clone().requires_grad_() for x in (q, k, v)]
        context = attention(*exchange_heads(*own, plan, group), causal=True)
        result = return_heads(context, plan, group)
        result.backward(seen.chunk(size)[rank])
        return result.detach(), *(x.grad for x in own)

    for parts, wanted in zip(
        zip(*world.run(work), strict=True), (whole, q.grad, k.grad, v.grad), strict=True
    ):
        torch.testing.assert_close(torch.cat(parts), wanted.detach(), rtol=1e-10, atol=1e-12)


def test_gradients_in_16_bits_are_summed_in_32():
    """256 + 1 + 1 + 1 is 259, which rounds to 260; bfloat16 would lose each 1."""
    world = ThreadWorld(4)

    def work(rank: int) -> float:
        group, plan = world.group("cp", rank, tuple(range(4))), HeadPlan(4, 1, 4, rank)
        q, k, v = (
            torch.ones(1, 1, count, 1, dtype=torch.bfloat16, requires_grad=True) for count in (4, 1, 1)
        )
        _, whole, _ = exchange_heads(q, k, v, plan, group)
        whole.backward(torch.full_like(whole, 256.0 if rank == 0 else 1.0))
        return k.grad.item()

    assert world.run(work) == [260.0] * 4


def test_two_exchanges_a_pass_and_no_more_bytes_than_needed():
    """Forward q, k, v and back, backward the same; kv heads are sent as they are, not as query heads."""
    world, logs = ThreadWorld(2), [TrafficLog(), TrafficLog()]
    size, rows, heads, kv_heads, width = 2, 3, 4, 2, 5

    def work(rank: int) -> None:
        group = CountingGroup(world.group("cp", rank, (0, 1)), logs[rank])
        plan = HeadPlan(heads, kv_heads, size, rank)
        q, k, v = (torch.ones(rows, 1, n, width, requires_grad=True) for n in (heads, kv_heads, kv_heads))
        q, k, v = exchange_heads(q, k, v, plan, group)
        return_heads(q.flatten(2), plan, group).sum().backward()

    world.run(work)
    there, back = rows * (heads + 2 * kv_heads) * width * 4, rows * heads * width * 4
    assert [log.calls["cp", "all_to_all"] for log in logs] == [4, 4]
    assert [log.payload["cp", "all_to_all"] for log in logs] == [2 * (there + back)] * 2


def test_one_rank_exchanges_nothing():
    q, k, v = (torch.ones(2, 1, 3, 2) for _ in range(3))
    plan = HeadPlan(3, 3, 1, 0)
    assert all(a is b for a, b in zip(exchange_heads(q, k, v, plan, SoloGroup()), (q, k, v), strict=True))


@pytest.mark.parametrize(
    ("layout", "words"),
    [((3, 3, 4), "at least the number of ranks that exchange heads (4)"), ((6, 4, 2), "multiple of the key")],
)
def test_impossible_plans_are_refused(layout, words):
    with pytest.raises(ConfigError, match="`num_attention_heads` must be") as refusal:
        HeadPlan(*layout, rank=0)
    assert words in str(refusal.value)
