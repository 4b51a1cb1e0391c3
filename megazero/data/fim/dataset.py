"""Samples of documents that are rearranged for fill-in-the-middle."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megazero.data.blended import SampleDataset, whereabouts
from megazero.data.fim.rearrange import Infill
from megazero.data.gpt_dataset import GPTDataset
from megazero.data.packed.dataset import PackedDataset
from megazero.errors import DataError


class InfilledDataset(SampleDataset):
    """The samples of another dataset, of rearranged documents instead.

    Whole documents are read for their pieces in a sample. Masks and positions stay as they are, as no token
    leaves its document and the ends of documents stay in their places. Raises DataError if documents are
    split into sentences.
    """

    def __init__(self, plain: GPTDataset | PackedDataset, infill: Infill):
        indexed = plain.indexed
        if len(indexed) != len(indexed.document_index) - 1:
            raise DataError(
                f"`data_path` must have one sequence per document for --fim-data, but {indexed.prefix} has "
                f"{len(indexed)} sequences in {len(indexed.document_index) - 1} documents; preprocess the text "
                "without `megazero data preprocess --split-sentences`."
            )
        self.datasets = (plain,)
        self.name, self.infill = plain.name, infill

    def __len__(self) -> int:
        return len(self.datasets[0])

    def batch(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """The samples `indices` stacked, [b, T]; errors as those of the other dataset."""
        (plain,) = self.datasets
        arrays = plain.batch(indices)
        tokens, labels = arrays["tokens"], arrays["labels"]
        pieces, length, row, at = plain.pieces(np.asarray(indices, dtype=np.int64)), tokens.shape[1], -1, 0
        firsts = set(pieces.firsts.tolist())
        turns, begins, ends = (array.tolist() for array in (pieces.turns, pieces.begins, pieces.ends))
        for piece, number in enumerate(pieces.sequences.tolist()):
            if piece in firsts:
                row, at = row + 1, 0
            count = ends[piece] - begins[piece]
            document = plain.indexed.get(number)
            text = self.infill.rearranged(document, number, turns[piece])
            if text is not document and count:
                text = text[begins[piece] : ends[piece]]
                tokens[row, at : at + count] = text[: length - at]
                labels[row, at : at + count - 1] = text[1:]
                if at and plain.labels_cross:
                    labels[row, at - 1] = text[0]
            at += count
        return arrays

    def whereabouts(self, number: int) -> str:
        """Where the text of a sample lies."""
        return whereabouts(self.datasets[0], number)

    @property
    def description(self) -> dict[str, object]:
        """Everything that the samples depend on, as JSON."""
        plain = self.datasets[0].description
        return {"kind": "fim", "infill": self.infill.description, "dataset": plain}

    @property
    def padding_share(self) -> float:
        """Share of the positions that hold no token."""
        return self.datasets[0].padding_share

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that a user should read at the start of a run."""
        return self.datasets[0].notes
