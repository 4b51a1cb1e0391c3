"""What Megatron-Core 0.16.1 makes of BERT's golden corpus as T5's, by digests of all samples."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np

from megazero.data.t5.dataset import T5Settings
from megazero.data.t5.vocabulary import SpanVocabulary
from tests.data.bert import golden

SIZE, START, END = golden.SIZE + 32, golden.SIZE, golden.SIZE + 1
SENTINELS = tuple(range(golden.SIZE + 2, SIZE))
WORDS = replace(golden.WORDS, continues=np.concatenate([golden.WORDS.continues, np.zeros(32, dtype=bool)]))
VOCABULARY = SpanVocabulary(WORDS, START, END, SENTINELS)


@dataclass(frozen=True)
class GoldenCase:
    """Settings, the number of samples that they lead to, and the digest of these."""

    encoder: int
    decoder: int
    num_samples: int
    short_seq_prob: float
    mask_prob: float
    seed: int
    rows: int
    digest: str


CASES = [
    GoldenCase(32, 32, 100, 0.1, 0.15, 1234, 122, "308d88eff6244361cd87dc6c8bb5ca35"),
    GoldenCase(64, 48, 100, 0.3, 0.3, 7, 125, "e82fb7443cf82ec58a3805ac11dffe29"),
    GoldenCase(24, 24, 60, 0.0, 0.5, 2, 92, "c19b6e2476591c97769aa2c70e2b48ca"),
    GoldenCase(48, 40, 80, 0.5, 0.2, 99, 91, "48710e57b38326594becd2bd859be36b"),
]


def settings_of(case: GoldenCase) -> T5Settings:
    """The settings of a case."""
    return T5Settings(
        sequence_length=case.encoder,
        words=WORDS,
        seed=case.seed,
        mask_prob=case.mask_prob,
        short_seq_prob=case.short_seq_prob,
        vocabulary=VOCABULARY,
        decoder_length=case.decoder,
    )


def digest(batch: dict[str, np.ndarray]) -> str:
    """md5 of both texts, labels, weights and lengths."""
    names = ("tokens", "decoder_tokens", "labels", "loss_mask", "lengths", "decoder_lengths", "truncated")
    return hashlib.md5(b"".join(batch[name].astype("<i8").tobytes() for name in names)).hexdigest()
