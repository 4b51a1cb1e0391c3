"""Supervised fine-tuning on conversations: only answers count in the loss, whose mean is over their tokens.

Conversations are packed by best fit, with attention and positions kept apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megazero.config.tree.config import Config
from megazero.data.conversations.answers import ConversationEncoder
from megazero.data.conversations.rows import read_row
from megazero.data.indexed.format import dtype_for_vocab
from megazero.data.labelled.dataset import EpochSamples
from megazero.data.packed.dataset import PADDING_ID
from megazero.data.packed.packing import Packing, pack
from megazero.data_tools.conversations import read_each
from megazero.errors import DataError
from megazero.models.batch import Batch, Collate, TextCollate
from megazero.mpu.context import ParallelContext
from megazero.post_training.files import encoder_of, lines_in
from megazero.post_training.task import AnswerTask, Splits


@dataclass(frozen=True)
class ChatSamples(EpochSamples):
    """Conversations in memory, packed into samples of `length` tokens.

    Attributes:
        ids: the token ids of all conversations, concatenated.
        counted: bool, which of them count in the loss as labels.
        offsets: int64 [conversations + 1], where each begins in `ids`; none is longer than `length`.
        packing: which conversations share a sample.
        length: T, the width of the arrays of `batch`.
    """

    ids: np.ndarray
    counted: np.ndarray
    offsets: np.ndarray
    packing: Packing
    length: int

    @classmethod
    def of(cls, rows: Sequence[tuple[np.ndarray, np.ndarray]], length: int, seed: int) -> ChatSamples:
        """Pack conversations, given as ids and what counts of them."""
        sizes = np.array([len(ids) for ids, _ in rows], dtype=np.int64)
        packing = pack(sizes, np.arange(len(rows)), length, seed)
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        ids, counted = (np.concatenate([row[part] for row in rows]) for part in range(2))
        return cls(ids, counted, offsets, packing, length)

    def __len__(self) -> int:
        return self.packing.sequences

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """Everything that the samples depend on."""
        return self.ids, self.counted, self.offsets, self.packing.documents, self.packing.firsts

    @property
    def padding_share(self) -> float:
        """Share of the positions that hold no token."""
        return 1.0 - len(self.ids) / (len(self) * self.length)

    def batch(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """The samples `indices`, arrays [b, T] named as those of a `PackedDataset`; -1 gives padding."""
        shape = (len(indices), self.length)
        tokens, labels, positions = (np.zeros(shape, dtype=np.int64) for _ in range(3))
        mask, documents = np.zeros(shape, np.float32), np.full(shape, PADDING_ID, np.int32)
        for i, index in enumerate(indices):
            at, firsts = 0, self.packing.firsts
            shared = self.packing.documents[firsts[index] : firsts[index + 1]] if index >= 0 else ()
            for number, conversation in enumerate(shared):
                start, stop = self.offsets[conversation], self.offsets[conversation + 1]
                end = at + int(stop - start)
                tokens[i, at:end] = self.ids[start:stop]
                labels[i, at : end - 1] = self.ids[start + 1 : stop]
                mask[i, at : end - 1] = self.counted[start + 1 : stop]
                positions[i, at:end] = np.arange(end - at)
                documents[i, at:end] = number
                at = end
        return {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": mask,
            "position_ids": positions,
            "document_ids": documents,
        }


class ChatTask(AnswerTask[Batch]):
    """Fine-tuning on conversations."""

    @classmethod
    def read(cls, config: Config) -> ChatTask:
        """Read the files.

        Raises:
            DataError: a file cannot be read, a line is no conversation, or nothing in a split counts.
        """
        section, length, remarks = config.finetune, config.model.seq_length, list[str]()
        encoder = encoder_of(config)

        def samples(name: str, paths: Sequence[str]) -> ChatSamples | None:
            if not paths:
                return None
            rows, counts = encoded(lines_in(paths), encoder, length)
            remarks.extend(f"{name}: {count:,} {what}" for what, count in counts.items() if count)
            if not rows:
                raise DataError(
                    f"`{name}` must hold an answer that counts within {length} tokens, but holds none; check "
                    "the files and the chat template, or raise --seq-length."
                )
            packed = ChatSamples.of(rows, length, config.training.seed)
            share = f"{packed.padding_share:.1%} padding"
            remarks.append(f"{name}: {len(rows):,} conversations in {len(packed):,} rows, {share}")
            return packed

        train = samples("train_data", section.train_data if section.epochs else ())
        return cls(Splits(train, samples("valid_data", section.valid_data), tuple(remarks)))

    def implied(self, config: Config) -> Config:
        """Keep conversations that share a row apart."""
        apart = {"reset_attention_mask": True, "reset_position_ids": True}
        return config.model_copy(update={"data": config.data.model_copy(update=apart)})

    def collate(
        self, config: Config, vocab_size: int, context: ParallelContext, stream_seed: int | None
    ) -> Collate[Batch]:
        return TextCollate.of(config, vocab_size, context, stream_seed)


def encoded(
    lines: Iterable[tuple[str, bytes | int]], encoder: ConversationEncoder, length: int
) -> tuple[list[tuple[np.ndarray, np.ndarray]], dict[str, int]]:
    """Encode conversations, cut off at the right; return ids and mask of each, and what was left out.

    Raises:
        DataError: a line is no conversation.
    """
    rows, cut, dropped = [], 0, 0
    for ids, counted in read_each(lines, lambda line: encoder.encode(read_row(line))):
        cut += len(ids) > length
        if counted[:length].any():
            rows.append((ids[:length].astype(dtype_for_vocab(encoder.vocab_size)), counted[:length]))
        else:
            dropped += 1
    return rows, {
        f"conversations are cut off at {length} tokens": cut,
        "conversations are left out, as no token of them counts": dropped,
    }
