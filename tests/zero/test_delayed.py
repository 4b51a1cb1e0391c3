"""Delayed updates: exactly one step stale, the same on every layout, resumed bit for bit, and never raced."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megazero.checkpoint.folder import iteration_folder
from megazero.checkpoint.reader import CheckpointReader
from megazero.checkpoint.shards import parts_in_use
from megazero.config.resolve import parse_config
from megazero.errors import CheckpointError
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from megazero.optim.elementwise import Adam
from megazero.train.pretraining import pretrain_on
from megazero.train.resume import keepers
from megazero.verify.compare import compare
from megazero.verify.record import Record
from megazero.verify.run import run_alone, run_in_threads
from megazero.verify.shrink import shrink
from megazero.zero.build import build_store
from megazero.zero.copies import CopyCheck
from megazero.zero.delayed import DelayedUpdates
from megazero.zero.optimizer import Optimizer
from megazero.zero.parallel import DataParallel
from megazero.zero.store.host import HostTier
from megazero.zero.store.offload import OffloadStore, StatePlacement
from megazero.zero.unit import module_units
from tests.layouts.layout import Layout
from tests.zero.harness import in_threads
from tests.zero.policies import make_policy

START = 1


class Delayed:
    """A line fitted on one rank with delayed updates, and what its forward reads in each step."""

    def __init__(self, context, start: int, stage: int = 0, rule=None):
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).double().float()
        with torch.no_grad():
            for number, param in enumerate(self.model.parameters()):
                param.copy_(torch.linspace(-1, 1, param.numel()).view(param.shape) + 0.1 * number)
        units = module_units(self.model)
        policy = make_policy(stage, bucket_size=12, shard_alone=True, persistence_threshold=0)
        tier = HostTier()
        self.store = build_store(
            units, policy, context, kind=lambda p: OffloadStore(p, StatePlacement(tier, tier))
        )
        self.parallel = DataParallel(units, self.store, policy, context)
        self.optimizer = Optimizer(
            self.store, rule or Adam(eps=1e-3), context, 0.5, DelayedUpdates(self.store, start)
        )
        self.seen: list[list[Tensor]] = []
        self.gradients: list[list[Tensor]] = []

    def step(self, number: int) -> None:
        self.parallel.start(number)
        with self.parallel.gathered():
            self.seen.append([param.clone() for param in self.model.parameters()])
        self.parallel.gather(0)
        loss = self.model(torch.ones(2, 3) * (1 + number % 3)).square().sum()
        self.parallel.begin_backward(0, reduce=True)
        loss.backward()
        self.parallel.end_backward()
        self.parallel.finish()
        found = {spec.name: g.clone() for spec, g in self.optimizer.full_gradients()}
        self.gradients.append([found[name] for name, _ in self.model.named_parameters()])
        self.optimizer.step(1e-2, 0.0)


def by_the_definition(steps: int, start: int) -> list[list[Tensor]]:
    """What forward reads in each step, by plain torch: the update of step t is seen by step t + 2."""
    plain = Delayed(solo_context(), start=10**9)  # for its model and its loss
    params = [param.detach().clone() for param in plain.model.parameters()]
    masters = [nn.Parameter(param.clone()) for param in params]
    rule = torch.optim.Adam(masters, lr=1e-2, eps=1e-3)
    in_use, seen = params, []
    for number in range(steps):
        seen.append([each.clone() for each in in_use])
        leaves = [each.clone().requires_grad_() for each in in_use]
        first, second = leaves[:2], leaves[2:]
        x = torch.ones(2, 3) * (1 + number % 3)
        loss = ((x @ first[0].t() + first[1]) @ second[0].t() + second[1]).square().sum()
        loss.backward()
        norm = torch.stack([leaf.grad.norm() for leaf in leaves]).norm()
        published = [master.detach().clone() for master in masters]
        for master, leaf in zip(masters, leaves, strict=True):
            master.grad = leaf.grad * min(1.0, 0.5 / (float(norm) + 1e-6))
        rule.step()
        in_use = [m.detach().clone() for m in masters] if number + 1 <= start else published
    return seen


@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("stage", range(4))
def test_weights_are_one_update_behind_from_the_start_on(stage, start):
    wanted = by_the_definition(6, start)
    trained = Delayed(solo_context(), start, stage)
    for number in range(6):
        trained.step(number)
    for step, (found, expected) in enumerate(zip(trained.seen, wanted, strict=True)):
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6, msg=f"step {step}")
    if start == 0:
        assert all(map(torch.equal, trained.seen[0], trained.seen[1]))  # the first update is not known yet


class HeldAdam(Adam):
    """Updates only while `gate` is open."""

    def __init__(self):
        super().__init__(eps=1e-3)
        self.gate = threading.Event()
        self.begun = threading.Event()

    def step(self, *arguments, **more):
        self.begun.set()
        assert self.gate.wait(20)
        super().step(*arguments, **more)


@pytest.mark.parametrize("touch", ["land", "norm", "state", "save"])
def test_an_update_runs_beside_the_next_step_and_what_touches_its_state_waits(touch):
    rule = HeldAdam()
    trained = Delayed(solo_context(), 0, 2, rule)
    trained.step(0)  # returns although the update cannot go on
    assert rule.begun.wait(20)
    loss = trained.model(torch.ones(2, 3)).sum()  # forward reads what was there
    assert loss.isfinite()
    bucket = trained.store.buckets[0]

    def work() -> None:
        if touch == "land":
            trained.store.accumulate(bucket, torch.zeros(bucket.layout.shard_size), first=True)
        elif touch == "norm":
            trained.optimizer.measures.params_norm()
        elif touch == "state":
            list(trained.optimizer.full_state())
        else:
            trained.store.at_rest(bucket)

    waits = threading.Thread(target=work)
    waits.start()
    waits.join(0.05)
    assert waits.is_alive()
    rule.gate.set()
    waits.join(20)
    assert not waits.is_alive()


def test_an_update_that_fails_is_told_by_the_next_step():
    class Broken(Adam):
        def step(self, *arguments, **more):
            raise RuntimeError("broken")

    trained = Delayed(solo_context(), 0, 0, Broken())
    trained.step(0)
    with pytest.raises(RuntimeError, match="broken"):
        trained.step(1)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_copies_are_compared_though_weights_in_use_are_not_what_masters_round_to(stage):
    def work(context):
        trained = Delayed(context, 0, stage)
        for number in range(3):
            trained.step(number)
        return CopyCheck(trained.optimizer, context).compare().differences

    assert in_threads(2, work) == [()] * 2


LAYOUTS = (
    Layout(store="cpu", zero=1, dp=2, micro_batch=2),
    Layout(store="cpu", zero=2, dp=2, micro_batch=2, tp=2, sequence_parallel=True),
    Layout(store="cpu", zero=2, pp=2, dp=2, schedule="interleaved", virtual=2, layers=4, micro_batch=2),
    Layout(store="cpu", zero=3, dp=2, micro_batch=2, shape="llama"),
    Layout(store="cpu", zero=2, dp=2, micro_batch=2, experts="top2", ep=2),
)


def delayed_config(layout: Layout):
    config = layout.config()
    changes = {"parameters": "none", "delayed_param_update": True, "delayed_param_update_start": START}
    return config.model_copy(update={"offload": config.offload.model_copy(update=changes)})


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_any_layout_is_one_process_with_the_option(layout):
    alone = run_alone(delayed_config(replace(layout.serial, store="cpu")), 5)
    found = run_in_threads(delayed_config(layout), layout.grid)
    assert_like(found, alone)
    plain = run_alone(layout.serial.config(), 5)
    assert alone.losses[0] == plain.losses[0]
    assert alone.losses[START + 1] != plain.losses[START + 1]  # the first update that is not known in time


def test_verify_delays_from_the_second_update_on():
    words = [
        "--num-layers",
        "2",
        "--hidden-size",
        "32",
        "--num-attention-heads",
        "2",
        "--seq-length",
        "16",
        "--vocab-size",
        "61",
    ]
    words += [
        "--mock-data",
        "--micro-batch-size",
        "1",
        "--global-batch-size",
        "4",
        "--lr",
        "1e-2",
        "--train-iters",
        "9",
    ]
    for flags, start in (("--offload-optimizer cpu --delayed-param-update", 1), ("", 40)):
        config = parse_config([*words, *flags.split()], world_size=2).config
        assert shrink(config, 2).config.offload.delayed_param_update_start == start


def assert_like(found: list[Record], alone: Record) -> None:
    shares = [each.share for each in compare(found, alone)]
    assert shares
    assert max(shares) <= 1


SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 61 --mock-data "
    "--micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --eval-iters 0 --clip-grad 0.5 --lr-decay-iters 9 "
    "--zero-reduce-bucket-size 4000 --offload-optimizer cpu"
)
DPU = "--delayed-param-update --delayed-param-update-start 2"


def run(folder: Path, iterations: int, flags: str, load: Path | None = None, ranks: int = 1) -> None:
    words = f"{SMALL} --train-iters {iterations} --save {folder} {flags}".split()
    words += ["--load", str(load)] if load else []
    config = parse_config(words, world_size=ranks).config
    if ranks == 1:
        pretrain_on(config, solo_context())
    else:
        world, grid = ThreadWorld(ranks, timeout=30.0), ProcessGrid(dp=ranks)
        world.run(lambda rank: pretrain_on(config, thread_context(world, grid, rank)))


def tensors(folder: Path, iteration: int) -> dict:
    reader = CheckpointReader(iteration_folder(folder, iteration))
    return {key: reader.tensor(key) for key in reader.shapes}


def differences(folder: Path, other: Path, iteration: int) -> list[str]:
    found, wanted = tensors(folder, iteration), tensors(other, iteration)
    assert found.keys() == wanted.keys()
    return [str(key) for key in wanted if not found[key].equal(wanted[key])]


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ("", 1),
        ("--bf16 --async-save --save-interval 1", 1),
        ("--zero-stage 2 --bf16", 2),
        ("--zero-stage 3", 2),
    ],
)
def test_resume_is_continuation_bit_for_bit(tmp_path, flags, ranks):
    """Stopped at once before the delay begins, as it begins, and later."""
    flags = f"{DPU} {flags}"
    run(tmp_path / "whole", 6, flags, ranks=ranks)
    load = None
    for stop in (2, 3, 5, 6):
        run(tmp_path / f"to{stop}", stop, flags, load, ranks)
        load = tmp_path / f"to{stop}"
    assert differences(tmp_path / "to6", tmp_path / "whole", 6) == []
    kinds = {key.kind for key in tensors(tmp_path / "whole", 6)}
    assert "weight_in_use" in kinds


def test_fp16_skips_and_resumes(tmp_path):
    flags = f"{DPU} --fp16 --initial-loss-scale 1048576 --hysteresis 1"
    run(tmp_path / "whole", 8, flags)
    run(tmp_path / "a", 5, flags)
    run(tmp_path / "b", 8, flags, tmp_path / "a")
    assert differences(tmp_path / "b", tmp_path / "whole", 8) == []
    state = (iteration_folder(tmp_path / "whole", 8) / "state.json").read_text()
    assert '"skipped": 0' not in state


def test_a_run_goes_on_with_and_without_the_delay(tmp_path):
    """Without it, from the masters, which know all updates; with it, from weights that are up to date."""
    run(tmp_path / "delayed", 4, DPU)
    run(tmp_path / "at-once", 4, "")
    run(tmp_path / "a", 6, "", tmp_path / "delayed")
    run(tmp_path / "b", 6, DPU, tmp_path / "at-once")
    saved = tensors(tmp_path / "delayed", 4)
    stale = [key for key in saved if key.kind == "weight_in_use"]
    assert stale
    assert any(not saved[key].equal(saved[type(key)(key.name)]) for key in stale)
    assert all(key.kind != "weight_in_use" for key in tensors(tmp_path / "a", 6))
    fresh = tensors(tmp_path / "b", 6)
    assert any(key.kind == "weight_in_use" for key in fresh)


def test_a_checkpoint_that_lacks_weights_in_use_is_refused(tmp_path, monkeypatch):
    run(tmp_path / "whole", 3, DPU)

    def with_one_more(*args):
        parts = parts_in_use(*args)
        return [*parts, replace(parts[0], key=replace(parts[0].key, name="nowhere"))]

    monkeypatch.setattr(keepers, "parts_in_use", with_one_more)
    with pytest.raises(CheckpointError, match="lacks `.*nowhere.*` and 0 more; load an older one"):
        run(tmp_path / "on", 5, DPU, tmp_path / "whole")
