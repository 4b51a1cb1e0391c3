"""What the checks of ``deepspeed.comm`` cannot show: uneven pieces, groups of megazero's own, errors."""

from __future__ import annotations

import pytest
import torch

from megazero.deepspeed.comm import collectives, groups, world
from megazero.deepspeed.comm.adopt import find_context, init_distributed
from megazero.deepspeed.comm.log import LOG, CommsLogger, calc_bw_log
from megazero.deepspeed.sequence.layer import DistributedAttention
from megazero.deepspeed.utils.tensors import PartitionedTensor
from megazero.errors import ConfigError
from megazero.mpu.solo_group import SoloGroup
from megazero.mpu.thread_group import ThreadWorld
from tests.deepspeed.checks.comm import attention


def test_a_call_before_the_world_is_joined_says_what_to_call():
    with pytest.raises(ConfigError, match="`all_reduce` must be called after the world"):
        collectives.all_reduce(torch.ones(1))
    with pytest.raises(ConfigError, match="call `init_distributed` or `initialize` first"):
        world.get_rank()


def test_a_group_of_threads_has_no_group_of_torch():
    with pytest.raises(ConfigError, match="`group` must be a group of processes"):
        world.process_group(ThreadWorld(2).group("data", 0, (0, 1)))
    with pytest.raises(ConfigError, match="but is solo"):
        world.process_group(SoloGroup())


def test_a_json_says_what_is_timed():
    init_distributed(config={"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["mine"]}})
    try:
        collectives.all_reduce(torch.ones(1))
        collectives.all_reduce(torch.ones(1), log_name="mine")
        assert world.get_logged_comm_ops() == ["mine"]
    finally:
        vars(LOG).update(vars(CommsLogger()))


def test_calls_start_and_stop_to_be_timed_by_name():
    log = CommsLogger()
    log.stop_profiling_comms()
    log.start_profiling_op(["a", "b"])
    log.stop_profiling_op(["a"])
    assert (log.prof_all, log.prof_ops) == (False, ["b"])
    log.start_profiling_comms()
    log.append("all_reduce", "a", 2.0, 100)
    assert log.prof_all
    assert log.get_operation_summary("a")[100]["total_latency_ms"] == 2.0
    assert log.get_operation_summary("b") is None


def test_the_bus_rate_is_that_of_the_group_and_not_of_the_world():
    """DeepSpeed takes the world's size for all groups: with eight ranks, a pair's would be 1.75 times it."""
    log = CommsLogger()
    log.append("all_reduce", "pair", 1.0, 125_000, 2)
    (pair,) = log.get_operation_summary("pair").values()
    assert (pair["tput_avg_gbps"], pair["busbw_avg_gbps"]) == (2.0, 1.0)
    assert calc_bw_log("all_reduce", 125_000, 1.0, 8) == (2.0, 1.75)


def _timed_pair(rank, size):
    group = world.new_group([0, 1])
    vars(LOG).update(vars(CommsLogger()))
    LOG.enabled = True
    try:
        if rank < 2:
            collectives.all_reduce(torch.ones(1000), group=group)
        collectives.all_reduce(torch.ones(1000), log_name="all")
        sums = LOG.comms_dict
        return {name: entry[3][0] / entry[2][0] for name, sizes in sums.items() for entry in sizes.values()}
    finally:
        vars(LOG).update(vars(CommsLogger()))


def test_the_group_of_a_call_is_looked_up(pool):
    pair, _, alone = pool.run(_timed_pair, 3)
    assert pair == {"all_reduce": pytest.approx(0.5), "all": pytest.approx(2 / 3)}
    assert alone == {"all": pytest.approx(2 / 3)}


class _Attention(torch.nn.Module):
    def forward(self, *parts):
        return attention(*parts)


def _uneven(rank, size):
    """DeepSpeed hangs with three heads on two Gloo ranks."""
    torch.manual_seed(0)
    whole = [torch.randn(4, 2, 3, 2, requires_grad=True) for _ in range(3)]
    expected = attention(*whole)
    expected.square().sum().backward()
    own = [t.detach().chunk(2)[rank].clone().requires_grad_() for t in whole]
    output = DistributedAttention(_Attention(), None)(*own, 1)
    output.square().sum().backward()
    torch.testing.assert_close(output, expected.chunk(2)[rank])
    for mine, one in zip(own, whole, strict=True):
        torch.testing.assert_close(mine.grad, one.grad.chunk(2)[rank])
    # DeepSpeed's `from_meta` takes every tensor for an even one.
    tensor = torch.arange(5.0)
    piece = PartitionedTensor(tensor, None)
    again = PartitionedTensor.from_meta(piece.to_meta(), piece.data(), None)
    assert torch.equal(again.full(), tensor)
    context = find_context()
    data, alone = groups.DATA.group(), groups.SEQUENCE.group()
    sizes = [
        groups.DATA.size(),
        groups.TENSOR.size(),
        world.get_world_size(data),
        world.get_world_size(alone),
    ]
    assert alone is groups.SEQUENCE.group()
    assert world.get_rank(context.data) == rank
    with pytest.raises(ConfigError, match="`group_name` must be ep_size_1"):
        groups.EXPERTS.group("ep_size_2")
    return sizes, groups.EXPERT_DATA.ranks("ep_size_1")


def test_uneven_heads_pieces_and_groups_of_two_ranks(pool):
    assert pool.run(_uneven, 2) == [([2, 1, 2, 1], [0, 1])] * 2


def test_a_layout_is_forgotten_with_its_world():
    find_context()
    assert groups.LAYOUT.context() is not None
    world.destroy_process_group()
    assert groups.LAYOUT.context() is None
    with pytest.raises(ConfigError, match="after the world of ranks has been joined"):
        groups.DATA.size()
