"""The 1-bit optimizers in whole trainings: layouts, resumes over the freeze, other replicas, experts."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megazero.checkpoint.folder import iteration_folder
from megazero.checkpoint.part import WEIGHT
from megazero.checkpoint.reader import CheckpointReader
from megazero.config.resolve import parse_config
from megazero.config.training_plan import training_plan_of
from megazero.config.tree.checkpoint import CheckpointConfig
from megazero.mpu.context import thread_context
from megazero.mpu.launch import Launch
from megazero.mpu.thread_group import ThreadWorld
from megazero.mpu.traffic import TrafficLog, count_traffic, recording_context
from megazero.train.pretraining import pretrain
from megazero.train.resume.resume import resume
from megazero.train.resume.snapshot import Snapshots
from megazero.train.step.state import TrainState
from megazero.train.step.timers import Timers
from megazero.verify.record import micro_batches, verification_engine
from megazero.zero.copies import CopyCheck
from tests.layouts.layout import VOCABULARY, Layout

# Frozen after two steps; the fourth is one that each replica of 0/1 Adam makes alone.
SETTINGS = {
    "onebit-adam": {"onebit_freeze_step": 2},
    "zero-one-adam": {
        "zero_one_var_freeze_step": 1,
        "zero_one_var_update_scaler": 1,
        "zero_one_local_step_scaler": 1,
        "zero_one_local_step_clipper": 4,
    },
    "onebit-lamb": {"onebit_freeze_step": 2},
}


def configure(optimizer: str, layout: Layout, folder: str | None = None):
    config = layout.config()
    settings = {"optimizer": optimizer, "adam_eps": 1e-3, **SETTINGS[optimizer]}
    changes = {"optimizer": config.optimizer.model_copy(update=settings)}
    if folder is not None:
        changes["checkpoint"] = CheckpointConfig(save=folder, load=folder)
    return config.model_copy(update=changes)


def steps(config, training_plan, engine, context, state: TrainState, count: int):
    losses = []
    for _ in range(count):
        step = training_plan.at(state.progress)
        result = engine.train_step(micro_batches(config, context, step), state.progress, Timers())
        losses.append(result.losses.means[0])
        state = state.after(step, result.skipped)
    return state, losses


def flats(engine) -> list[torch.Tensor]:
    store = engine.optimizer.store
    kept = [flat.clone() for bucket in store.buckets for flat in store.at_rest(bucket).values()]
    return kept + [param.detach().clone() for bucket in store.buckets for param in bucket.params]


PIPELINE = Layout(pp=2, dp=2, dtype="bf16")
SEQUENCE = Layout(tp=2, dp=2, sequence_parallel=True, untied=True)
EXPERTS = Layout(dp=4, ep=2, experts="biased")


@pytest.mark.parametrize(
    ("optimizer", "layout", "stop"),
    [
        ("onebit-adam", PIPELINE, 1),
        ("onebit-adam", EXPERTS, 4),
        ("zero-one-adam", PIPELINE, 4),
        ("zero-one-adam", EXPERTS, 4),
        ("onebit-lamb", PIPELINE, 1),
        ("onebit-lamb", SEQUENCE, 4),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_it_resumes_bit_for_bit(tmp_path, optimizer, layout, stop):
    """Before the freeze, and after it, where errors differ between the replicas."""
    config = configure(optimizer, layout, str(tmp_path))
    world, training_plan = ThreadWorld(layout.world_size, 60.0), training_plan_of(config, layout.dp)

    def work(rank):
        context = thread_context(world, layout.grid, rank)
        engine = verification_engine(config, training_plan, context)
        state, _ = steps(config, training_plan, engine, context, TrainState(), stop)
        snapshots = Snapshots(config, training_plan, engine, context, VOCABULARY, config.training.seed)
        snapshots.save(state)
        snapshots.saver.close()
        _, losses = steps(config, training_plan, engine, context, state, 3)
        resumed = resume(config, context, VOCABULARY, partial(verification_engine, context=context))
        assert resumed.state.iteration == stop
        _, again = steps(config, training_plan, resumed.engine, context, resumed.state, 3)
        assert losses == again
        pairs = zip(flats(engine), flats(resumed.engine), strict=True)
        return all(torch.equal(one, other) for one, other in pairs)

    assert world.run(work) == [True] * layout.world_size


@pytest.mark.parametrize("optimizer", SETTINGS)
def test_recorded_traffic_is_what_ranks_count(optimizer):
    """On the meta device too, in exact steps, compressed ones, and those that a replica makes alone."""
    layout = Layout(dp=2, tp=2, sequence_parallel=True)
    config = configure(optimizer, layout)
    world, training_plan = ThreadWorld(layout.world_size, 60.0), training_plan_of(config, layout.dp)

    def by_step(context, log):
        engine, state, found = verification_engine(config, training_plan, context), TrainState(), []
        for _ in range(5):
            log.clear()
            state, _ = steps(config, training_plan, engine, context, state, 1)
            found.append((dict(log.calls), dict(log.payload)))
        return found

    def work(rank):
        log = TrafficLog()
        return by_step(count_traffic(thread_context(world, layout.grid, rank), log), log)

    log = TrafficLog()
    recorded = by_step(recording_context(layout.grid, 0, log), log)
    assert world.run(work) == [recorded] * layout.world_size
    payloads = [payload for _, payload in recorded]
    sent = [
        sum(size for (_, operation), size in each.items() if operation == "all_to_all") for each in payloads
    ]
    wanted = {"onebit-adam": "0 0 1 1 1", "zero-one-adam": "0 1 1 0 1", "onebit-lamb": "0 0 1 1 1"}
    assert " ".join(str(int(size > 0)) for size in sent) == wanted[optimizer]


@pytest.mark.parametrize("optimizer", SETTINGS)
def test_layouts_with_as_many_replicas_have_the_same_losses(optimizer):
    """However the model is sliced, staged and tied, and whatever its buckets; copies stay equal."""
    found = []
    for changes in ({}, {"tp": 2, "sequence_parallel": True}, {"pp": 2, "tp": 2}, {"bucket_size": 1}):
        layout = Layout(dp=2, **changes)
        config = configure(optimizer, layout)
        world, training_plan = ThreadWorld(layout.world_size, 60.0), training_plan_of(config, layout.dp)

        def work(rank, layout=layout, config=config, world=world, training_plan=training_plan):
            context = thread_context(world, layout.grid, rank)
            engine = verification_engine(config, training_plan, context)
            losses = steps(config, training_plan, engine, context, TrainState(), 6)[1]
            assert CopyCheck(engine.optimizer, context).compare().differences == ()
            return losses

        found.append(world.run(work)[-1])
    for losses in found[1:]:
        assert losses == pytest.approx(found[0], rel=2e-4)


@pytest.mark.parametrize(
    "flags",
    [
        "--optimizer onebit-adam --onebit-freeze-step 20",
        "--optimizer zero-one-adam --zero-one-var-freeze-step 20",
    ],
)
def test_what_has_no_gradient_but_rounding_stays_small(tmp_path, flags):
    """The keys' bias moves all scores of a query alike, so its gradient is rounding. A bit moved it most:
    it grew to 59.6 with 1-bit Adam and to over 1,000 with 0/1 Adam.
    """
    shape = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 64 --mock-data"
    )
    steps = "--micro-batch-size 4 --global-batch-size 4 --lr 2e-3 --train-iters 100 --eval-iters 0"
    argv = [*f"{shape} {steps} {flags}".split(), "--save", str(tmp_path)]
    pretrain(parse_config(argv, world_size=1).config, Launch())
    with CheckpointReader(iteration_folder(tmp_path, 100)) as reader:
        keys = [key for key in reader.shapes if key.kind == WEIGHT and key.name.endswith("qkv.bias")]
        assert len(keys) == 2
        for key in keys:
            assert reader.tensor(key).abs().max() < 0.5, key
