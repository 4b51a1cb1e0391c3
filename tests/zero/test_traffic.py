"""What a step communicates is what ZeRO's formulas say, in elements and in calls."""

from __future__ import annotations

import torch
from torch import nn

from megazero.mpu.grid import ProcessGrid
from megazero.mpu.traffic import TrafficLog, recording_context
from megazero.ops.quantize import Quantization
from megazero.optim.elementwise import Adam
from megazero.zero.build import build_store
from megazero.zero.optimizer import Optimizer
from megazero.zero.parallel import DataParallel
from megazero.zero.table import STAGES
from megazero.zero.unit import module_units
from tests.tables import over_table
from tests.zero.policies import make_policy

WIDTH, LAYERS, RANKS, MICRO_BATCHES = 8, 5, 4, 3
SIZE = LAYERS * WIDTH * WIDTH  # psi, the model's parameters
NORM = 8  # bytes of the gradient norm's all-reduce


def step(stage: int, hpz: int = 1, node: int | None = None, **changes) -> TrafficLog:
    """One training step of a stack of layers on the first of four ranks; the others are left out."""
    log = TrafficLog()
    context = recording_context(ProcessGrid(dp=RANKS), 0, log, "cpu", node_size=node or hpz)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    settings = {"bucket_size": WIDTH * WIDTH, "persistence_threshold": 0, "max_live": 0, **changes}
    policy = make_policy(stage, hpz=hpz, **settings)
    units = module_units(model)
    store = build_store(units, policy, context)
    parallel = DataParallel(units, store, policy, context)
    optimizer = Optimizer(store, Adam(), context, 1.0)
    parallel.start()
    for i in range(MICRO_BATCHES):
        parallel.gather(0)
        loss = model(torch.ones(1, WIDTH)).sum()
        parallel.release(0)
        parallel.gather(0, backward=True)
        parallel.begin_backward(0, reduce=STAGES[stage].shard_grads or i == MICRO_BATCHES - 1)
        loss.backward()
        parallel.end_backward()
        parallel.release(0)
    parallel.finish()
    assert optimizer.step(1e-3, 0.0).applied
    return log


def moved(log: TrafficLog) -> dict[str, float]:
    """Multiples of psi, by operation, between the replicas: fp32 everywhere."""
    assert log.payload["world", "all_reduce"] == NORM
    bytes_ = {operation: log.payload["replica", operation] for _, operation in log.payload}
    return {operation: total / (4 * SIZE) for operation, total in bytes_.items() if total}


def test_volume_of_each_stage():
    assert moved(step(0)) == {"all_reduce": 1}
    assert moved(step(1)) == {"reduce_scatter": 1, "all_gather": 1}
    assert moved(step(2)) == {"reduce_scatter": MICRO_BATCHES, "all_gather": 1}
    assert moved(step(3)) == {"reduce_scatter": MICRO_BATCHES, "all_gather": 2 * MICRO_BATCHES}


@over_table("prefetch", [0, 64, 128, 10**9])
@over_table("overlap", [True, False])
def test_gathering_ahead_gathers_nothing_twice(prefetch, overlap):
    log = step(3, prefetch=prefetch, overlap_gather=overlap)
    assert moved(log) == {"reduce_scatter": MICRO_BATCHES, "all_gather": 2 * MICRO_BATCHES}


def test_what_is_kept_is_not_gathered_again():
    assert moved(step(3, max_live=SIZE))["all_gather"] == 1
    # Two layers stay from forward to backward and from micro-batch to micro-batch.
    kept = step(3, max_live=2 * WIDTH * WIDTH, prefetch=0)
    assert moved(kept)["all_gather"] == (LAYERS + (LAYERS - 2) * (2 * MICRO_BATCHES - 1)) / LAYERS


def test_what_persists_is_gathered_once_after_the_step():
    assert moved(step(3, persistence_threshold=10**9)) == moved(step(2))


def test_a_second_partition_keeps_gathers_on_the_node():
    log = step(3, hpz=2)
    # Across nodes once a step; every further gather is from the node's two shards.
    assert log.payload["replica", "all_gather"] == 4 * SIZE
    assert log.payload["node", "all_gather"] == 4 * SIZE * (2 * MICRO_BATCHES - 1)


def test_bucket_size_decides_the_number_of_calls():
    assert step(0).calls["replica", "all_reduce"] == LAYERS
    assert step(0, bucket_size=2 * WIDTH * WIDTH).calls["replica", "all_reduce"] == 3
    assert step(0, bucket_size=10**9).calls["replica", "all_reduce"] == 1
    # Where weights are sharded each unit is gathered by itself.
    assert step(3, bucket_size=10**9).calls["replica", "all_gather"] == 2 * MICRO_BATCHES * LAYERS


def test_narrow_wires_halve_the_bytes_of_gradients():
    for stage in range(len(STAGES)):
        operation = "reduce_scatter" if stage else "all_reduce"
        whole, half = step(stage), step(stage, reduce_dtype=torch.bfloat16)
        assert half.payload["replica", operation] == whole.payload["replica", operation] / 2


# A layer's shard has 16 elements: two scales of 8 elements each and the codes, in bytes.
ROWS = over_table(("kind", "row"), [("int8", 8 + 16), ("int4", 8 + 8), ("fp8", 8 + 16)])


@ROWS
def test_codes_of_gradients_on_one_hop_and_on_two(kind, row):
    """Each hop sends a row per slice: all four slices, and between two nodes the two of a rank's peers."""
    codes = Quantization(kind, 8)
    for stage, times in ((1, 1), (2, MICRO_BATCHES), (3, MICRO_BATCHES)):
        log = step(stage, gradient_codes=codes)
        assert log.payload["replica", "all_to_all"] == times * LAYERS * RANKS * row
        assert log.payload["replica", "reduce_scatter"] == 0
        log = step(stage, node=2, gradient_codes=codes)
        assert log.payload["node", "all_to_all"] == times * LAYERS * RANKS * row
        assert log.payload["peers", "all_to_all"] == times * LAYERS * RANKS // 2 * row
        assert log.payload["replica", "all_to_all"] == 0


@ROWS
def test_codes_of_weights_across_nodes_and_weights_within(kind, row):
    log = step(3, weight_codes=Quantization(kind, 8))
    assert log.payload["replica", "all_gather"] == 2 * MICRO_BATCHES * LAYERS * RANKS * row
    log = step(3, hpz=2, weight_codes=Quantization(kind, 8))
    assert log.payload["replica", "all_gather"] == LAYERS * RANKS * row
    assert log.payload["node", "all_gather"] == 4 * SIZE * (2 * MICRO_BATCHES - 1)
    # At the stages 1 and 2 fp32 weights are the masters, and travel as they are.
    assert moved(step(2, weight_codes=Quantization(kind, 8)))["all_gather"] == 1


def test_a_step_of_zero_plus_plus_moves_a_quarter_between_nodes():
    """Wang et al. 2023, of bf16 weights and gradients: 3 psi of 2 bytes; here 1/2 + 0 + 1/4, and scales."""
    width, ranks = 256, 4
    log = TrafficLog()
    context = recording_context(ProcessGrid(dp=ranks), 0, log, "cpu", node_size=2)
    model = nn.Linear(width, width, bias=False).to(torch.bfloat16)
    policy = make_policy(
        3,
        persistence_threshold=0,
        max_live=0,
        hpz=2,
        weight_codes=Quantization("int8", 4096),
        gradient_codes=Quantization("int4", 4096),
    )
    units = module_units(model)
    store = build_store(units, policy, context)
    parallel = DataParallel(units, store, policy, context)
    parallel.start()
    parallel.gather(0)
    loss = model(torch.ones(1, width, dtype=torch.bfloat16)).sum()
    parallel.release(0)
    parallel.begin_backward(0, reduce=True)
    loss.backward()
    parallel.end_backward()
    parallel.finish()
    size = width * width
    # What leaves the node: gathered shards of the other node, and the slice of the peer there.
    gathered = log.payload["replica", "all_gather"] / 2
    summed = log.payload["peers", "all_to_all"] / 2
    exact = 2 * 2 * size / 2 + 2 * size / 2  # two gathers and one reduction in bf16, half from the other node
    assert gathered == size / 2 + 2 * 4 * 4
    assert summed == size / 4 / 2 + 4 * 4
    assert (gathered + summed) / exact < 0.25
