"""The golden corpus, which a few sentences describe, and what Megatron-Core 0.16.1 makes of it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megazero.data.bert.word_pieces import WordPieces
from megazero.data.indexed.reader import IndexedDataset, open_indexed
from megazero.data.indexed.writer import IndexedDatasetWriter

SIZE = 40
WORDS = WordPieces(
    cls=2,
    sep=3,
    mask=4,
    pad=0,
    continues=np.array([i >= 5 and i % 3 == 2 for i in range(SIZE)]),
    replacements=np.arange(SIZE),
)


def golden_corpus(folder: Path) -> IndexedDataset:
    """40 documents. Document d has 1 + d mod 5 sentences, sentence k (of all) 3 + (5k mod 11) tokens, and the
    j-th token of all is 5 + ((7j + j div 35) mod 35)."""
    sentences = tokens = 0
    with IndexedDatasetWriter(folder / "golden", "uint16") as writer:
        for number in range(40):
            document = []
            for _ in range(1 + number % 5):
                end = tokens + 3 + 5 * sentences % 11
                document.append(np.array([5 + (7 * j + j // 35) % 35 for j in range(tokens, end)]))
                sentences, tokens = sentences + 1, end
            writer.add_document(document)
    assert (sentences, tokens) == (120, 959)
    return open_indexed(folder / "golden")


@dataclass(frozen=True)
class GoldenCase:
    """Settings, and the rows and digests that they lead to."""

    binary_head: bool
    sequence_length: int
    num_samples: int
    short_seq_prob: float
    mask_prob: float
    seed: int
    rows: int
    map_digest: str
    items_digest: str
    hidden: int  # tokens of which `padding_differs`


CASES = [
    GoldenCase(True, 16, 60, 0.1, 0.15, 1234, 92,
               "327fa423bc80196e7de310c4a510dd9a", "db35521ab8fd88a9683d5c4a0e104fbb", 0),
    GoldenCase(True, 32, 100, 0.1, 0.15, 1234, 100,
               "1e023f172b9d6227f71e33730ef138c8", "5e4180c6c7cc4cc4d6693f4b0347dd93", 2),
    GoldenCase(True, 64, 100, 0.3, 0.4, 7, 105,
               "67d13e05b0b799c41e46f24e6f9947f8", "65d11b2abdba3202ebd105197c63a4dd", 1),
    GoldenCase(False, 32, 100, 0.1, 0.15, 1234, 125,
               "43f392cf87c62bc435394b93d888dcfa", "7c5d5619ce91358d58a3dd7b6bd55d92", 1),
    GoldenCase(False, 48, 80, 0.5, 0.3, 99, 84,
               "4d92cb4a7d32aa67ceee7e2012b8794f", "ee6caf06518d99026866cfe99b340df8", 0),
    GoldenCase(True, 24, 100, 0.0, 0.15, 2, 117,
               "1f62d7a827d5f8c8870e2ccda92fadaf", "6b757e4f5192795d8c1f2cedbec76216", 0),
]  # fmt: skip


def items_digest(batch: dict[str, np.ndarray], pad: int) -> str:
    """md5 of text, types, labels, padding mask and loss mask of each sample, and its two flags.

    The padding mask is Megatron-Core's, which looks at the ids after masking; see `padding_differs`.
    """
    digest = hashlib.md5()
    attended = batch["tokens"] != pad
    for i in range(len(batch["tokens"])):
        for array in (batch["tokens"], batch["token_types"], batch["labels"], attended, batch["loss_mask"]):
            digest.update(array[i].astype("<i8").tobytes())
        digest.update(bytes([batch["is_random"][i], batch["truncated"][i]]))
    return digest.hexdigest()


def padding_differs(batch: dict[str, np.ndarray], pad: int) -> np.ndarray:
    """bool [b, T]: tokens that Megatron-Core leaves unattended, as their replacement is the padding's id."""
    real = np.arange(batch["tokens"].shape[1]) < batch["lengths"][:, None]
    return real & (batch["tokens"] == pad)
