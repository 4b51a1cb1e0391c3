"""Loads a teacher for distillation: opens its checkpoint, checks that it fits, and loads this rank's chunks.

The teacher is distributed over tensor, pipeline and expert ranks as the student is, from a checkpoint
of any layout. It is never trained or saved, and ZeRO does not shard it.
"""

from __future__ import annotations

from collections.abc import Sequence

from megazero.config.derive import PipelineShape
from megazero.config.rules.table import check
from megazero.config.training_plan import TrainingPlan
from megazero.config.tree.checkpoint import CheckpointConfig
from megazero.config.tree.config import Config
from megazero.config.tree.distillation import DistillationConfig
from megazero.config.tree.model import ModelConfig
from megazero.errors import CheckpointError, ConfigError, DamagedCheckpointError
from megazero.mpu.context import ParallelContext
from megazero.train.parts.families import family_of
from megazero.train.parts.vocabulary import Vocabulary
from megazero.train.resume.saved import Checkpoint, SavedModel
from megazero.train.resume.trained import load_chunks
from megazero.train.step.distillation import Teacher

_ASKED = "_teacher"
"""Suffix of settings that say what a setting of the teacher's model must be."""


def load_teacher(
    config: Config, training_plan: TrainingPlan, vocabulary: Vocabulary, context: ParallelContext
) -> Teacher | None:
    """Load this rank's chunks of the teacher; None if no further step needs it. Every rank calls this.

    Raises:
        CheckpointError: on every rank: its checkpoint cannot be read, or has another kind of model, another
            vocabulary, or another shape than the settings say.
        ConfigError: the teacher cannot be distributed as the student is.
    """
    end = config.distillation.kd_train_iters
    over = end is not None and training_plan.steps.start.iteration >= end
    if over or config.training.skip_train:
        return None
    try:
        return _opened(config, vocabulary, context)
    except DamagedCheckpointError as error:
        # As DamagedCheckpointError, `resume` would take it for damage to the student's checkpoint.
        raise CheckpointError(str(error)) from error


def _opened(config: Config, vocabulary: Vocabulary, context: ParallelContext) -> Teacher:
    load = config.distillation.load_teacher
    assert load is not None, "a rule requires the teacher's folder"
    checkpoint = Checkpoint.at(load, config.checkpoint.verify_checkpoint, context)
    saved, folder, model = checkpoint.model, checkpoint.folder, checkpoint.model.settings
    if wrong := _unfit(config, model, saved, vocabulary):
        raise CheckpointError(f"`load_teacher` must fit this training, but {folder} has {', '.join(wrong)}")
    beside = _beside(config, model)
    if problems := check(beside, context.world_size):
        raise ConfigError([f"the teacher {folder}: {problem}" for problem in problems])
    chunks = load_chunks(beside, vocabulary, context, checkpoint)
    for chunk in chunks.values():
        for parameter in chunk.parameters():
            parameter.requires_grad_(False)
    return Teacher(chunks, family_of(model).flops_per_token(beside, vocabulary) / 3, folder)


def _unfit(config: Config, model: ModelConfig, saved: SavedModel, vocabulary: Vocabulary) -> Sequence[str]:
    """The reasons why a model cannot be the teacher, as `NAME VALUE (expected value)`."""
    wrong = []
    if saved.vocab_size != vocabulary.size:
        wrong.append(f"vocab_size {saved.vocab_size} (the student's is {vocabulary.size})")
    if model.num_classes is not None or model.family != config.model.family:
        kind = "a classifier" if model.num_classes is not None else f"family {model.family}"
        wrong.append(f"{kind} (the student is a {config.model.family} for pretraining)")
    for setting, asked in config.distillation:
        name = setting.removesuffix(_ASKED)
        if name == setting or name not in ModelConfig.model_fields:
            continue
        actual = getattr(model, name)
        if asked not in (None, (), actual):
            wrong.append(f"{name} {_shown(actual)} (asked for: {_shown(asked)})")
    return wrong


def _beside(config: Config, model: ModelConfig) -> Config:
    """The teacher's configuration, with the student's number of chunks, sequences and padded vocabulary."""
    own = {
        "seq_length": config.model.seq_length,
        # Only learned positions have a maximum.
        "max_position_embeddings": (
            model.positions if model.position_embedding_type == "learned_absolute" else None
        ),
        "make_vocab_size_divisible_by": config.model.make_vocab_size_divisible_by,
        "pad_vocab_size_to": config.model.pad_vocab_size_to,
    }
    shape = PipelineShape.of(config)
    several = shape.kind != "zb-v" and shape.chunks_per_stage > 1
    layout = {
        "pipeline_partition": "uniform",
        "num_layers_per_virtual_pipeline_stage": None,
        "num_virtual_stages_per_pipeline_rank": shape.chunks_per_stage if several else None,
    }
    if not model.num_experts:
        layout |= {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": None}
    sections = {
        "model": model.model_copy(update=own),
        "parallel": config.parallel.model_copy(update=layout),
        "distillation": DistillationConfig(),
        "checkpoint": CheckpointConfig(),
    }
    return config.model_copy(update=sections)


def _shown(value: object) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)
