"""`DistributedAttention`: any layout, any number of heads, no state between models, nothing uneven unseen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megazero.deepspeed.sequence.layer import DistributedAttention
from megazero.errors import ConfigError
from megazero.mpu.group import Group
from megazero.mpu.thread_group import ThreadWorld
from megazero.mpu.traffic import CountingGroup, TrafficLog
from tests.deepspeed.checks.comm import attention
from tests.tables import over_table

LAYOUTS = [(8, 2, 4), (8, 1, 4), (12, 3, 6), (7, 7, 4), (12, 6, 4), (4, 4, 2), (6, 2, 3)]


class Local(torch.nn.Module):
    """An attention that insists on contiguous tensors, as kernels do.

    Args:
        batch_dim: the dim of the batch.
        flat: whether heads are beside each other in the result.
    """

    def __init__(self, batch_dim: int = 1, flat: bool = False):
        super().__init__()
        self.batch_dim, self.flat = batch_dim, flat

    def forward(self, *parts: Tensor) -> Tensor:
        assert all(part.is_contiguous() for part in parts)
        if self.batch_dim == 0:
            parts = tuple(part.transpose(0, 1) for part in parts)
        result = attention(*parts)
        result = result.flatten(2) if self.flat else result
        return result.transpose(0, 1) if self.batch_dim == 0 else result


def drawn(layout: tuple[int, int, int], batch: int, seed: int = 1) -> list[Tensor]:
    heads, kv_heads, size = layout
    draw = torch.Generator().manual_seed(seed)
    shapes = ((2 * size, batch, count, 4) for count in (heads, kv_heads, kv_heads))
    return [torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes]


def shared(layer: DistributedAttention, whole: list[Tensor], group: Group, batch_dim: int) -> list[Tensor]:
    """The result and the gradients of this rank's piece, `[s, b, ...]` in any case."""
    own = [x.detach().chunk(group.size)[group.rank] for x in whole]
    own = [x.transpose(0, 1) if batch_dim == 0 else x for x in own]
    own = [x.clone().requires_grad_() for x in own]
    result = layer(*own, batch_dim)
    result.square().sum().backward()
    found = [result.detach(), *(x.grad for x in own)]
    return [x.transpose(0, 1) if batch_dim == 0 else x for x in found]


def wanted(whole: list[Tensor]) -> list[Tensor]:
    result = attention(*whole)
    result.square().sum().backward()
    return [result.detach(), *(x.grad for x in whole)]


@over_table("layout", LAYOUTS)
@over_table(("batch", "batch_dim", "flat"), [(1, 1, False), (2, 0, False), (3, 1, True), (3, 0, True)])
def test_pieces_are_those_of_the_whole(layout, batch, batch_dim, flat):
    whole, size = drawn(layout, batch), layout[2]
    world = ThreadWorld(size)

    def work(rank: int) -> list[Tensor]:
        group = world.group("cp", rank, tuple(range(size)))
        layer = DistributedAttention(Local(batch_dim, flat), group, gather_idx=1 - batch_dim)
        return shared(layer, whole, group, batch_dim)

    pieces = world.run(work)
    for parts, one in zip(zip(*pieces, strict=True), wanted(whole), strict=True):
        torch.testing.assert_close(torch.cat(parts).flatten(2), one.flatten(2), rtol=1e-9, atol=1e-10)


def test_models_with_other_heads_do_not_meet():
    """DeepSpeed kept the first call's heads for all later models of the process."""
    layouts = [(7, 7, 2), (6, 3, 2), (8, 1, 2)]
    wholes = [drawn(layout, 2, seed) for seed, layout in enumerate(layouts)]
    world = ThreadWorld(2)

    def work(rank: int) -> list[list[Tensor]]:
        group = world.group("cp", rank, (0, 1))
        layers = [DistributedAttention(Local(), group) for _ in layouts]
        for layer, whole in zip(layers, wholes, strict=True):
            shared(layer, whole, group, 1)
        return [shared(layer, whole, group, 1) for layer, whole in zip(layers, wholes, strict=True)]

    for pieces, whole in zip(zip(*world.run(work), strict=True), wholes, strict=True):
        for parts, one in zip(zip(*pieces, strict=True), wanted(whole), strict=True):
            torch.testing.assert_close(torch.cat(parts), one, rtol=1e-9, atol=1e-10)


def test_heads_that_belong_together_stay_together():
    """A local attention that repeats keys by a number of its own needs the same number on each rank."""
    world = ThreadWorld(4)

    def work(rank: int) -> tuple[int, int]:
        group, sizes = world.group("cp", rank, tuple(range(4))), []

        def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            sizes.extend((q.shape[2], k.shape[2]))
            return q

        DistributedAttention(local, group)(*(torch.ones(1, 1, count, 2) for count in (12, 6, 6)))
        return tuple(sizes)

    assert world.run(work) == [(4, 2), (4, 2), (2, 1), (2, 1)]


@pytest.mark.parametrize(
    ("shapes", "words"), [([(3, 1), (2, 1)], "rows.*3, 2"), ([(2, 1), (2, 2)], "samples.*1, 2")]
)
def test_pieces_that_differ_are_refused(shapes, words):
    """Ten rows over four ranks: DeepSpeed reads past its buffers, and Gloo ends the process."""
    world = ThreadWorld(2)

    def work(rank: int) -> None:
        layer = DistributedAttention(Local(), world.group("cp", rank, (0, 1)))
        with pytest.raises(ConfigError, match=f"`query` must have equally many {words}; pad sequences"):
            layer(*[torch.ones(*shapes[rank], 2, 2)] * 3)

    world.run(work)


def test_a_layer_makes_two_exchanges_a_pass():
    world, logs = ThreadWorld(2), [TrafficLog(), TrafficLog()]
    whole = drawn((4, 2, 2), 1)

    def work(rank: int) -> None:
        group = CountingGroup(world.group("cp", rank, (0, 1)), logs[rank])
        shared(DistributedAttention(Local(), group), whole, group, 1)

    world.run(work)
    assert [log.calls["cp", "all_to_all"] for log in logs] == [4, 4]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"scatter_idx": 1}, "`scatter_idx` must be 2"),
        ({"gather_idx": 2}, "`gather_idx` must be 0 or 1"),
    ],
)
def test_other_dims_are_refused(arguments, words):
    with pytest.raises(ConfigError, match=words):
        DistributedAttention(torch.nn.Identity(), None, **arguments)
