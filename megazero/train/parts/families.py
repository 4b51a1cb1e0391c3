"""The table of model families: what training, verification and conversion need to know about a model.

A family is a value. Code outside `models/`, `data/` and this table never names a family: it calls `family_of`
with the model section of the configuration (docs/decisions/0002-families-are-values.md).
"""

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
from megazero.formats.hf.architectures import DECODERS, ENCODER_DECODERS, ENCODERS, SCORERS
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
    """How to build models of a family, whose micro-batches are of type `M`.

    Attributes:
        blocks: (configuration, padded vocabulary size) -> the model's blocks, in order.
        chunk: builds a contiguous part of these blocks.
        ties: spec -> the tied weights of a model.
        causal: whether attention is causal in all layers.
        masks_keys: whether a key mask hides padding; otherwise padding is a document of its own.
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
        collate: (configuration, vocabulary size, this rank, dropout seed or None) -> a function from arrays
            to micro-batches.
        datasets: (configuration, vocabulary, number of samples of each split) -> the three splits.
        objective: configuration -> the settings that decide which tokens of a sample have a loss.
        random_arrays: (generator, number of sequences, their length, vocabulary size) -> random arrays like
            a dataset's, with uneven loss masks, for checks and measurements.
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
        models: how to build its models.
        samples: the samples that they read.
        architectures: architectures of transformers that its models, and classifiers, can be converted from
            and to.
        verb: the command of `megazero` that demonstrates a pretrained model.
        classifier: the class of its fine-tuned models, or None.
    """

    name: str
    models: FamilyModels[M]
    samples: FamilySamples[M]
    architectures: tuple[Architecture, ...]
    verb: str
    classifier: type[Classifier] | None

    def flops_per_token(self, config: Config, vocabulary: Vocabulary) -> float:
        """FLOPs of training on one token, forward and backward.

        Backward has two matrix products for each one of forward, one for each factor's gradient. Activation
        recompute is not counted, because the model does not need it.
        """
        return 3.0 * sum(block.flops for block in self.models.blocks(config, vocabulary.padded))


def _share_masked(config: Config) -> dict[str, float]:
    return {"mask_prob": config.data.mask_prob}


# `Any`, because the type of a family's micro-batches is unknown at run time; mypy checks that each row's
# `collate` and `chunk` agree.
_ROWS: tuple[Family[Any], ...] = (
    Family(
        name="gpt",
        models=FamilyModels(gpt_blocks, GPT, GPT.ties, causal=True),
        samples=FamilySamples(TextCollate.of, gpt_datasets, lambda config: {}, random_text),
        architectures=DECODERS + SCORERS,
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
    """The family of a model: the one of its name, or of classifiers derived from it."""
    if model.num_classes is None:
        return FAMILIES[model.family]
    classifiers: Family[Any] = classifiers_of(model.family, model.num_classes)
    return classifiers


def classifiers_of(name: str, num_classes: int) -> Family[LabelledBatch]:
    """The family of a family's fine-tuned models, which read labelled samples (see `train/finetuning`)."""
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
    """FLOPs of forward and backward for one token, given the sequence length and what the step skips."""

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
        """The blocks of the model for sequences of this length."""
        model = self._config.model.model_copy(update={"seq_length": length})
        whole = self._config.model_copy(update={"model": model})
        return family_of(model).models.blocks(whole, self._vocabulary.padded)
