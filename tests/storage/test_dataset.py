"""Datasets whose prefix is a URL: the same samples as from files, whatever the cache."""

from __future__ import annotations

import pickle
import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megazero.data.bert.dataset import BERTDataset, BERTSettings
from megazero.data.bert.word_pieces import WordPieces
from megazero.data.blended import SampleDataset, parse_blend
from megazero.data.build import DatasetRequest, DataSources, build_datasets
from megazero.data.from_config import GPTBuilder
from megazero.data.gpt_dataset import DocumentEnds, GPTDataset, GPTSettings
from megazero.data.indexed import reader
from megazero.data.indexed.reader import IndexedDataset, content_hash, file_hashes, open_indexed
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.data.packed.dataset import PackedDataset
from megazero.data.sampler import BatchSampler, SamplerSpec
from megazero.data.sources import changed_files, contents
from megazero.data.t5.dataset import T5Dataset, T5Settings
from megazero.data.t5.vocabulary import SpanVocabulary
from megazero.errors import DataError, MegazeroError, StorageError
from megazero.storage.cached import Cache
from megazero.storage.objects import MissingObjectError
from megazero.train.step.feed import make_feed
from tests.storage.small_server import SmallServer
from tests.tables import over_table

PREFIX = "s3://bucket/corpora/text"
WORDS = WordPieces.numbered(1000)
LENGTH = 64
GPT = GPTSettings(LENGTH)
PACKED = GPTSettings(LENGTH, ends=DocumentEnds(0, reset_attention_mask=True))
BERT = BERTSettings(LENGTH, WORDS)
VOCABULARY = SpanVocabulary.numbered(1000)
T5 = T5Settings(LENGTH, VOCABULARY.words, vocabulary=VOCABULARY, decoder_length=32)
MAKERS: dict[str, Callable[[IndexedDataset], SampleDataset]] = {
    "gpt": lambda indexed: GPTDataset(indexed, range(len(indexed)), None, GPT),
    "packed": lambda indexed: PackedDataset(indexed, range(len(indexed)), None, PACKED),
    "bert": lambda indexed: BERTDataset(indexed, range(len(indexed) // 2), 50, BERT),
    "t5": lambda indexed: T5Dataset(indexed, range(len(indexed) // 2), 20, T5),
}


def _write(folder: Path, tokens: int = 20000, sentences: int = 1) -> Path:
    """A dataset of some 40 KB, each document of so many sequences."""
    stream = np.random.default_rng(3)
    lengths = stream.integers(5, 200, tokens // 100)
    lengths = lengths[: len(lengths) // sentences * sentences]
    with IndexedDatasetWriter(folder / "text", "uint16") as writer:
        ids = stream.integers(10, 900, int(lengths.sum()))
        writer.add_raw(ids, lengths, np.full(len(lengths) // sentences, sentences))
    return folder / "text"


def _upload(store: SmallServer, prefix: Path, *suffixes: str) -> None:
    for suffix in suffixes or (".idx", ".bin", ".sum"):
        store.put(f"bucket/corpora/text{suffix}", Path(f"{prefix}{suffix}").read_bytes())


def _all(dataset: SampleDataset) -> dict[str, np.ndarray]:
    parts = [dataset.batch(range(i, min(i + 7, len(dataset)))) for i in range(0, len(dataset), 7)]
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


@pytest.mark.parametrize("kind", MAKERS)
def test_samples_are_those_of_the_files(kind: str, store: SmallServer, tmp_path: Path):
    prefix = _write(tmp_path, sentences=2 if kind in ("bert", "t5") else 1)
    _upload(store, prefix)
    cache = Cache(str(tmp_path / "cache"))
    expected = _all(MAKERS[kind](open_indexed(prefix, guarded=True)))
    for _ in range(2):  # with an empty cache and with a full one
        actual = _all(MAKERS[kind](open_indexed(PREFIX, guarded=True, cache=cache)))
        assert actual.keys() == expected.keys()
        for key, array in expected.items():
            np.testing.assert_array_equal(actual[key], array)
    assert store.requests["GET"] == 3  # the index, the checksums, one block


def test_sequences_are_those_of_the_files(store: SmallServer, tmp_path: Path):
    prefix = _write(tmp_path)
    _upload(store, prefix, ".idx", ".bin")
    local = open_indexed(prefix)
    stored = open_indexed(PREFIX, cache=Cache(str(tmp_path / "cache")))
    for one in (stored, pickle.loads(pickle.dumps(stored))):
        for number in (0, 17, len(local) - 1):
            np.testing.assert_array_equal(one[number], local[number])
            np.testing.assert_array_equal(one.document(number)[0], local.document(number)[0])


def test_a_view_stays_right_when_its_block_is_given_up(
    store: SmallServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    prefix = _write(tmp_path, tokens=500_000)
    _upload(store, prefix, ".idx", ".bin")
    local = open_indexed(prefix)
    stored = open_indexed(PREFIX, cache=Cache(str(tmp_path / "cache"), 2 * 256 / (1 << 20)))
    kept = [stored[number] for number in range(0, len(local), 50)]
    for number, sequence in zip(range(0, len(local), 50), kept, strict=True):
        np.testing.assert_array_equal(sequence, local[number])


@pytest.mark.parametrize("limit", [64 << 20, 1000])
def test_hashes_are_those_of_the_files(
    limit: int, store: SmallServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also where the file is so big that only samples of it are hashed, which are all that is fetched."""
    monkeypatch.setattr(reader, "_FULL_HASH_LIMIT", limit)
    monkeypatch.setattr(reader, "_SAMPLE_BYTES", 10)
    prefix = _write(tmp_path)
    _upload(store, prefix)
    local, stored = open_indexed(prefix), open_indexed(PREFIX, cache=Cache(str(tmp_path / "cache")))
    before = store.sent
    assert content_hash(stored) == content_hash(local)
    assert file_hashes(stored) == file_hashes(local)
    assert store.sent - before == (640 if limit == 1000 else Path(f"{prefix}.bin").stat().st_size)
    first = stored.fingerprint
    _upload(store, prefix)
    assert open_indexed(PREFIX, cache=Cache(str(tmp_path / "other"))).fingerprint == first


def test_a_blend_of_urls_and_files_is_built(store: SmallServer, tmp_path: Path):
    prefix = _write(tmp_path)
    _upload(store, prefix)
    cache = Cache(str(tmp_path / "cache"))

    def build(*paths: str) -> SampleDataset:
        sources = DataSources(("0.4", paths[0], "0.6", paths[1]), "1,0,0")
        built = build_datasets(DatasetRequest(GPTBuilder(GPT), (300, 0, 0), sources, cache=cache))[0]
        assert built is not None
        return built

    blend = build(f"{PREFIX}[0.0:0.5]", f"{prefix}[0.5:1.0]")
    expected = _all(build(f"{prefix}[0.0:0.5]", f"{prefix}[0.5:1.0]"))
    for key, array in _all(blend).items():
        np.testing.assert_array_equal(array, expected[key])
    assert [row["prefix"] for row in contents(blend)] == [PREFIX, str(prefix)]
    assert changed_files(blend) == []
    store.put("bucket/corpora/text.bin", b"other")
    assert changed_files(blend) == [f"{PREFIX}.bin was replaced in the store"]


def test_micro_batches_are_fetched_at_the_same_time(store: SmallServer, tmp_path: Path):
    """The store answers none before it is asked for four."""
    prefix = _write(tmp_path, tokens=1_500_000)
    _upload(store, prefix, ".idx", ".bin")
    indexed = open_indexed(PREFIX, cache=Cache(str(tmp_path / "cache")))
    four = threading.Barrier(4)

    def wait(request: str) -> None:
        if request == "GET bucket/corpora/text.bin":
            four.wait(20)

    store.before = wait
    # Sequences in four blocks, none beside another.
    sequences = np.array([number * len(indexed) // 4 for number in range(4)])
    rows = SimpleNamespace(batch=lambda n: indexed[int(sequences[n[0]])], indexed=indexed)
    feed = make_feed(rows, BatchSampler(SamplerSpec(4, 1)), lambda arrays, samples: arrays, 1)
    assert feed.reader is not None
    feed.reader.expect(0, 1)
    read = [feed.reader.take(number) for number in range(4)]
    feed.close()
    for number, array in zip(sequences.tolist(), read, strict=True):
        np.testing.assert_array_equal(array, open_indexed(prefix)[number])


def test_a_damaged_object_is_refused_when_its_block_arrives(store: SmallServer, tmp_path: Path):
    prefix = _write(tmp_path)
    _upload(store, prefix)
    content = bytearray(store.content("bucket/corpora/text.bin"))
    content[5000] ^= 1
    store.put("bucket/corpora/text.bin", bytes(content))
    dataset = MAKERS["gpt"](open_indexed(PREFIX, guarded=True, cache=Cache(str(tmp_path / "cache"))))
    sentence = f"`{PREFIX}.bin` must have CRC-32 "
    for _ in range(2):  # it is not in the cache afterwards
        with pytest.raises(DataError, match=re.escape(sentence)):
            dataset.batch([0])
    # Without a comparison only the store knows.
    MAKERS["gpt"](open_indexed(PREFIX, cache=Cache(str(tmp_path / "cache")))).batch([0])


def test_data_larger_than_the_cache_is_read_by_small_blocks_and_says_so(store: SmallServer, tmp_path: Path):
    prefix = _write(tmp_path, tokens=700_000)
    _upload(store, prefix)
    cache = Cache(str(tmp_path / "cache"), 768 / (1 << 20))
    stored = open_indexed(PREFIX, guarded=True, cache=cache)
    assert [note.partition(",")[0] for note in stored.guard.notes] == [
        f"{PREFIX} is larger than --object-storage-cache-gib"
    ]
    before = store.sent
    stored[0]
    assert store.sent - before == 256 << 10


def test_a_tool_reads_a_whole_copy(store: SmallServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    prefix = _write(tmp_path)
    _upload(store, prefix)
    copy = open_indexed(PREFIX, verify=True)
    np.testing.assert_array_equal(copy.tokens, open_indexed(prefix).tokens)
    assert store.requests["GET"] == 3
    monkeypatch.setattr(Cache, "bytes", 1000)
    with pytest.raises(DataError, match="`s3://bucket/corpora/text.bin` must fit into a cache of 64 GiB"):
        open_indexed(PREFIX)


def _refused(store: SmallServer) -> None:
    store.refused_keys.add("testkey")


@over_table(
    ("prefix", "spoil", "kind", "sentence"),
    [
        (
            "s3://bucket/x",
            None,
            MissingObjectError,
            "`s3://bucket/x.idx` must be within reach",
        ),
        (
            "s3://nobucket/x",
            None,
            StorageError,
            "must be in a bucket that exists, but nobucket does not; create",
        ),
        (
            "s3://bucket/x",
            _refused,
            StorageError,
            "but access is denied",
        ),
    ],
)
def test_bad_urls_are_a_sentence(
    prefix: str, spoil: Callable[[SmallServer], None] | None, kind: type[MegazeroError], sentence: str
):
    with pytest.MonkeyPatch.context() as patch, SmallServer() as store:
        for name, value in store.environment.items():
            patch.setenv(name, value)
        if spoil is not None:
            spoil(store)
        with pytest.raises(kind, match=re.escape(sentence)) as error:
            open_indexed(prefix, cache=Cache("/nonexistent"))
        assert "testsecret" not in str(error.value)


def test_a_wrong_scheme_in_a_blend_is_refused():
    with pytest.raises(StorageError, match="s3n://bucket/x; did you mean s3"):
        parse_blend(["0.5", "s3n://bucket/x", "0.5", "y"])
