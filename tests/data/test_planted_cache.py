"""Index caches whose key and checksums are right and whose numbers are not: found before they are used."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from megazero.data.bert.dataset import BERTDataset, BERTSettings
from megazero.data.blended import BlendedDataset
from megazero.data.cache import _record
from megazero.data.gpt_dataset import GPTDataset, GPTSettings
from megazero.data.indexed.reader import open_indexed
from megazero.data.mock import MockGPTDataset
from tests.data.bert.golden import WORDS, golden_corpus
from tests.data.corpora import write_lengths
from tests.tables import over_table

Change = Callable[[dict[str, np.ndarray]], None]


def plant(cache: Path, change: Change) -> None:
    """Changes the only entry of a cache, and its description along with it."""
    (description,) = cache.glob("*.json")
    manifest = json.loads(description.read_bytes())
    paths = {name: description.with_name(f"{description.stem}-{name}.npy") for name in manifest["arrays"]}
    arrays = {name: np.load(path) for name, path in paths.items()}
    change(arrays)
    for name, path in paths.items():
        np.save(path, arrays[name])
        manifest["arrays"][name] = _record(arrays[name])
    description.write_text(json.dumps(manifest))


def check(make: Callable[[Path], dict[str, np.ndarray]], cache: Path, change: Change, reason: str) -> None:
    """A planted entry is rebuilt with a note, into what was there before; a sound one is used silently."""
    built = make(cache)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = {name: array.copy() for name, array in make(cache).items()}  # those are maps of the files
    plant(cache, change)
    with pytest.warns(UserWarning, match=rf"checksums are right, but .*{reason}.*; it is rebuilt"):
        again = make(cache)
    for name, array in built.items():
        np.testing.assert_array_equal(loaded[name], array)
        np.testing.assert_array_equal(again[name], array)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(cache)


LENGTHS = [3, 0, 7, 1, 5, 12, 2, 0, 9]  # of the documents; samples of 4 tokens and one more


@pytest.fixture
def text(tmp_path):
    return open_indexed(write_lengths(tmp_path / "text", LENGTHS))


def gpt_arrays(text, samples: int | None = 20) -> Callable[[Path], dict[str, np.ndarray]]:
    def make(cache: Path) -> dict[str, np.ndarray]:
        dataset = GPTDataset(text, range(1, 9), samples, GPTSettings(4, cache_dir=cache))
        dataset.batch(range(len(dataset)))
        return vars(dataset.index)

    return make


def set_to(name: str, place: object, value: object) -> Change:
    def change(arrays: dict[str, np.ndarray]) -> None:
        arrays[name][place] = value

    return change


def replaced(name: str, new: Callable[[np.ndarray], np.ndarray]) -> Change:
    def change(arrays: dict[str, np.ndarray]) -> None:
        arrays[name] = new(arrays[name])

    return change


GPT_PLANTS = {
    "a document before the split": (set_to("document_index", 0, 0), "is out of range"),
    "a document after the split": (set_to("document_index", 5, 9), "is out of range"),
    "a negative document": (set_to("document_index", 5, -1), "is out of range"),
    "a document twice": (set_to("document_index", 0, 3), "each sequence once per epoch"),
    "documents of two epochs exchanged": (
        replaced("document_index", lambda a: np.sort(a)),
        "each sequence once per epoch",
    ),
    "too few documents": (replaced("document_index", lambda a: a[:-1]), "must be integers"),
    "real numbers": (replaced("document_index", lambda a: a.astype(np.float64)), "must be integers"),
    "a row past the documents": (set_to("sample_index", (-1, 0), 10**6), "leaves the documents"),
    "a row before the documents": (set_to("sample_index", (0, 0), -1), "leaves the documents"),
    "rows that go back": (set_to("sample_index", (5, 0), 0), "goes back"),
    "an offset of one too many": (set_to("sample_index", (7, 1), 1), "does not fit the lengths"),
    "a negative offset": (set_to("sample_index", (3, 1), -1), "does not fit the lengths"),
    "a first row elsewhere": (set_to("sample_index", (0, 1), 1), "does not fit the lengths"),
    "rows of three": (replaced("sample_index", lambda a: np.repeat(a, 2, axis=1)[:, :3]), "must be integers"),
    "too few rows": (replaced("sample_index", lambda a: a[:-1]), "must be integers"),
    "a sample past the end": (set_to("shuffle_index", 0, 26), "must be in"),
    "a sample twice": (replaced("shuffle_index", lambda a: np.append(a[:-1], a[-2])), "each sample once"),
    "epochs exchanged": (
        replaced("shuffle_index", lambda a: a[::-1]),
        "must be in",
    ),
    "shuffled twice as long": (replaced("shuffle_index", lambda a: np.tile(a, 2)), "must be integers"),
}


@pytest.mark.parametrize("plant_name", GPT_PLANTS)
def test_gpt_index(text, tmp_path, plant_name):
    change, reason = GPT_PLANTS[plant_name]
    make = gpt_arrays(text)
    plan = GPTDataset(text, range(1, 9), 20, GPTSettings(4)).plan
    assert plan.separate_last  # so that both parts are looked at
    assert plan.epochs == 3
    assert plan.samples == 26
    check(make, tmp_path / "cache", change, reason)


def test_an_index_in_blocks_is_the_same(text, tmp_path, monkeypatch):
    """The blocks of a large index are looked at one by one; each counts on from those before."""
    monkeypatch.setattr("megazero.data.index_check._BLOCK", 2)
    check(gpt_arrays(text), tmp_path / "sound", set_to("document_index", 5, 9), "is out of range")
    last = set_to("sample_index", (-1, 1), 5)
    check(gpt_arrays(text), tmp_path / "rows", last, "does not fit the lengths")


@pytest.mark.parametrize("samples", [None, 1, 9, 10, 40, 200])
def test_every_sound_index_is_used(text, tmp_path, samples):
    make = gpt_arrays(text, samples)
    make(tmp_path / "cache")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(tmp_path / "cache")


def test_samples_without_an_extra_token(text, tmp_path):
    settings = GPTSettings(5, cache_dir=tmp_path / "cache", add_extra_token=False)
    sequences = np.array([8, 2, 5, 2])
    first = GPTDataset(text, sequences, 30, settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = GPTDataset(text, sequences, 30, settings)
    np.testing.assert_array_equal(first.batch(range(30))["tokens"], second.batch(range(30))["tokens"])


def blend(weights: list[float] | None, size: int | None) -> Callable[[Path], dict[str, np.ndarray]]:
    def make(cache: Path) -> dict[str, np.ndarray]:
        parts = [MockGPTDataset(n, GPTSettings(4, vocab_size=9), f"p{n}") for n in (30, 40, 50)]
        dataset = BlendedDataset(parts, weights, size, cache)
        dataset.batch(range(len(dataset)))
        return {"dataset_index": dataset.dataset_index, "sample_index": dataset.sample_index}

    return make


BLEND_PLANTS = {
    "a dataset that is not there": (set_to("dataset_index", 3, 3), "is out of range"),
    "a negative dataset": (set_to("dataset_index", 3, -1), "is out of range"),
    "a sample that is not there": (set_to("sample_index", 3, 10**12), "count the samples"),
    "a sample twice": (set_to("sample_index", 7, 0), "count the samples"),
    "samples in another order": (replaced("sample_index", lambda a: a[::-1]), "count the samples"),
    "too short": (replaced("sample_index", lambda a: a[:-1]), "must be integers"),
}


@over_table(("weights", "size"), [([0.2, 0.3, 0.5], 70), (None, None), (None, 60)])
@over_table("plant_name", BLEND_PLANTS)
def test_blend(tmp_path, plant_name, weights, size):
    check(blend(weights, size), tmp_path, *BLEND_PLANTS[plant_name])


def only_the_first(arrays: dict[str, np.ndarray]) -> None:
    arrays["dataset_index"][:] = 0
    arrays["sample_index"][:] = np.arange(len(arrays["sample_index"]))


@pytest.mark.parametrize(
    ("weights", "size", "reason"),
    [([0.2, 0.3, 0.5], 25, "keep the weights"), (None, None, "each sample of each dataset once")],
)
def test_blend_of_other_proportions(tmp_path, weights, size, reason):
    check(blend(weights, size), tmp_path, only_the_first, reason)


@over_table("seed", range(20))
def test_every_blend_that_is_built_is_sound(tmp_path, seed, monkeypatch):
    """No weights take the rule further from its shares than is looked for."""
    monkeypatch.setattr("megazero.data.index_check._BLOCK", 97)
    random = np.random.RandomState(seed)
    weights = random.dirichlet(np.full(1 + seed, 0.3)) + 1e-6
    parts = [MockGPTDataset(5000, GPTSettings(4, vocab_size=9), f"p{n}") for n in range(len(weights))]
    BlendedDataset(parts, weights.tolist(), 1000, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        BlendedDataset(parts, weights.tolist(), 1000, tmp_path)


def bert(tmp_path: Path, *, head: bool, samples: int | None) -> Callable[[Path], dict[str, np.ndarray]]:
    corpus = golden_corpus(tmp_path)

    def make(cache: Path) -> dict[str, np.ndarray]:
        settings = BERTSettings(32, WORDS, cache_dir=cache, binary_head=head)
        dataset = BERTDataset(corpus, range(3, 35), samples, settings)
        dataset.batch(range(len(dataset)))
        return {"rows": dataset.rows}

    return make


BERT_PLANTS = {
    "a sentence before the split": (set_to("rows", (2, 0), 0), "not there"),
    "a sentence past the end": (set_to("rows", (2, 1), 10**6), "not there"),
    "a row without sentences": (replaced("rows", lambda a: a[:, [1, 0, 2]]), "not there"),
    "a target that is too long": (set_to("rows", (2, 2), 30), "targets"),
    "a target of nothing": (set_to("rows", (2, 2), 0), "targets"),
    "a row twice": (replaced("rows", lambda a: np.append(a[:-1], a[:1], axis=0)), "each sentence once"),
    "a row that grows": (replaced("rows", lambda a: a + np.eye(1, 3, 1, dtype=a.dtype)), "."),
    "signed numbers": (replaced("rows", lambda a: a.astype(np.int32)), "unsigned"),
    "two columns": (replaced("rows", lambda a: a[:, :2]), "unsigned"),
    "no rows": (replaced("rows", lambda a: a[:0]), "at least"),
}


@over_table(("head", "samples"), [(True, None), (False, None), (True, 100), (False, 250)])
@over_table("plant_name", BERT_PLANTS)
def test_bert_map(tmp_path, plant_name, head, samples):
    check(bert(tmp_path, head=head, samples=samples), tmp_path / "cache", *BERT_PLANTS[plant_name])


def test_a_row_over_two_documents_is_found(tmp_path):
    """Each sentence is there once per epoch, but the second document's row begins in the first one."""

    def move(arrays: dict[str, np.ndarray]) -> None:
        rows = arrays["rows"]
        order = np.argsort(rows[:, 0])
        before, after = next(
            (a, b)
            for a, b in pairwise(order)
            if rows[a, 1] == rows[b, 0] and rows[a, 1] in boundaries and rows[a, 1] - rows[a, 0] > 1
        )
        rows[before, 1] -= 1
        rows[after, 0] -= 1

    boundaries = set(golden_corpus(tmp_path).document_index.tolist())
    check(bert(tmp_path, head=False, samples=None), tmp_path / "cache", move, "each sentence once")
