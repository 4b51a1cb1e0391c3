"""A teacher for a shrunk student: a model of the same kind, twice as deep, initialized by another seed."""

from __future__ import annotations

from megazero.config.steps import Progress
from megazero.config.training_plan import training_plan_of
from megazero.config.tree.checkpoint import CheckpointConfig
from megazero.config.tree.config import Config
from megazero.config.tree.curriculum import CurriculumConfig
from megazero.config.tree.data_sampling import DataSamplingConfig
from megazero.config.tree.distillation import DistillationConfig
from megazero.config.tree.parallel import ParallelConfig
from megazero.config.tree.recompute import RecomputeConfig
from megazero.config.tree.zero import ZeroConfig
from megazero.mpu.context import solo_context
from megazero.train.resume.snapshot import Snapshots
from megazero.train.step.state import TrainState
from megazero.verify.record import verification_engine
from megazero.verify.sampling import vocabulary_size


def with_teacher(config: Config, folder: str) -> Config:
    """Save a teacher in `folder`, and return the student's configuration with that teacher.

    Raises:
        CheckpointError: the teacher cannot be saved there.
    """
    model = config.model.model_copy(update={"num_layers": 2 * config.model.num_layers})
    changes = {
        "model": model,
        "parallel": ParallelConfig(),
        "zero": ZeroConfig(),
        "recompute": RecomputeConfig(),
        "training": config.training.model_copy(update={"seed": config.training.seed + 1}),
        "checkpoint": CheckpointConfig(save=folder),
        "distillation": DistillationConfig(),
        "curriculum": CurriculumConfig(),
        "data_sampling": DataSamplingConfig(),
    }
    teacher, context = config.model_copy(update=changes), solo_context()
    training_plan = training_plan_of(teacher, 1)
    engine = verification_engine(teacher, training_plan, context)
    snapshots = Snapshots(
        teacher, training_plan, engine, context, vocabulary_size(teacher), teacher.training.seed
    )
    try:
        snapshots.save(TrainState(Progress(1)))
    finally:
        snapshots.saver.close()
    distillation = {
        "load_teacher": folder,
        **dict.fromkeys(("num_layers_teacher", "hidden_size_teacher", "num_attention_heads_teacher")),
        "num_experts_teacher": (),
    }
    return config.model_copy(update={"distillation": config.distillation.model_copy(update=distillation)})
