"""The table of model families: all that training, verification and conversion need to know about a model.

A family is a value. Code outside `models/`, `data/` and this table never names a family: it calls `family_of`
with the model section of the configuration. docs/decisions/0002-families-are-values.md sketches
the rows to come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType
from typing import Any, Generic

import numpy as np

from megazero.config.tree.config import Config
from megazero.config.tree.model import ModelConfig
from megazero.data.build import Datasets
from megazero.data.from_config import bert_datasets, gpt_datasets, t5_datasets
from megazero.formats.hf.architecture import Architecture
from megazero.formats.hf.architectures import DECODERS, ENCODER_DECODERS, ENCODERS
from megazero.layers.inputs import Skipping
from megazero.models.batch import Collate, M, MicroBatch, TextCollate, random_text
from megazero.models.bert import BERT, bert_blocks
from megazero.models.bert_batch import BertCollate, random_samples
from megazero.models.chunk import Block, ModelChunk, Slice, Tie
from megazero.models.classifier import Classifier, FirstTokenClassifier, LastTokenClassifier
from megazero.models.classifier_batch import ClassifierCollate, LabelledBatch, random_labelled
from megazero.models.gpt import GPT, gpt_blocks
from megazero.models.pairs.batch import PairCollate, random_pairs
from megazero.models.pairs.t5 import T5, t5_blocks
from megazero.mpu.context import ParallelContext
from megazero.spec.model import ModelSpec
from megazero.train.parts.vocabulary import Vocabulary

Sizes = tuple[int | None, int | None, int | None]
"""Number of samples for training, validation and test."""


@dataclass(frozen=True)
class FamilyModels(Generic[M]):
    """How models of a family are made, whose micro-batches are of type `M`.

    Attributes:
        blocks: (configuration, rows of the padded vocabulary) -> the blocks that the model consists of, in
            order; layers may differ.
        chunk: builds a slice of that list of blocks.
        ties: the weights that several blocks of a model of this shape use.
        causal: whether a position attends only to itself and earlier ones, in all layers.
        masks_keys: whether a mask of keys hides padding; otherwise it has a document of its own.
    """

    blocks: Callable[[Config, int], tuple[Block, ...]]
    chunk: Callable[[Slice], ModelChunk[M]]
    ties: Callable[[ModelSpec], tuple[Tie, ...]]
    causal: bool = False
    masks_keys: bool = False


@dataclass(frozen=True)
class FamilySamples(Generic[M]):
    """The samples that models of a family read, in micro-batches of type `M`.

    Attributes:
        collate: (configuration, vocabulary size, this rank, dropout seed or None) -> a function that checks
            arrays and turns them into micro-batches.
        datasets: (configuration, vocabulary, samples of each split) -> the three splits.
        objective: (configuration) -> the settings that decide which tokens of a sample its loss is of.
        random_arrays: (generator, number of sequences, tokens in each, vocabulary size) -> arrays like a
            dataset's, with uneven loss masks, for checks and measurements.
    """

    collate: Callable[[Config, int, ParallelContext, int | None], Collate[M]]
    datasets: Callable[[Config, Vocabulary, Sizes], Datasets]
    objective: Callable[[Config], dict[str, float]]
    random_arrays: Callable[[np.random.Generator, int, int, int], dict[str, np.ndarray]]


@dataclass(frozen=True)
class Family(Generic[M]):
    """A kind of model, whose micro-batches are of type `M`.

    Attributes:
        name: its name, as in `model.family` of the configuration.
        models: how its models are made.
        samples: what they read.
        architectures: the architectures in transformers that its models can be converted from and to, those
            of its classifiers included.
        verb: the command of `megazero` that shows what a pretrained model has learnt.
        classifier: the class of the family's fine-tuned models; None if there is none.
    """

    name: str
    models: FamilyModels[M]
    samples: FamilySamples[M]
    architectures: tuple[Architecture, ...]
    verb: str
    classifier: type[Classifier] | None

    def flops_per_token(self, config: Config, vocabulary: Vocabulary) -> float:
        """FLOPs that training on one token needs, forward and backward.

        Backward makes two matrix products for each one in forward: the gradients of both factors. What
        activation recompute computes again is not counted, because the model does not need it.
        """
        return 3.0 * sum(block.flops for block in self.models.blocks(config, vocabulary.padded))


def _share_masked(config: Config) -> dict[str, float]:
    return {"mask_prob": config.data.mask_prob}


# Rows are checked as they are written. Of a family chosen at run time only its name is known, not the type of
# its micro-batches; what its `collate` makes is what its chunks take.
_ROWS: tuple[Family[Any], ...] = (
    Family(
        name="gpt",
        models=FamilyModels(gpt_blocks, GPT, GPT.ties, causal=True),
        samples=FamilySamples(TextCollate.of, gpt_datasets, lambda config: {}, random_text),
        architectures=DECODERS,
        verb="generate",
        classifier=LastTokenClassifier,
    ),
    Family(
        name="bert",
        models=FamilyModels(bert_blocks, BERT, BERT.ties),
        samples=FamilySamples(BertCollate.of, bert_datasets, _share_masked, random_samples),
        architectures=ENCODERS,
        verb="fill-mask",
        classifier=FirstTokenClassifier,
    ),
    Family(
        name="t5",
        models=FamilyModels(t5_blocks, T5, T5.ties, masks_keys=True),
        samples=FamilySamples(PairCollate.of, t5_datasets, _share_masked, random_pairs),
        architectures=ENCODER_DECODERS,
        verb="generate",
        classifier=None,
    ),
)

FAMILIES = MappingProxyType({row.name: row for row in _ROWS})
"""Name -> family."""


def family_of(model: ModelConfig) -> Family[MicroBatch]:
    """The family of a model of this shape: that of its name, or the classifiers derived from it."""
    if model.num_classes is None:
        return FAMILIES[model.family]
    classifiers: Family[Any] = classifiers_of(model.family, model.num_classes)
    return classifiers


def classifiers_of(name: str, num_classes: int) -> Family[LabelledBatch]:
    """The models that a family's pretrained models become when they are fine-tuned.

    Their samples come from labelled files, which `train/finetuning` reads.
    """
    family = FAMILIES[name]
    classifier = family.classifier
    assert classifier is not None, "rules refuse to classify with this family"
    return Family(
        name=family.name,
        models=FamilyModels(classifier.blocks_of, classifier, classifier.ties, causal=classifier.causal),
        samples=FamilySamples(
            partial(ClassifierCollate.of, classifier.causal),
            family.samples.datasets,
            family.samples.objective,
            partial(random_labelled, num_classes),
        ),
        architectures=tuple(architecture for architecture in family.architectures if architecture.classifies),
        verb=family.verb,
        classifier=classifier,
    )


class TokenFlops:
    """FLOPs of forward and backward for one token, by the length of its sequence and what the step skips.

    Counts of `account/flops.py`. Each length is counted once.

    Args:
        config: the run's configuration.
        vocabulary: the vocabulary that the model's head predicts.
    """

    def __init__(self, config: Config, vocabulary: Vocabulary):
        self._config = config
        self._vocabulary = vocabulary
        self._blocks = cache(self._count)

    def __call__(self, sequence_length: int, skipping: Skipping) -> float:
        blocks = self._blocks(sequence_length)
        total = sum(block.flops for block in blocks if not isinstance(block.part, int))
        for number, block in enumerate(blocks):
            if not isinstance(block.part, int):
                continue
            flops, kept = block.flops, skipping.kept_by(block.part, sequence_length)
            if kept < sequence_length:
                flops = self._blocks(kept)[number].flops * kept / sequence_length
            total += flops * (skipping.scale_of(block.part) != 0.0)
        return 3.0 * total

    def _count(self, length: int) -> tuple[Block, ...]:
        """The blocks of a model of sequences of this length."""
        model = self._config.model.model_copy(update={"seq_length": length})
        whole = self._config.model_copy(update={"model": model})
        return family_of(model).models.blocks(whole, self._vocabulary.padded)
