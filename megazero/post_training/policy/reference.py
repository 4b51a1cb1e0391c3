"""The reference: an earlier model on the same layout, never trained, which scores a rollout's answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace

import torch

from megazero.checkpoint.reader import CheckpointReader
from megazero.config.derive import PipelineShape
from megazero.config.tree.config import Config
from megazero.config.tree.zero import ZeroConfig
from megazero.errors import CheckpointError, DamagedCheckpointError
from megazero.formats.foreign import ForeignModel, open_foreign
from megazero.models.batch import M
from megazero.models.language_model import LanguageModel
from megazero.models.objective import LOGS, AnswerBatch, ObjectiveChunk
from megazero.mpu.context import ParallelContext
from megazero.pipeline.chunk import Chunk
from megazero.pipeline.executor import Evaluator
from megazero.post_training.policy.objective import PolicyObjective
from megazero.train.parts.chunks import programs_of
from megazero.train.parts.vocabulary import Vocabulary
from megazero.train.resume.fit import check_model
from megazero.train.resume.saved import Checkpoint, SavedModel, read_saved_model
from megazero.train.resume.trained import load_chunks


def load_reference(
    config: Config, vocabulary: Vocabulary, context: ParallelContext
) -> dict[int, LanguageModel]:
    """Load this rank's chunks of the reference; every rank calls this.

    Its weights are its own: no update reaches them.

    Raises:
        CheckpointError: on every rank: it cannot be read, or is another model than the trained one.
    """
    folder = config.policy.reference or config.checkpoint.load_hf
    assert folder is not None, "a rule asks for the reference's folder"
    with opened(config, folder, context) as (saved, reader):
        check_model(config.model, vocabulary.size, saved, reader.folder)
        chunks = load_chunks(config, vocabulary, context, reader)
    return {number: LanguageModel.of(chunk.requires_grad_(False)) for number, chunk in chunks.items()}


@contextmanager
def opened(
    config: Config, folder: str, context: ParallelContext
) -> Iterator[tuple[SavedModel, CheckpointReader | ForeignModel]]:
    """Open the model in a run's folder, a checkpoint or one of Hugging Face; every rank calls this.

    Raises:
        CheckpointError: on every rank: it cannot be read.
    """
    try:
        if foreign := open_foreign(str(config.data.object_cache.model_folder(folder, weights=True)), None):
            with closing(foreign):
                yield read_saved_model(foreign.facts, foreign.folder, foreign.shapes), foreign
        else:
            checkpoint = Checkpoint.at(folder, config.checkpoint.verify_checkpoint, context)
            yield checkpoint.model, checkpoint
    except DamagedCheckpointError as error:
        # As DamagedCheckpointError, `resume` would take it for damage to the run's own checkpoint.
        raise CheckpointError(str(error)) from error


def score(
    config: Config,
    context: ParallelContext,
    reference: dict[int, LanguageModel],
    objective: PolicyObjective,
    batches: Sequence[AnswerBatch],
) -> list[torch.Tensor]:
    """The log-probability of each label under the reference, float32 [b, s] for each batch on the last stage.

    As the trained model's: at the rollout's temperature, among the tokens that it drew among.
    """
    alone = replace(objective, estimator=None)
    chunks = {number: ObjectiveChunk.of(chunk, alone) for number, chunk in reference.items()}
    outputs = evaluated(config, context, chunks, batches)
    return [outputs[number][LOGS].t() for number in sorted(outputs) if LOGS in outputs[number]]


def evaluated(
    config: Config, context: ParallelContext, chunks: Mapping[int, Chunk[M]], batches: Sequence[M]
) -> Mapping[int, Mapping[str, torch.Tensor]]:
    """The outputs of each micro-batch that this rank has, of a model that is whole on each replica."""
    # Whatever ZeRO shards of the policy, its program gathers nothing.
    programs = programs_of(ZeroConfig(), PipelineShape.of(config))
    evaluator = Evaluator(chunks, context.pp, context.device)
    return evaluator.evaluate(programs.evaluate(len(batches)), batches).outputs
