"""The estimators of memory say what a training holds, to the byte."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from megazero.deepspeed.reports.estimates import (
    count_parameters,
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_live,
)
from megazero.optim.elementwise import Adam
from megazero.zero.build import build_store
from megazero.zero.optimizer import Optimizer
from megazero.zero.store.host import HostTier
from megazero.zero.store.offload import OffloadStore, StatePlacement
from megazero.zero.store.store import WEIGHT, offloaded_bytes
from megazero.zero.unit import module_units
from tests.tables import over_table
from tests.zero.harness import in_threads
from tests.zero.policies import make_policy

SIZES = (6, 12, 30)


def model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(SIZES))).to(torch.bfloat16)


def held(stage: int, ranks: int, *, state: bool, parameters: bool) -> tuple[int, int]:
    """Bytes on a node's host, and on a device, of a store on so many ranks of one node."""

    def work(context):
        tier = HostTier()
        placed = StatePlacement(
            tier if state else None, tier if state else None, tier if parameters else None
        )
        policy = make_policy(stage, persistence_threshold=0, bucket_size=10**6, shard_alone=True)
        units = module_units(model())
        store = build_store(units, policy, context, kind=lambda policy: OffloadStore(policy, placed))
        optimizer = Optimizer(store, Adam(), context, 1.0)
        device = 0
        for bucket in store.buckets:
            if not bucket.layout.row.shard_params:
                device += bucket.full.nbytes
            elif not parameters:
                device += store.shard(bucket).nbytes
            if not state:
                rest = store.at_rest(bucket)
                assert set(rest) == {WEIGHT, *optimizer.rule.state_names}
                device += sum(flat.nbytes for flat in rest.values())
                (visited,) = (
                    r for loaded_buckets in store.stream(("gradient",), [bucket]) for r in loaded_buckets
                )
                device += visited.flats["gradient"].nbytes
        return offloaded_bytes(store).get("cpu", 0), device

    found = in_threads(ranks, work)
    assert len({device for _, device in found}) == 1
    return sum(host for host, _ in found), found[0][1]


@over_table("ranks", [1, 2, 3])
@over_table("offload", [False, True])
def test_stage_2_holds_what_is_said(ranks, offload):
    total, _ = count_parameters(model())
    assert total == 6 * 12 + 12 * 30
    said = estimate_zero2_model_states_mem_needs(total, ranks, 1, cpu_offload=offload)
    assert held(2, ranks, state=offload, parameters=False) == said


@over_table("ranks", [1, 2, 3])
@over_table(("state", "parameters"), [(False, False), (True, False), (True, True)])
def test_stage_3_holds_what_is_said(ranks, state, parameters):
    total, largest = count_parameters(model())
    assert largest == 12 * 30
    host, device, layer = estimate_zero3_model_states_mem_needs(total, largest, ranks, 1, state, parameters)
    assert layer == 2 * largest
    assert held(3, ranks, state=state, parameters=parameters) == (host, device - layer)


def test_nodes_share_and_reserves_are_added():
    assert estimate_zero2_model_states_mem_needs(800, 2, 2, True, 1.5) == (16 * 200 * 2 * 1.5, 1600)
    assert estimate_zero3_model_states_mem_needs(800, 100, 2, 2, True, True, False) == (18 * 400, 200, 200)
    assert estimate_zero3_model_states_mem_needs(800, 100, 4, 1, True, True, False)[0] == 18 * 800
    assert estimate_zero3_model_states_mem_needs(800, 100, 8, 100, False, False, False)[0] == 4 * 800 * 8


def test_tables(capsys):
    estimate_zero2_model_states_mem_needs_all_cold(2 * 10**9, 4, 2)
    assert capsys.readouterr().out.splitlines() == [
        "States of 2,000.0M parameters, on 2 node(s) of 4 device(s), weights of 2 bytes:",
        "  per node's host |  per device | options",
        "        14.90 GiB |    3.73 GiB | offload_optimizer=cpu",
        "         0.00 GiB |    7.45 GiB | offload_optimizer=none",
    ]
    estimate_zero3_model_states_mem_needs_all_live(model())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert lines[0].startswith("States of 0.0M parameters, 0.0M of them in the largest layer, on 1 node(s)")
    assert lines[2].endswith("| offload_param=cpu, offload_optimizer=cpu, zero_init=1")
