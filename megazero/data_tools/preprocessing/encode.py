"""Encode a chunk of jsonl as the tokens that are written to disk."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megazero.data.indexed.format import dtype_for_vocab
from megazero.data.tokenizers.base import TokenBatch, is_failure
from megazero.data.tokenizers.build import TokenizerSpec, build_tokenizer
from megazero.data.tokenizers.fast import FastChoice, first_difference, try_fast
from megazero.data_tools.preprocessing.chunks import JsonlChunk
from megazero.data_tools.preprocessing.parsing import (
    Column,
    Parsed,
    Problem,
    Rows,
    parse,
    parse_carefully,
)
from megazero.data_tools.preprocessing.sentences import SentenceRules, SentenceSplitter
from megazero.errors import DataError

KEPT_PROBLEMS = 10
# Texts that are encoded by both encoders: of a run's first chunk, and of every chunk; and characters of each.
_FIRST_CHECKED, _CHECKED_PER_CHUNK, _CHECKED_LETTERS = 16, 1, 1000


@dataclass(frozen=True)
class EncodeJob:
    """A worker's settings.

    Attributes:
        spec: the tokenizer.
        keys: the JSON keys of the texts.
        append_eod: whether to end documents with the tokenizer's end-of-document token.
        skip_bad_lines: whether to leave out bad lines instead of ending the run.
        sentences: how to split texts into sentences; None leaves them whole.
        fast: whether to use the fast encoder if there is one.
        seed: seed of the choice of texts that are checked.
    """

    spec: TokenizerSpec
    keys: tuple[str, ...]
    append_eod: bool = False
    skip_bad_lines: bool = False
    sentences: SentenceRules | None = None
    fast: bool = True
    seed: int = 0


@dataclass(frozen=True)
class EncodedColumn:
    """The documents of one key in a chunk.

    Attributes:
        tokens: all tokens, [n] in the dataset's dtype.
        lengths: tokens of each sequence, int64 [sequences].
        document_lengths: sequences of each document, int64 [documents]; None if each has one.
        documents: the number of documents.
        single: the number of documents with one sequence.
        empty: the number of dropped empty documents.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    document_lengths: np.ndarray | None
    documents: int
    single: int
    empty: int


@dataclass(frozen=True)
class EncodedChunk:
    """An encoded chunk, or the reason why it was not encoded.

    Attributes:
        path: the chunk's file.
        item: what a row of the file is called.
        lines, bytes: the chunk's size.
        columns: the documents of each key; empty if the chunk was not encoded.
        problems: the bad lines.
        disagreement: names a text on which the fast encoder was wrong; None if there was none.
    """

    path: str
    item: str
    lines: int
    bytes: int
    columns: list[EncodedColumn]
    problems: list[Problem] = field(default_factory=list)
    disagreement: str | None = None

    @property
    def problem_counts(self) -> Counter[str]:
        """The number of bad lines by reason."""
        return Counter(problem.reason for problem in self.problems)


@dataclass(frozen=True)
class EncoderFacts:
    """A description of a run's encoder.

    Attributes:
        tokenizer: the tokenizer's name.
        dtype: the dtype of its tokens on disk.
        fast: the fast encoder's name; None if the tokenizer itself encodes.
        reason: why there is no fast encoder, if the user can change that.
    """

    tokenizer: str
    dtype: np.dtype
    fast: str | None
    reason: str | None

    @property
    def encoder(self) -> str:
        """The name of the encoder that is used."""
        return self.fast or self.tokenizer


class ChunkEncoder:
    """Encodes chunks with a tokenizer; each process has its own. Raises DataError for an unfit tokenizer."""

    def __init__(self, job: EncodeJob):
        self.job = job
        self._split = None if job.sentences is None else SentenceSplitter(job.sentences)
        self.tokenizer = build_tokenizer(job.spec)
        self.dtype = dtype_for_vocab(self.tokenizer.vocab_size)
        self.fast, self.reason = try_fast(self.tokenizer) if job.fast else FastChoice(None, None)
        if job.append_eod and self.tokenizer.eod is None:
            raise DataError(
                f"`--append-eod` must have an end-of-document token, but {self.tokenizer.name} has none; "
                "leave the flag out or choose another tokenizer."
            )

    @property
    def facts(self) -> EncoderFacts:
        """A description of this encoder that can be pickled."""
        fast = None if self.fast is None else self.fast.name
        return EncoderFacts(self.tokenizer.name, self.dtype, fast, self.reason)

    def __call__(self, chunk: JsonlChunk) -> EncodedChunk:
        """Encode a chunk, in the order of its lines."""
        if chunk.beyond is not None:
            nothing = Parsed(1, [Column([]) for _ in self.job.keys], [chunk.too_long()])
            return self._finish(chunk, chunk.end - chunk.start, nothing)
        data = chunk.read()
        rows = chunk.rows(data)
        try:
            parsed = parse(rows, self.job.keys, self._split)
            if parsed.problems and not self.job.skip_bad_lines:
                # The run will end; if an earlier line cannot be tokenized, that line must be named.
                (first, *_) = self._try_each(rows.first(parsed.problems[0].line + 1)).problems
                parsed = Parsed(parsed.lines, [], [first, *parsed.problems[1:]])
            return self._finish(chunk, len(data), parsed)
        except DataError:
            # Encode each text by itself, to find the bad line.
            parsed = self._try_each(rows)
            if not parsed.problems:
                raise
            return self._finish(chunk, len(data), parsed)

    def _try_each(self, rows: Rows) -> Parsed:
        return parse_carefully(rows, self.job.keys, self.tokenizer.encode, self._split)

    def _finish(self, chunk: JsonlChunk, size: int, parsed: Parsed) -> EncodedChunk:
        head = chunk.path, chunk.item, parsed.lines, size
        if parsed.problems and not self.job.skip_bad_lines:
            return EncodedChunk(*head, [], parsed.problems)
        columns = []
        for key, column in zip(self.job.keys, parsed.columns, strict=True):
            batch, disagreement = self._encode(column, chunk, key)
            if batch is None:
                return EncodedChunk(*head, [], disagreement=disagreement)
            columns.append(self._assemble(batch, column.counts))
        return EncodedChunk(*head, columns, parsed.problems)

    def _encode(self, column: Column, chunk: JsonlChunk, key: str) -> tuple[TokenBatch | None, str | None]:
        if self.fast is None:
            return self.tokenizer.encode_batch(column.texts), None
        where = f"{chunk.path}, key `{key}`"
        try:
            sample = _sample(column.texts, f"{self.job.seed} {chunk.number} {key}", chunk.number == 0)
            different = first_difference(self.fast, self.tokenizer, sample)
            if different is not None:
                return None, f"{where}, in the text {sample[different][:60]!r}"
            return self.fast.encode_batch(column.texts), None
        except BaseException as error:  # after any failure of the fast encoder, the tokenizer itself is used
            if not is_failure(error):
                raise
            return None, f"{where}, with {type(error).__name__}: {error}"

    def _assemble(self, batch: TokenBatch, counts: Sequence[int] | None) -> EncodedColumn:
        """Drop empty documents, append EOD to each document's last sequence, and convert the ids' dtype."""
        kept = batch.lengths > 0
        lengths = batch.lengths[kept]
        if counts is None:
            per_document = None
            single = len(lengths)
            total, documents = len(batch.lengths), len(lengths)
            last = np.arange(documents)
        else:
            bounds = np.concatenate([[0], np.cumsum(kept)])[
                np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
            ]
            per_document = np.diff(bounds)
            per_document = per_document[per_document > 0]
            single = int(np.count_nonzero(per_document == 1))
            total, documents = len(counts), len(per_document)
            last = np.cumsum(per_document) - 1
        ids = batch.ids
        if len(ids) and int(ids.max()) >= self.tokenizer.vocab_size:
            raise RuntimeError(f"{self.tokenizer.name} gave id {int(ids.max())} beyond its vocabulary")
        if self.job.append_eod:
            assert self.tokenizer.eod is not None, "the constructor refuses a tokenizer without EOD"
            lengths = lengths.copy()
            lengths[last] += 1
            ids = _with_eod(ids, np.cumsum(lengths)[last] - 1, self.tokenizer.eod, self.dtype)
        ids = ids.astype(self.dtype, copy=False)
        return EncodedColumn(ids, lengths, per_document, documents, single, total - documents)


def _with_eod(ids: np.ndarray, at: np.ndarray, eod: int, dtype: np.dtype) -> np.ndarray:
    """Insert `eod` into `ids` at the positions `at` of the result."""
    out = np.empty(len(ids) + len(at), dtype=dtype)
    is_text = np.ones(len(out), dtype=bool)
    is_text[at] = False
    out[is_text] = ids
    out[at] = eod
    return out


def _sample(texts: Sequence[str], seed: str, first_of_run: bool) -> list[str]:
    """Choose the texts to check: a run's first texts, and stretches of random texts of each chunk."""
    if not texts:
        return []
    chance = random.Random(seed)
    sample = [text[:_CHECKED_LETTERS] for text in texts[:_FIRST_CHECKED]] if first_of_run else []
    for _ in range(_CHECKED_PER_CHUNK):
        text = chance.choice(texts)
        start = chance.randrange(max(1, len(text) - _CHECKED_LETTERS + 1))
        sample.append(text[start : start + _CHECKED_LETTERS])
    return sample
