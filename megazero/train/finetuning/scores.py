"""From the scores of samples to accuracy, F1 and a confusion matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megazero.data.labelled.dataset import UNKNOWN_LABEL

_WIDEST_TABLE = 12  # classes; more do not fit on a screen
_CONFUSIONS = 10


@dataclass(frozen=True)
class TaskReport:
    """The quality of the answers to labelled samples.

    Attributes:
        labels: the names of the classes.
        confusion: int64 [classes, classes], number of samples by true class (row) and answer (column).
    """

    labels: tuple[str, ...]
    confusion: np.ndarray

    @classmethod
    def of(cls, labels: Sequence[str], truth: np.ndarray, scores: np.ndarray) -> TaskReport:
        """Count answers: a sample's answer is the class with the highest score, of equal ones the first.

        Args:
            truth: int64 [n], the true classes; -1 if unknown, then the sample is ignored.
            scores: [n, classes].
        """
        known = truth != UNKNOWN_LABEL
        confusion = np.zeros((len(labels), len(labels)), dtype=np.int64)
        np.add.at(confusion, (truth[known], scores[known].argmax(-1)), 1)
        return cls(tuple(labels), confusion)

    @property
    def count(self) -> int:
        """The number of samples with a label."""
        return int(self.confusion.sum())

    @property
    def accuracy(self) -> float | None:
        """The fraction of correct answers; None without labels."""
        return float(self.confusion.trace()) / self.count if self.count else None

    @property
    def f1(self) -> tuple[float, ...]:
        """The F1 of each class, 2 x hits / (samples + answers); 0 for a class without samples and answers."""
        pairs = zip(self.confusion.diagonal(), self._occurrences, strict=True)
        return tuple(float(2 * hits / count) if count else 0.0 for hits, count in pairs)

    @property
    def macro_f1(self) -> float | None:
        """The mean of F1 over the classes that occur as labels or answers; None without labels."""
        occurring = [f1 for f1, count in zip(self.f1, self._occurrences, strict=True) if count]
        return sum(occurring) / len(occurring) if occurring else None

    @property
    def only_answer(self) -> str | None:
        """The class that is the answer to all samples, though they have several; None if there is none."""
        answered = self.confusion.any(0)
        several = answered.sum() == 1 and self.confusion.any(1).sum() > 1
        return self.labels[int(answered.argmax())] if several else None

    @property
    def _occurrences(self) -> np.ndarray:
        """The number of labels plus answers of each class, int64 [classes]."""
        counts: np.ndarray = self.confusion.sum(0) + self.confusion.sum(1)
        return counts

    def record(self) -> dict[str, object]:
        """The report as JSON."""
        return {
            "samples": self.count,
            "accuracy": self.accuracy,
            "macro_f1": self.macro_f1,
            "f1": dict(zip(self.labels, self.f1, strict=True)),
            "confusion": self.confusion.tolist(),
        }

    def table(self) -> list[str]:
        """The report as lines: precision, recall and F1 of each class, and the confusion matrix."""
        width = max(5, *map(len, self.labels))
        lines = [f"{'label':{width}}  samples  precision  recall      F1"]
        asked, answered = self.confusion.sum(1), self.confusion.sum(0)
        for i, (label, f1) in enumerate(zip(self.labels, self.f1, strict=True)):
            hits = self.confusion[i, i]
            precision = hits / answered[i] if answered[i] else 0.0
            recall = hits / asked[i] if asked[i] else 0.0
            lines.append(f"{label:{width}}  {asked[i]:7d}  {precision:9.4f}  {recall:6.4f}  {f1:6.4f}")
        if len(self.labels) > _WIDEST_TABLE:
            return [*lines, self._commonest()]
        return [*lines, *self._confusions(width)]

    def _confusions(self, width: int) -> list[str]:
        widths = [max(len(label), len(str(self.count))) for label in self.labels]
        head = "  ".join(f"{label:>{w}}" for label, w in zip(self.labels, widths, strict=True))
        lines = [f"{'true':{width}}  predicted: {head}"]
        for label, row in zip(self.labels, self.confusion, strict=True):
            cells = "  ".join(f"{cell:{w}d}" for cell, w in zip(row, widths, strict=True))
            lines.append(f"{label:{width}}             {cells}")
        return lines

    def _commonest(self) -> str:
        wrong = self.confusion - np.diag(self.confusion.diagonal())
        order = np.argsort(-wrong, axis=None, kind="stable")[:_CONFUSIONS]
        pairs = [divmod(int(i), len(self.labels)) for i in order if wrong.flat[i]]
        shown = (f"{self.labels[a]} as {self.labels[b]}: {wrong[a, b]}" for a, b in pairs)
        return "commonest confusions: " + ("; ".join(shown) or "none")


def probabilities(scores: np.ndarray) -> np.ndarray:
    """Softmax over the last dim, float64 [n, classes]."""
    shifted = np.exp(scores.astype(np.float64) - scores.max(-1, keepdims=True))
    shares: np.ndarray = shifted / shifted.sum(-1, keepdims=True)
    return shares
