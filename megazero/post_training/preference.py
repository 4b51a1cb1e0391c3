"""Preferences: pairs of answers, compared with what the initial weights made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from megazero.checkpoint.disk import Disk
from megazero.config.tree.config import Config
from megazero.data.build_report import ProgressLog
from megazero.data.preferences.dataset import PairSamples
from megazero.data.range_checks import check_token_ids
from megazero.models.batch import (
    Collate,
    Columns,
    Places,
    SampleIndex,
    column_multiple,
    documents_on,
    tensor_of,
)
from megazero.models.objective import AnswerBatch
from megazero.models.targets import Targets
from megazero.mpu.context import ParallelContext
from megazero.mpu.rng import sample_keys
from megazero.post_training.files import read_splits
from megazero.post_training.losses import CHOSEN_TOKENS, PAIRS, PreferenceLoss
from megazero.post_training.outputs import checked, outputs_of
from megazero.post_training.reference import Reference, sums_of
from megazero.post_training.task import AnswerTask, Splits
from megazero.train.assemble import Run
from megazero.train.finetuning.epochs import feed_of
from megazero.train.observe.evaluation import PeriodicEvaluation
from megazero.train.observe.metrics import EvalMetrics
from megazero.train.parts.vocabulary import Vocabulary
from megazero.train.resume.resume import Resumed
from megazero.train.step.feed import Feeds


@dataclass(frozen=True)
class PairCollate:
    """Turns the arrays of pairs into an `AnswerBatch`, without columns that hold only padding.

    Attributes:
        multiple: the number of columns is a multiple of this.
        marked: whether padding needs document ids, which keep it away from experts.
        columns: the columns of this rank.
        seed: seed of the dropout streams; None for scores and evaluation, which drop nothing.
    """

    vocab_size: int
    context: ParallelContext
    multiple: int
    marked: bool
    columns: Columns
    seed: int | None = None

    @classmethod
    def of(cls, config: Config, vocab_size: int, context: ParallelContext, seed: int | None) -> PairCollate:
        """Make the collate function of a configuration."""
        marked, columns = bool(config.model.num_experts), Columns.of(config.parallel, context)
        return cls(vocab_size, context, column_multiple(config), marked, columns, seed)

    def __call__(self, arrays: Mapping[str, np.ndarray], samples: tuple[SampleIndex, ...]) -> AnswerBatch:
        """Make a batch of the arrays of `PairSamples.batch`.

        Raises:
            DataError: a token lies outside the vocabulary.
        """
        device = self.context.device
        check_token_ids({"tokens": arrays["tokens"]}, self.vocab_size)
        rows, capacity = 2 * len(samples), arrays["tokens"].shape[-1]
        lengths, answers = (arrays[name].reshape(rows, 1) for name in ("lengths", "answers"))
        width = min(capacity, -(-int(lengths.max()) // self.multiple) * self.multiple)
        tokens, places = arrays["tokens"].reshape(rows, capacity)[:, :width], np.arange(width)
        labels = np.concatenate([tokens[:, 1:], np.zeros_like(tokens[:, :1])], axis=1)
        weights = ((places >= answers - 1) & (places < lengths - 1)).astype(np.float32)
        sizes = (lengths - answers)[:, 0]
        documents, keys = None, None
        if self.marked and int(lengths.min()) < width:
            documents = np.where(places < lengths, 0, -1).astype(np.int32)
        if self.seed is not None:
            whole = [(i,) if isinstance(i, int) else i for i in samples]
            paths = ((2 * first + side, *rest) for first, *rest in whole for side in (0, 1))
            keys = tensor_of(sample_keys(self.seed, paths), device)
        tokens, labels, weights = (self.columns.own(array) for array in (tokens, labels, weights))
        reference = arrays.get("reference", np.zeros((len(samples), 2), np.float32))
        given = {"answers": sizes.astype(np.float32), "reference": reference.reshape(rows)}
        return AnswerBatch(
            tensor_of(tokens, device),
            targets=Targets(
                tensor_of(labels, device), tensor_of(weights, device), float(weights.sum(dtype="float64"))
            ),
            places=Places(documents=documents_on(device, documents), sample_keys=keys),
            given={name: tensor_of(array, device) for name, array in given.items()},
            divisors={
                PAIRS: float((sizes[0::2] > 0).sum()),
                CHOSEN_TOKENS: float(sizes[0::2].sum()),
                "tokens": float(lengths.sum()),  # which terms of routers are over: without padding
            },
        )


class PairMetrics(EvalMetrics):
    """The metrics of one evaluation on pairs."""

    predicts_text: ClassVar[bool] = False


class PreferenceTask(AnswerTask[AnswerBatch]):
    """Training on preferences."""

    metrics = PairMetrics

    def __init__(self, splits: Splits, reference: Reference | None = None):
        super().__init__(splits)
        self.reference = reference

    @classmethod
    def read(cls, config: Config) -> PreferenceTask:
        """Read the files.

        Raises:
            DataError: a file cannot be read, a line is no pair, or nothing in a split is usable.
        """
        # The task fills the reference's numbers in before the first step.
        return cls(read_splits(config, compared=config.preference.has_reference)[0])

    def objective(self, config: Config) -> PreferenceLoss:
        return PreferenceLoss(config.preference)

    def collate(
        self, config: Config, vocab_size: int, context: ParallelContext, stream_seed: int | None
    ) -> Collate[AnswerBatch]:
        return PairCollate.of(config, vocab_size, context, stream_seed)

    def feeds(self, resumed: Resumed, vocabulary: Vocabulary, context: ParallelContext) -> Feeds:
        if resumed.config.preference.has_reference:
            self.reference = Reference.of(resumed)
            self.noted["reference"] = self.reference.weights
        self._vocab_size = vocabulary.size
        return super().feeds(resumed, vocabulary, context)

    def evaluations(self, run: Run, disk: Disk | None) -> PeriodicEvaluation:
        """Get the reference's scores, before the first step."""
        section, say = run.resumed.config.finetune, run.monitor.message
        for samples, paths in (
            (self.splits.train, section.train_data),
            (self.splits.valid, section.valid_data),
        ):
            if self.reference is not None and isinstance(samples, PairSamples):
                compute = partial(self._scores, run, samples)
                assert samples.reference is not None
                samples.reference[:] = self.reference.scores(samples, paths[0], compute, say)
        return super().evaluations(run, disk)

    def _scores(self, run: Run, samples: PairSamples) -> np.ndarray:
        config, engine = run.resumed.config, run.resumed.engine
        collate = PairCollate.of(config, self._vocab_size, engine.context, None)
        feed = feed_of(config, engine.context, samples, collate)
        log = ProgressLog(run.monitor.message, "scoring by the reference")
        with run.meters.timers("evaluation"):
            sums = sums_of(outputs_of(engine, config, feed, log), samples)
        return checked(sums, "the reference's scores")
