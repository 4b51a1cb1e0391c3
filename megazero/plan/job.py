"""`PlannedJob`: a training to plan, with its grid, steps and vocabulary, and the contexts of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from megazero.config.compat.hub import local
from megazero.config.derive import PipelineShape, replicas_per_node
from megazero.config.steps import Progress, Step
from megazero.config.training_plan import TrainingPlan, training_plan_of
from megazero.config.tree.config import Config
from megazero.config.tree.tokenizer import TokenizerConfig
from megazero.errors import ConfigError
from megazero.models.batch import MicroBatch
from megazero.mpu.communicators import second_communicators
from megazero.mpu.context import GroupMaker, ParallelContext, make_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.launch import grid_of
from megazero.mpu.streams import STILL
from megazero.pipeline.actions import Program
from megazero.train.parts.chunks import programs_of, schedule_of
from megazero.train.parts.families import family_of
from megazero.train.parts.vocabulary import Vocabulary, build_vocabulary
from megazero.train.step.feed import crop

_FEW = 8  # a step of this many micro-batches or fewer is traced whole
_KNOWN_SIZES = MappingProxyType(
    {"GPT2BPETokenizer": 50257, "BertWordPieceLowerCase": 30522, "BertWordPieceCase": 28996}
)  # vocabularies of GPT-2 (Radford et al. 2019) and BERT (Devlin et al. 2019)


@dataclass(frozen=True, eq=False)
class PlannedJob:
    """A training to plan.

    Attributes:
        config: the configuration.
        ranks: the number of ranks.
        apart: whether devices have memory separate from the host's, as GPUs have.
        progress: the progress before the planned step; None plans the last step, which is the largest.
        device: the device of a traced rank's tensors: ``meta`` to plan for GPUs, whose kernels do not run, or
            ``cpu``, whose kernels do.
    """

    config: Config
    ranks: int
    apart: bool
    progress: Progress | None = None
    device: str = "meta"

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary; see `vocabulary_on_paper`."""
        return vocabulary_on_paper(self.config)

    @cached_property
    def grid(self) -> ProcessGrid:
        """The grid of the ranks."""
        return grid_of(self.config.parallel, self.ranks)

    @cached_property
    def training_plan(self) -> TrainingPlan:
        """The steps of the training, and its end."""
        return training_plan_of(self.config, self.grid.dp)

    @cached_property
    def step(self) -> Step:
        """The step that is planned."""
        if self.progress is not None:
            return self.training_plan.at(self.progress)
        last = self.training_plan.end.iteration - 1
        return self.training_plan.at(self.training_plan.before(max(last, 0)))

    @property
    def micro_batches(self) -> int:
        """A rank's micro-batches in the planned step; rows of a sample that is cut count singly."""
        return self.step.micro_batches

    @cached_property
    def program(self) -> Program:
        """The program of the planned step."""
        return self.program_of(self.micro_batches)

    def program_of(self, micro_batches: int) -> Program:
        """The program of a step of `micro_batches` micro-batches."""
        return programs_of(self.config.zero, PipelineShape.of(self.config)).train(micro_batches)

    @cached_property
    def traced_micro_batches(self) -> int:
        """The micro-batches to trace: all if few, else the fewest that have a first, middle and last."""
        shape = PipelineShape.of(self.config)
        for count in range(3, self.micro_batches) if self.micro_batches > _FEW else ():
            try:
                schedule_of(shape, count)
            except ConfigError:
                continue
            return count
        return self.micro_batches

    @cached_property
    def line(self) -> Sequence[int]:
        """The first rank of each pipeline stage."""
        return self.grid.members(0, ("pp",))

    def ranks_of(self, stage: int) -> Sequence[int]:
        """The ranks of a pipeline stage."""
        return self.grid.members(self.line[stage], ("dp", "cp", "tp"))

    def context(self, rank: int, maker: GroupMaker) -> ParallelContext:
        """The context of a rank; `maker` makes its groups of more than one rank."""
        zero = self.config.zero
        seconds = second_communicators(self.grid, zero.stage) if self.apart else ()
        nodes = replicas_per_node(zero)
        context = make_context(
            self.grid, rank, torch.device(self.device), maker, node_size=nodes, seconds=seconds
        )
        return replace(context, streams=STILL) if self.apart else context

    def batches(self, context: ParallelContext, count: int) -> list[MicroBatch]:
        """`count` micro-batches of the planned step, of random samples of full length."""
        config, step, size = self.config, self.step, self.config.batch.micro_batch_size
        family = family_of(config.model)
        length = step.sequence_length if step.rows == 1 else config.model.seq_length
        collate = family.samples.collate(config, self.vocabulary.size, context, config.training.seed)
        rng, batches = np.random.default_rng(0), []
        for first in range(0, size * count, size):
            # The first of several random samples is the longest.
            drawn = [family.samples.random_arrays(rng, 1, length, self.vocabulary.size) for _ in range(size)]
            arrays = {name: np.concatenate([sample[name] for sample in drawn]) for name in drawn[0]}
            samples = tuple(range(first, first + size))
            batches.append(collate(*crop(arrays, samples, step.sequence_length, step.rows)))
        return batches


def is_apart(config: Config) -> bool:
    """Whether the training's devices have memory separate from the host's."""
    device = config.parallel.device
    return device == "cuda" or (device == "auto" and torch.cuda.is_available())


def vocabulary_on_paper(config: Config) -> Vocabulary:
    """The vocabulary of a planned training; well-known tokenizers' sizes are known without their files.

    Raises:
        ConfigError: the vocabulary's size is unknown.
        DataError: the tokenizer's files are missing or unsuitable.
    """
    size, section = config.model.vocab_size, config.tokenizer
    paths = (section.vocab_file, section.merge_file, local(section.tokenizer_model))
    if size is None and not any(path is not None and Path(path).exists() for path in paths):
        size = _KNOWN_SIZES.get(section.tokenizer_type or "")
    if size is not None:
        model = config.model.model_copy(update={"vocab_size": size})
        config = config.model_copy(update={"tokenizer": TokenizerConfig(), "model": model})
    return build_vocabulary(config)
