"""Loads a trained model from a checkpoint for inference."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from megazero.checkpoint.folder import candidates
from megazero.checkpoint.reader import CheckpointReader
from megazero.checkpoint.saver import together
from megazero.checkpoint.shards import parts_of_parameters
from megazero.config.derive import PipelineShape
from megazero.config.tree.config import Config
from megazero.config.tree.parallel import ParallelConfig
from megazero.config.tree.recompute import RecomputeConfig
from megazero.config.tree.zero import ZeroConfig
from megazero.data.tokenizers.base import Tokenizer
from megazero.errors import CheckpointError, ConfigError, DamagedCheckpointError, DataError
from megazero.formats.coded import keep_codes
from megazero.formats.foreign import ForeignModel, open_foreign
from megazero.formats.megatron.reader import ImportOptions
from megazero.models.batch import Collate, MicroBatch
from megazero.moe.loads import RouterLoads
from megazero.mpu.context import ParallelContext, with_whole_sequences
from megazero.mpu.grid import stage_of_one_model
from megazero.mpu.group import Group
from megazero.mpu.launch import Launch, grid_of, join
from megazero.train.parts.chunks import Chunks, build_chunks, schedule_of
from megazero.train.parts.families import family_of
from megazero.train.parts.vocabulary import Vocabulary, build_vocabulary
from megazero.train.resume.fit import check_tensors
from megazero.train.resume.keepers import Routers
from megazero.train.resume.saved import Checkpoint, SavedModel, read_saved_model


@dataclass(frozen=True)
class AxisSizes:
    """The number of ranks of each axis; None takes training's size, or 1 in a single process."""

    tensor: int | None = None
    pipeline: int | None = None
    context: int = 1
    expert: int = 1
    replicas: bool = False  # whether the ranks that these sizes leave hold further copies of the model


@dataclass(frozen=True)
class Loaded:
    """A trained model on this rank of the job.

    Attributes:
        context: this rank's place in the job.
        chunks: this rank's chunks of the model.
        stage_of: chunk of the whole model -> its pipeline stage.
        tokenizer: the tokenizer that the model was trained with.
        remarks: remarks about checkpoints that were skipped.
        collate: turns a dataset's arrays into micro-batches, without dropout.
        iteration: that of the checkpoint.
    """

    context: ParallelContext
    chunks: Chunks
    stage_of: tuple[int, ...]
    tokenizer: Tokenizer
    remarks: tuple[str, ...]
    collate: Collate[MicroBatch]
    iteration: int = 0

    @property
    def sharers(self) -> Group:
        """The ranks with the same chunks, which share the key-value cache."""
        return self.context.groups["cp"]


def load_for_inference(
    directory: str,
    launch: Launch,
    sizes: AxisSizes | None = None,
    *,
    verb: str = "generate",
    options: ImportOptions | None = None,
    step: int | None = None,
) -> Loaded:
    """Load a model on this rank of the job: the newest intact one in a run's folder, or another library's.

    Args:
        verb: the command that loads it, as in `Family.verb`.
        options: how to read the folder of another library.
        step: the iteration to load; None for the newest.

    Raises:
        CheckpointError: there is none.
        ConfigError: the model is for another command, was trained without a tokenizer, or the sizes do not
            fit.
        DataError: the tokenizer's files are missing.
    """
    sizes = sizes or AxisSizes()
    if foreign := open_foreign(directory, options, step):
        with closing(foreign):
            saved = read_saved_model(foreign.facts, foreign.folder, foreign.shapes)
            config = _config_of(saved, launch, sizes, str(foreign.folder), verb)
            return _load(config, join(config.parallel, launch), foreign, foreign.remarks, foreign.iteration)
    checkpoints = candidates(directory, step)
    if not checkpoints.folders:
        raise CheckpointError(f"`load` must hold a checkpoint, but {directory} has none; check the path")
    remarks = list(checkpoints.remarks)
    context = None
    for folder in checkpoints.folders:
        try:
            checkpoint = Checkpoint(folder, state=checkpoints.states.get(folder))
            config = _config_of(checkpoint.model, launch, sizes, str(folder), verb)
            context = context or join(config.parallel, launch)
            return _load(config, context, checkpoint, remarks, checkpoint.manifest.iteration)
        except DamagedCheckpointError as error:
            remarks.append(f"passed over {folder}: {error}")
    raise DamagedCheckpointError(
        f"`load` must hold a whole checkpoint, but {directory} has none: " + "; ".join(remarks)
    )


def _load(
    config: Config,
    context: ParallelContext,
    reader: CheckpointReader | ForeignModel,
    remarks: Iterable[str],
    iteration: int,
) -> Loaded:
    vocabulary, whole = build_vocabulary(config), with_whole_sequences(context)
    left: list[str] = []
    chunks = load_chunks(config, vocabulary, whole, reader, left.extend)
    assert vocabulary.tokenizer is not None, "a model without a tokenizer was refused"
    collate = family_of(config.model).samples.collate(config, vocabulary.size, whole, None)
    stage_of = schedule_of(PipelineShape.of(config)).stage_of
    return Loaded(context, chunks, stage_of, vocabulary.tokenizer, (*remarks, *left), collate, iteration)


def load_chunks(
    config: Config,
    vocabulary: Vocabulary,
    context: ParallelContext,
    reader: CheckpointReader | ForeignModel,
    codes: Callable[[Iterable[str]], None] | None = None,
) -> Chunks:
    """Build this rank's chunks of the configured model with a checkpoint's weights; every rank calls this.

    With `codes`, quantized weights stay codes; it takes remarks on those that do not.

    Raises:
        CheckpointError: on every rank: tensors are missing or have another shape.
    """
    chunks = build_chunks(config, vocabulary, context, context.device)
    if codes is not None and isinstance(reader, ForeignModel):
        codes(together(context, lambda: keep_codes(chunks.values(), reader.source, context), "read codes"))
    parts = parts_of_parameters((p for c in chunks.values() for p in c.parameters()), context)
    routers = [router for chunk in chunks.values() for router in chunk.routers()]
    loads = RouterLoads(routers, context, experts=bool(config.model.num_experts))
    parts += Routers(loads.state(), context).parts_from(reader)

    def read() -> None:
        check_tensors(reader, parts, reader.folder)
        reader.read(parts)

    together(context, read, f"load {reader.folder}")
    return chunks


def _config_of(saved: SavedModel, launch: Launch, sizes: AxisSizes, folder: str, verb: str) -> Config:
    config = saved.config()
    if config.model.num_classes is not None:
        raise ConfigError(
            f"`--load` must hold a model for `megazero {verb}`, but {folder} holds a classifier; "
            "`finetune.py --epochs 0 --pretrained-checkpoint` evaluates it"
        )
    family = family_of(config.model)
    if family.verb != verb:
        raise ConfigError(
            f"`--load` must hold a model for `megazero {verb}`, but {folder} holds one of the family "
            f"{family.name}; use `megazero {family.verb}`"
        )
    if config.tokenizer.tokenizer_type is None:
        raise ConfigError(
            f"`tokenizer_type` must be known to read and write text, but {folder} was trained without one"
        )
    missing = [path for path in config.tokenizer.files.values() if path.is_absolute() and not path.exists()]
    if missing:
        raise DataError(
            f"the tokenizer of {folder} must be where it was in training, or in {Path(folder).parent}, but "
            f"{' and '.join(map(str, missing))} is at neither place; copy it to that folder"
        )
    trained = config.parallel
    alone = launch.world_size == 1
    # During generation a sequence is one token long and cannot be split over ranks.
    parallel = ParallelConfig(
        tensor_model_parallel_size=sizes.tensor or (1 if alone else trained.tensor_model_parallel_size),
        pipeline_model_parallel_size=sizes.pipeline or (1 if alone else trained.pipeline_model_parallel_size),
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.expert,
    )
    grid = grid_of(parallel, launch.world_size)
    one = grid.pp * stage_of_one_model(grid, grid.cp)
    if not sizes.replicas and grid.world_size > one:
        raise ConfigError(
            f"`world size` must be {one} for one model of these parallel sizes, but is {grid.world_size}; "
            f"`megazero {verb}` has no use for more, so start fewer ranks"
        )
    # Without padding of the vocabulary, which only training needs.
    model = config.model.model_copy(update={"make_vocab_size_divisible_by": 1, "pad_vocab_size_to": None})
    changed = {"model": model, "parallel": parallel, "zero": ZeroConfig(), "recompute": RecomputeConfig()}
    return config.model_copy(update=changed)
