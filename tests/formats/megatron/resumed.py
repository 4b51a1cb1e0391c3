"""A run that goes on from a checkpoint in a folder."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from megazero.config.training_plan import training_plan_of
from megazero.config.tree.checkpoint import CheckpointConfig
from megazero.mpu.context import thread_context
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.resume.resume import resume
from megazero.train.resume.snapshot import Snapshots
from megazero.train.step.state import TrainState
from megazero.train.step.timers import Timers
from megazero.verify.record import micro_batches, verification_engine
from tests.layouts.layout import VOCABULARY
from tests.layouts.layout import Layout as Run


def goes_on(run: Run, folder: Path, first: int = 0) -> list[list[float]]:
    """Train two steps, saving after them if they are a run's first; return each rank's losses."""
    section = CheckpointConfig(save=str(folder), load=str(folder))
    own = run.config().model_copy(update={"checkpoint": section})
    plan, world = training_plan_of(own, run.dp), ThreadWorld(run.world_size)

    def work(rank: int) -> list[float]:
        context = thread_context(world, run.grid, rank)
        build = partial(verification_engine, context=context)
        resumed = resume(own, context, VOCABULARY, build) if first else None
        engine = resumed.engine if resumed else build(own, plan)
        state, losses = resumed.state if resumed else TrainState(), []
        assert state.iteration == first
        for _ in range(2):
            step = plan.at(state.progress)
            result = engine.train_step(micro_batches(own, context, step), state.progress, Timers())
            state = state.after(step, result.skipped)
            losses.append(float(result.losses.main))
        if not first:
            snapshots = Snapshots(own, plan, engine, context, VOCABULARY, own.training.seed)
            snapshots.save(state)
            snapshots.saver.close()
        return losses

    return world.run(work)
