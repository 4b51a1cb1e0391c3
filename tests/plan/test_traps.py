"""Mistakes that planners make, each with the figures that show it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

import pytest

from megazero.account.memory import PeakOfOutputs
from megazero.account.profilers.calls import CollectiveCall
from megazero.config.resolve import parse_config
from megazero.mpu.launch import Launch
from megazero.pipeline.schedules import build_schedule
from megazero.pipeline.simulate import Costs, simulate
from megazero.plan.device import Device
from megazero.plan.job import PlannedJob
from megazero.plan.plan import Plan, stages_alike
from megazero.plan.report import PlanReport
from megazero.plan.times import StepTimes, duration_of
from megazero.plan.training import Model, training_seconds
from megazero.plan.work import Kernel, Wait
from megazero.train.pretraining import pretrain
from tests.durations import ROOT

GPT = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 1000 --mock-data "
    "--hidden-dropout 0 --attention-dropout 0 --micro-batch-size 1 --lr 1e-3 --train-iters 10 --bf16 "
    "--make-vocab-size-divisible-by 128"
)
LAYER = 12 * 64 * 64 + 13 * 64  # weights and biases


class Prices:
    """A second for a thousand bytes of a kernel, and for a call."""

    def kernel(self, kernel: Kernel) -> float:
        return kernel.nbytes / 1e3

    def call(self, call: CollectiveCall) -> float:
        return 1.0

    def offloaded(self, place: str, kinds: Mapping[str, int]) -> float:
        return 7.0


def plan(flags: str, ranks: int = 1, batch: int = 8) -> Plan:
    words = f"{GPT} --global-batch-size {batch} {flags}".split()
    return Plan.of(PlannedJob(parse_config(words, world_size=ranks).config, ranks, apart=True))


def test_a_training_takes_its_steps_as_long_as_they_take():
    """Half a step's micro-batches take half the time of the busiest stage, and the bubble stays."""
    planned = plan("--pipeline-model-parallel-size 2 --rampup-batch-size 4 4 20", 2)
    times = StepTimes.of(planned.stages, Prices())
    saved = 5 * max(times.timeline.busy) * 4 / 8  # five of ten steps have 4 samples
    assert training_seconds(planned.job, times) == pytest.approx(10 * times.seconds - saved)


def held(plan: Plan, stage: int, kind: str) -> int:
    return plan.stages[stage].memory["device"].get(kind, 0)


@pytest.mark.parametrize(("tp", "rows"), [(1, 1024), (2, 1024), (8, 1024)])
def test_1_the_vocabulary_is_padded_by_the_number_of_slices(tp, rows):
    flags = f"--tensor-model-parallel-size {tp} --num-attention-heads 8"
    sliced = (rows * 64 + 4 * (12 * 64 * 64 + 7 * 64)) // tp
    whole = 32 * 64 + 4 * 6 * 64 + 2 * 64  # positions, norms, and biases of rows
    assert held(plan(flags, tp), 0, "weights") == 2 * (sliced + whole)


@pytest.mark.parametrize("untied", ["", "--untie-embeddings-and-output-weights"])
def test_2_the_last_stage_holds_a_head_tied_or_not_and_the_model_one_weight_or_two(untied):
    paper = plan(f"--pipeline-model-parallel-size 2 {untied}", 2)
    assert held(paper, 1, "weights") == 2 * (2 * LAYER + 1024 * 64 + 2 * 64)
    assert Model.of(paper.job).parameters == 4 * LAYER + (2 if untied else 1) * 1024 * 64 + 32 * 64 + 2 * 64


def test_10_and_14_micro_batches_in_flight():
    """Full recompute keeps layer inputs of each; 1F1B has P - r of them on stage r, if there are as many."""
    flags = "--pipeline-model-parallel-size 4 --recompute-granularity full"
    kept = 32 * 64 * 2
    for batch, alive in ((2, 2), (8, 4), (40, 4)):
        more = plan(flags, 4, batch).stages[0].peak.nbytes - plan(flags, 4, 1).stages[0].peak.nbytes
        assert (alive - 1) * kept <= more <= (alive + 2) * kept


def test_11_bytes_of_a_parameter():
    """bf16: 2 weights, 4 masters, 8 moments; sums of gradients are 4 in fp32, or 2."""
    count = Model.of(plan("").job).parameters
    for flags, gradients in (("", 4), ("--grad-accumulation-dtype bf16", 2)):
        paper = plan(flags)
        sizes = [held(paper, 0, kind) for kind in ("weights", "masters", "moments", "gradients")]
        assert sizes == [2 * count, 4 * count, 8 * count, gradients * count]


def test_17_the_fullest_stage_is_found_wherever_it_is():
    paper = plan("--num-layers 12 --pipeline-model-parallel-size 3 --pipeline-partition 1,10,1", 3)
    assert paper.fullest.stage == 1


def test_18_experts_have_replicas_of_their_own():
    """Of 4 replicas 2 hold each expert: their state is cut in two, that of dense weights in four."""
    dense = plan("--zero-stage 1", 4)
    paper = plan("--zero-stage 1 --num-experts 4 --expert-model-parallel-size 2", 4)
    assert held(dense, 0, "masters") < 1.02 * Model.of(dense.job).parameters  # 4 / 4
    experts = 4 * 4 * 2 * 4 * 64 * 64  # layers, experts, matrices of [4 h, h]
    rest = Model.of(paper.job).parameters - experts
    wanted = 4 * (experts / 2 / 2 + rest / 4)
    assert held(paper, 0, "masters") == pytest.approx(wanted, rel=0.03)


def test_28_recomputing_a_layer_repeats_its_sums():
    """Two of forward and two of backward; full recompute repeats one of forward's, but not the last."""
    calls = {}
    for recompute in ("", "--recompute-granularity full"):
        paper = plan(f"--tensor-model-parallel-size 2 {recompute}", 2, 4)
        more = plan(f"--tensor-model-parallel-size 2 {recompute} --num-layers 6", 2, 4)
        calls[recompute] = (
            more.stages[0].traffic["tp", "all_reduce"] - paper.stages[0].traffic["tp", "all_reduce"]
        ) / 8
    assert calls == {"": 4, "--recompute-granularity full": 5}


def test_26_a_call_that_is_awaited_later_is_hidden_behind_kernels():
    kernel = Kernel("mm", 700)
    calls = [CollectiveCall("tp", "all_reduce", 8, (0, 1), later=later, number=1) for later in (False, True)]
    now = duration_of([calls[0], kernel], Prices())
    later = duration_of([calls[1], kernel, Wait(1)], Prices())
    never = duration_of([calls[1], kernel], Prices())
    assert (now.total, now.exposed) == (pytest.approx(1.7), 1.0)
    assert (later.total, later.exposed) == (pytest.approx(1.0), pytest.approx(0.3))
    assert (never.total, never.beside) == (pytest.approx(0.7), 1.0)


def test_34_sharding_the_update_shortens_it():
    seconds = [StepTimes.of(plan(f"--zero-stage {z}", 4).stages, Prices()).update.kernels for z in (0, 1)]
    assert seconds[1] < 0.6 * seconds[0]


def test_35_longer_rows_of_as_many_tokens_take_more_flops():
    short, long = (plan(f"--seq-length {s} --recompute-granularity full", 1, 2048 // s) for s in (64, 512))
    assert long.stages[0].flops > 1.1 * short.stages[0].flops


def test_an_update_on_the_host_takes_longer_and_frees_the_device():
    on_device, on_host = (plan(f"--zero-stage 1 {more}", 4) for more in ("", "--offload-optimizer cpu"))
    freed = held(on_device, 0, "masters") + held(on_device, 0, "moments")
    assert freed == 12 * sum(on_host.stages[0].memory["cpu"][kind] for kind in ("masters",)) // 4
    assert held(on_host, 0, "moments") == 0
    times = [StepTimes.of(paper.stages, Prices()).update for paper in (on_device, on_host)]
    assert times[1].total - times[1].kernels - (times[0].total - times[0].kernels) == pytest.approx(7.0)


@pytest.mark.parametrize(("stages", "micro_batches"), [(4, 2), (4, 3), (2, 7)])
def test_29_few_micro_batches_and_uneven_stages_wait(stages, micro_batches):
    """(p - 1) / (m + p - 1) where stages are equal, also for few m; more where they are not."""
    program = build_schedule("1f1b", stages, micro_batches, 1)
    even = simulate(program, Costs())
    assert even.bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1))
    chunks = range(stages)
    uneven = Costs(
        forward=tuple(2.0 if chunk == 0 else 1.0 for chunk in chunks),
        backward=tuple(4.0 if chunk == 0 else 2.0 for chunk in chunks),
    )
    assert simulate(program, uneven).bubble > even.bubble


def test_stages_of_routers_that_choose_otherwise_are_not_alike():
    """They hold as much and compute as much, but keep other activations."""
    flags = "--pipeline-model-parallel-size 4 --num-experts 4 --moe-router-topk 2 --moe-n-hash-layers 2"
    words = f"{GPT} --global-batch-size 8 {flags}".split()
    job = PlannedJob(parse_config(words, world_size=4).config, 4, apart=True)
    assert stages_alike(job) == [[0], [1], [2], [3]]


def test_31_experts_are_taken_to_be_evenly_used_and_the_report_says_so():
    flags = "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2"
    report = PlanReport(plan(flags, 2), Device.load("h100"), 8)
    assert any("spread evenly over experts" in line for line in report.warnings())
    assert not any("experts" in line for line in PlanReport(plan("", 2), Device.load("h100"), 8).warnings())


@pytest.mark.slow
def test_19_loading_and_evaluating_take_no_more_than_training(tmp_path):
    """The whole run makes what is planned, to the byte, and so does one that loads, trains and evaluates."""
    flags = f"{GPT} --vocab-size 50000 --recompute-granularity full --global-batch-size 4 --device cpu"
    flags += f" --lr-decay-iters 2 --eval-iters 2 --eval-interval 1 --save {tmp_path} --train-iters"
    planned, peaks = 0, []
    for more in ("2", f"2 --load {tmp_path}", f"3 --load {tmp_path}"):
        config = parse_config(f"{flags} {more}".split(), world_size=1).config
        planned = Plan.of(PlannedJob(config, 1, apart=False, device="cpu")).fullest.device_bytes
        with PeakOfOutputs() as outputs:
            pretrain(config, Launch())
        peaks.append(outputs.most)
    assert peaks[0] == peaks[2] == planned
    assert peaks[1] <= planned  # it loads and evaluates


RESIDENT = """import pretrain_gpt
pretrain_gpt.main()
print("resident", open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("more", "most"), [("", 1.15), ("--zero-stage 1 --offload-optimizer cpu", 1.25)])
def test_20_what_a_process_holds_grows_as_planned(more, most):
    """The rest is memory that the C library keeps; moments that are put away are made on the device first."""
    sizes = []
    for hidden in (256, 768):
        flags = f"{GPT} --hidden-size {hidden} --vocab-size 20000 --global-batch-size 2 --device cpu {more}"
        config = parse_config(flags.split(), world_size=1).config
        stage = Plan.of(PlannedJob(config, 1, apart=False, device="cpu")).fullest
        words = [
            sys.executable,
            "-c",
            RESIDENT,
            *flags.replace("--train-iters 10", "--train-iters 2").split(),
        ]
        shown = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT).stdout
        resident = 1024 * int(shown.split("resident")[1])
        sizes.append((stage.device_bytes + sum(stage.memory.get("cpu", {}).values()), resident))
    (small, held), (large, more_held) = sizes
    assert 1.0 <= (more_held - held) / (large - small) <= most
