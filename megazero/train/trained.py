"""A trained model, loaded from a checkpoint for use without training."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megazero.checkpoint import CheckpointReader, Part, candidates, parts_of_parameters, together
from megazero.config.tree import Config, ParallelConfig, RecomputeConfig, ZeroConfig
from megazero.data.tokenizers import Tokenizer
from megazero.errors import CheckpointError, ConfigError, DamagedCheckpointError
from megazero.mpu import Launch, ParallelContext, join
from megazero.train.chunks import Chunks, build_chunks
from megazero.train.programs import schedule_of
from megazero.train.resume import check_tensors
from megazero.train.state_json import SavedModel, saved_model
from megazero.train.vocabulary import build_vocabulary


@dataclass(frozen=True)
class Sizes:
    """How many ranks each axis has; None takes the size used in training, or 1 in a single process."""

    tensor: int | None = None
    pipeline: int | None = None


@dataclass(frozen=True)
class Loaded:
    """A trained model on this rank of the job.

    Attributes:
        context: this rank's place in the job.
        chunks: this rank's parts of the model.
        stage_of: chunk of the whole model -> the pipeline stage that holds it.
        tokenizer: the tokenizer that the model was trained with.
        remarks: remarks about checkpoints that were passed over.
    """

    context: ParallelContext
    chunks: Chunks
    stage_of: tuple[int, ...]
    tokenizer: Tokenizer
    remarks: tuple[str, ...]


def load_for_inference(directory: str, launch: Launch, sizes: Sizes | None = None) -> Loaded:
    """The newest intact model in a run's folder, ready to generate, on this rank of the job.

    Raises:
        CheckpointError: there is none.
        ConfigError: the model was trained without a tokenizer, or the sizes do not fit.
    """
    found = candidates(directory)
    if not found.folders:
        raise CheckpointError(f"`load` must hold a checkpoint, but {directory} has none; check the path")
    remarks = list(found.remarks)
    context = None
    for folder in found.folders:
        try:
            reader = CheckpointReader(folder)
            config = _config_of(saved_model(reader), launch, sizes or Sizes(), str(folder))
            context = context or join(config.parallel, launch)
            vocabulary = build_vocabulary(config)
            chunks = build_chunks(config, vocabulary, context, context.device)
            parts = parts_of_parameters((p for c in chunks.values() for p in c.parameters()), context)
            together(context, partial(_read, reader, parts), f"load {folder}")
        except DamagedCheckpointError as error:
            remarks.append(f"passed over {folder}: {error}")
            continue
        return Loaded(context, chunks, schedule_of(config).stage_of, vocabulary.tokenizer, tuple(remarks))
    raise DamagedCheckpointError(
        f"`load` must hold a whole checkpoint, but {directory} has none: " + "; ".join(remarks)
    )


def _read(reader: CheckpointReader, parts: list[Part]) -> None:
    check_tensors(reader, parts, reader.folder)
    reader.read(parts)


def _config_of(saved: SavedModel, launch: Launch, sizes: Sizes, folder: str) -> Config:
    config = saved.config()
    if config.model.num_classes is not None:
        raise ConfigError(
            f"`load` must hold a model that continues text, but {folder} is a classifier; "
            "`finetune.py --epochs 0 --pretrained-checkpoint` evaluates it"
        )
    if config.tokenizer.tokenizer_type is None:
        raise ConfigError(
            f"`tokenizer_type` must be known to generate text, but {folder} was trained without one"
        )
    trained = config.parallel
    alone = launch.world_size == 1
    # During generation a sequence is one token long and cannot be split over ranks.
    parallel = ParallelConfig(
        tensor_model_parallel_size=sizes.tensor or (1 if alone else trained.tensor_model_parallel_size),
        pipeline_model_parallel_size=sizes.pipeline or (1 if alone else trained.pipeline_model_parallel_size),
        distributed_backend=trained.distributed_backend,
    )
    return config.model_copy(
        update={"parallel": parallel, "zero": ZeroConfig(), "recompute": RecomputeConfig()}
    )
