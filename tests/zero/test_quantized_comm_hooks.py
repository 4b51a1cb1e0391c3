"""Wires that send codes: within their bounds of the exact wire, to the byte, and the same bits everywhere."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megazero.mpu.grid import ProcessGrid
from megazero.mpu.param_spec import Cut, InitialValues, ParamSpec
from megazero.mpu.traffic import TrafficLog, count_traffic, recording_context
from megazero.ops.quantize import CODE_FORMATS, Quantization
from megazero.zero.comm_hooks.choose import choose_comm_hook
from megazero.zero.comm_hooks.exact import ExactCommHook
from megazero.zero.comm_hooks.gradients import QuantizedGradients
from megazero.zero.comm_hooks.node import NodeCommHook
from megazero.zero.comm_hooks.weights import QuantizedWeights
from megazero.zero.layout import BucketLayout
from megazero.zero.plan import BucketKey, BucketMember, plan_buckets
from megazero.zero.table import STAGES
from tests.tables import over_table
from tests.zero.harness import in_threads
from tests.zero.policies import make_policy

F32, BF16 = torch.float32, torch.bfloat16
KINDS = tuple(CODE_FORMATS)
# (replicas, of which so many on a node): one hop, two hops, one node.
WORLDS = over_table(("ranks", "node"), [(2, 1), (3, 1), (4, 1), (4, 2), (4, 4), (6, 2), (6, 3)])
BLOCK = 16


def layout_of(context, numel: int, dtype=F32, stage: int = 2) -> BucketLayout:
    shape = (numel, 1)
    member = BucketMember(ParamSpec("w", shape, InitialValues("zeros")), shape, dtype)
    group = context.replica
    return BucketLayout(STAGES[stage], (member,), group.size, group.rank, context.place)


def wire_of(context, numel: int, stage: int = 2, dtype=F32, **policy):
    """The wire that a bucket of one matrix gets."""
    layout = layout_of(context, numel, dtype, stage)
    key = BucketKey(0, dtype, "replica", True, stage, compressed=True)
    return choose_comm_hook(key, layout, make_policy(stage, **policy), context), layout


def gradients(rank: int, padded: int, numel: int, step: int = 0) -> Tensor:
    sums = torch.randn(padded, generator=torch.Generator().manual_seed(100 * step + rank)) * (rank + 1)
    sums[numel:] = 0
    return sums


def steps_of(slices: Tensor, how: Quantization) -> Tensor:
    """The distance between codes at each element of rows of blocks, at the largest value of its block."""
    found = torch.empty_like(slices)
    for row, out in zip(slices, found, strict=True):
        for start in range(0, len(row), how.block):
            largest = row[start : start + how.block].abs().max().item()
            out[start : start + how.block] = how.step(largest, largest)
    return found


def bound_of(all_sums: list[Tensor], node: int, how: Quantization, share: float) -> Tensor:
    """Share of a step of each replica's own values, and of the sum of each node if there are two hops.

    What the second hop rounds is the sum of what the first brought, which is larger by that one's error.
    """
    ranks = len(all_sums)
    slices = torch.stack([sums.view(ranks, -1) for sums in all_sums])
    errors = share * torch.stack([steps_of(each, how) for each in slices])
    if 1 < node < ranks:
        values = slices.view(-1, node, *slices.shape[1:]).sum(1).abs()
        wrong = errors.view(-1, node, *slices.shape[1:]).sum(1)
        again = share * torch.stack([steps_of(each, how) for each in values + wrong])
        return (wrong.sum(0) + again.sum(0)).view(-1)
    return errors.sum(0).view(-1)


@WORLDS
@over_table("rounding_seed", [None, 3], ids=["nearest", "stochastic"])
@over_table("kind", KINDS)
def test_sums_are_within_the_bound_of_exact_ones(ranks, node, kind, rounding_seed):
    how = Quantization(kind, BLOCK)
    for numel in (1, 37, 200):

        def work(context, numel=numel):
            comm_hook, layout = wire_of(context, numel, gradient_codes=how, rounding_seed=rounding_seed)
            assert isinstance(comm_hook, QuantizedGradients)
            reduction = comm_hook.reduce(gradients(context.rank, layout.padded, numel))
            assert reduction.result.dtype == F32
            reduction.work.wait()
            return reduction.result

        found = torch.cat(in_threads(ranks, work, node_size=node))
        everyone = [gradients(rank, found.numel(), numel) for rank in range(ranks)]
        exact = torch.stack(everyone).double().sum(0)
        allowed = bound_of(everyone, node, how, 0.5 if rounding_seed is None else 1.0)
        assert ((found - exact).abs() <= allowed + 1e-5).all(), numel
        assert found[numel:].count_nonzero() == 0
        if numel == 200:
            assert not torch.equal(found, exact.float())


def test_one_exchange_of_all_is_what_two_of_one_rank_are():
    """Nodes of one rank, and one node of all, take a single hop and give the same bits."""

    def work(context):
        comm_hook, layout = wire_of(context, 100, gradient_codes=Quantization("int8", BLOCK))
        reduction = comm_hook.reduce(gradients(context.rank, layout.padded, 100))
        reduction.work.wait()
        return reduction.result.tolist()

    assert in_threads(4, work, node_size=1) == in_threads(4, work, node_size=4)


@over_table("kind", KINDS)
@over_table("dtype", [F32, BF16], ids=str)
@over_table("ranks", [2, 3, 4])
def test_gathered_weights_are_the_same_bits_everywhere_and_within_the_bound(ranks, dtype, kind):
    how, numel = Quantization(kind, BLOCK), 101

    def work(context):
        comm_hook, layout = wire_of(context, numel, 3, dtype, weight_codes=how)
        assert isinstance(comm_hook, QuantizedWeights)
        exact = gradients(7, layout.padded, numel).to(dtype)
        whole, shard = torch.zeros(layout.padded, dtype=dtype), exact[layout.own].clone()
        for _ in range(3):  # nothing adds up
            comm_hook.gather(whole, shard).wait()
        assert torch.equal(shard, exact[layout.own])
        rounded = exact.clone()
        comm_hook.round_weights(rounded)
        assert torch.equal(rounded, whole)
        comm_hook.round_weights(shard)
        assert torch.equal(shard, whole[layout.own])
        return whole, exact

    found = in_threads(ranks, work)
    whole, exact = found[0]
    assert all(torch.equal(each, whole) for each, _ in found)
    step = steps_of(exact.float().view(ranks, -1), how).view(-1)
    rounding = exact.float().abs() * torch.finfo(dtype).eps
    assert ((whole.float() - exact.float()).abs() <= step / 2 + rounding).all()
    assert not torch.equal(whole, exact)


def test_a_single_replica_sends_nothing_and_rounds_nothing():
    codes = Quantization("int8", BLOCK)
    (found,) = in_threads(1, lambda c: wire_of(c, 10, 3, weight_codes=codes, gradient_codes=codes)[0])
    assert type(found) is ExactCommHook


@over_table("kind", KINDS)
def test_the_second_partition_keeps_what_the_first_gather_brought(kind):
    def work(context):
        comm_hook, layout = wire_of(context, 90, 3, weight_codes=Quantization(kind, BLOCK), hpz=2)
        assert isinstance(comm_hook, NodeCommHook)
        assert comm_hook.rounds
        exact, found = gradients(1, layout.padded, 90), []
        for _ in range(2):
            whole = torch.zeros(layout.padded)
            comm_hook.gather(whole, exact[layout.own]).wait()
            found.append(whole)
        assert torch.equal(*found)
        comm_hook.weights_changed()
        comm_hook.gather(whole, 2 * exact[layout.own]).wait()
        assert torch.equal(whole, 2 * found[0])
        return whole.tolist()

    first, *others = in_threads(4, work, node_size=2)
    assert others == [first] * 3


@over_table("kind", KINDS)
@over_table("node", [1, 2])
@over_table("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_seen_by_the_owner(bad, node, kind):
    def work(context):
        comm_hook, layout = wire_of(context, 64, gradient_codes=Quantization(kind, 8))
        sums = torch.ones(layout.padded)
        if context.rank == 2:
            sums[20] = bad
        reduction = comm_hook.reduce(sums)
        reduction.work.wait()
        return reduction.result

    found = torch.cat(in_threads(4, work, node_size=node))
    assert found[16:24].isnan().all()
    assert found.isnan().sum() == 8


def test_chance_follows_the_step_the_call_and_the_rank_and_nothing_else():
    def work(context):
        comm_hook, layout = wire_of(context, 400, gradient_codes=Quantization("int4", BLOCK), rounding_seed=5)

        def reduced(step: int, again: bool = False) -> list[float]:
            comm_hook.begin(step)
            found = []
            for _ in range(2):
                reduction = comm_hook.reduce(gradients(0, layout.padded, 400))
                reduction.work.wait()
                found.append(reduction.result.tolist())
            return found

        first, second = reduced(0)
        assert first != second  # another micro-batch
        assert reduced(1)[0] != first
        assert reduced(0) == [first, second]  # another attempt at the step
        return first

    left, right = in_threads(2, work)
    # Both ranks have the same gradients, and would give twice a code if they drew the same numbers.
    codes = torch.tensor(left + right).view(-1, BLOCK)
    scales = gradients(0, 400, 400).view(-1, BLOCK).abs().amax(1, keepdim=True) / 7
    assert ((codes / scales).round() % 2 == 1).any()


@WORLDS
@over_table("kind", KINDS)
def test_bytes_are_those_of_the_formula(ranks, node, kind):
    """docs/zero.md: rows of 4 (ceil(s / b) + ceil(s bits / 32)) bytes for shards of s elements."""
    numel, how = 1000, Quantization(kind, 64)

    def work(context):
        log = TrafficLog()
        context = count_traffic(context, log)
        comm_hook, layout = wire_of(context, numel, 3, gradient_codes=how, weight_codes=how)
        whole = torch.zeros(layout.padded)
        comm_hook.gather(whole, whole[layout.own].clone()).wait()
        comm_hook.reduce(whole).work.wait()
        return log.payload

    shard = math.ceil(numel / ranks)
    row = 4 * (math.ceil(shard / 64) + math.ceil(shard * {"int8": 8, "int4": 4, "fp8": 8}[kind] / 32))
    hops = {("replica", "all_to_all"): ranks * row}
    if 1 < node < ranks:
        hops = {("node", "all_to_all"): ranks * row, ("peers", "all_to_all"): ranks // node * row}
    for payload in in_threads(ranks, work, node_size=node):
        assert payload == {("replica", "all_gather"): ranks * row, **hops}


def test_against_fp32_codes_are_four_and_eight_times_less():
    """Less the scales: one in 64 codes of int8 costs a sixteenth, one in 4096 a thousandth."""
    shard = 1 << 20
    for kind, block, times in (
        ("int8", 64, 3.76),
        ("int8", 4096, 3.99),
        ("int4", 256, 7.75),
        ("int4", 4096, 7.98),
    ):
        assert 4 * shard / Quantization(kind, block).row_bytes(shard) == pytest.approx(times, abs=0.01)


def test_memory_besides_the_sums():
    context = recording_context(ProcessGrid(dp=4), 0, TrafficLog(), "cpu", node_size=2)
    comm_hook, layout = wire_of(context, 400, gradient_codes=Quantization("int8", BLOCK))
    # Rows of 100 codes and 7 scales: 4 sent, 4 received; the fp32 sums of 2 slices.
    assert comm_hook.extra_bytes(torch.zeros(layout.padded)) == 8 * (100 + 28) + 2 * 400


def test_nothing_waits_where_it_starts():
    """The first hop is under way while the computation goes on; the second needs what it brings."""
    log = TrafficLog()
    context = recording_context(ProcessGrid(dp=4), 0, log, "cpu", node_size=2)
    comm_hook, layout = wire_of(context, 400, gradient_codes=Quantization("int8", BLOCK))
    reduction = comm_hook.reduce(torch.zeros(layout.padded))
    assert list(log.calls) == [("node", "all_to_all")]
    reduction.work.wait()
    assert list(log.calls) == [("node", "all_to_all"), ("peers", "all_to_all")]


def around(comm_hook) -> list[str]:
    found = []
    while not isinstance(comm_hook, ExactCommHook):
        found.append(type(comm_hook).__name__)
        comm_hook = comm_hook._comm_hook
    return found[::-1]


CODES = Quantization("int8")
BOTH = {"weight_codes": CODES, "gradient_codes": CODES}
GRADIENTS, WEIGHTS, NODE = "QuantizedGradients", "QuantizedWeights", "NodeCommHook"


@over_table(
    ("stage", "dtype", "key", "policy", "expected"),
    [
        (3, F32, {}, BOTH, [GRADIENTS, WEIGHTS]),
        (3, F32, {}, {**BOTH, "hpz": 2}, [GRADIENTS, WEIGHTS, NODE]),
        (3, F32, {}, {"hpz": 2, "weight_codes": CODES}, [WEIGHTS, NODE]),
        (2, BF16, {}, BOTH, [GRADIENTS, WEIGHTS]),
        (1, BF16, {}, BOTH, [GRADIENTS, WEIGHTS]),
        (2, F32, {}, BOTH, [GRADIENTS]),  # its weights are the masters
        (2, BF16, {}, {**BOTH, "main_dtype": BF16}, [GRADIENTS]),
        (0, BF16, {}, BOTH, []),
        (3, F32, {"compressed": False}, BOTH, []),
        (3, F32, {"trainable": False}, BOTH, [WEIGHTS]),
        (1, BF16, {"trainable": False}, BOTH, []),
        (3, F32, {}, {}, []),
    ],
)
def test_the_table(stage, dtype, key, policy, expected):
    context = recording_context(ProcessGrid(dp=4), 0, TrafficLog(), "cpu", node_size=2)
    key = {"chunk": 0, "trainable": True, "compressed": True, **key}
    bucket = BucketKey(dtype=dtype, replicas="replica", row=stage, **key)
    layout = layout_of(context, 64, dtype, stage)
    assert around(choose_comm_hook(bucket, layout, make_policy(3, **policy), context)) == expected


def test_vectors_and_copies_have_buckets_of_their_own():
    def member(name: str, shape: tuple[int, ...], cuts=()) -> BucketMember:
        return BucketMember(ParamSpec(name, shape, InitialValues("zeros"), cuts), shape, F32)

    cut = (Cut(0, "tp"),)
    members = [
        member("a", (4, 4), cut),
        member("b", (4,), cut),
        member("c", (4, 4)),
        member("d", (4, 4), cut),
    ]

    def plan(tp: int, **policy) -> list[tuple[bool, str]]:
        sizes = {"replica": 2, "tp": tp, "ep": 1, "etp": tp}
        found = plan_buckets(members, make_policy(2, **policy), sizes.__getitem__)
        return [(key.compressed, "".join(sorted(members[i].spec.name for i in each))) for key, each in found]

    assert plan(2, **BOTH) == [(False, "bc"), (True, "ad")]
    assert plan(1, **BOTH) == [(False, "b"), (True, "acd")]
    assert plan(2) == [(False, "abcd")]
