"""Orders without arrays: each document and sample once per epoch, told in the log and the checkpoint."""

from __future__ import annotations

import multiprocessing
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from megazero.data import cache, gpt_dataset, index_check, shuffle
from megazero.data.blended import BlendedDataset
from megazero.data.cache import cached_arrays
from megazero.data.computed_order import ComputedOrder
from megazero.data.gpt_dataset import GPTDataset, GPTSettings
from megazero.data.index_build import plan_samples, shuffled_bytes
from megazero.data.indexed.reader import open_indexed
from megazero.data.native import NATIVE
from megazero.data.shuffle import cyclic_sample, permuted
from megazero.data.sources import contents
from megazero.errors import DataError
from megazero.train.resume.facts import DataFacts
from megazero.train.resume.fit import compare_data
from tests.data.corpora import write_lengths
from tests.tables import over_table

LENGTHS = [3, 0, 7, 1, 5, 12, 2, 0, 9, 4]
NONE = 1e-9  # GiB: no index is as small


@pytest.fixture
def text(tmp_path):
    return open_indexed(write_lengths(tmp_path / "text", LENGTHS))


@pytest.mark.parametrize(
    "native", [False, pytest.param(True, marks=pytest.mark.skipif(NATIVE is None, reason=""))]
)
def test_places_of_a_permutation_are_those_of_cyclic_epochs(native, monkeypatch):
    if not native:
        monkeypatch.setattr(shuffle, "NATIVE", None)
    for size in (1, 2, 3, 7, 8, 9, 100, 2**31 + 1, 10**12):
        places = np.unique(np.linspace(0, size - 1, 50).astype(np.int64))
        expected = [cyclic_sample(4 * size + place, size, 9) for place in places.tolist()]
        assert permuted(places, size, "9 4").tolist() == expected


def test_an_order_is_the_same_for_ever():
    documents = ComputedOrder("documents 1234", 2, 10, 5, ids=range(3, 8))
    assert documents[:].tolist() == [6, 7, 5, 3, 4, 7, 3, 6, 4, 5]
    assert documents[np.array([9, 0])].tolist() == [5, 6]
    assert int(documents[3]) == 3


@over_table(("samples", "extra"), [(None, True), (60, True), (60, False), (200, True)])
def test_each_epoch_has_each_document_and_each_sample_once(text, samples, extra):
    ids = np.array([9, 2, 5, 2, 0, 7])
    for chosen in (range(1, 10), ids):
        settings = GPTSettings(4, add_extra_token=extra, index_memory_gib=NONE)
        dataset = GPTDataset(text, chosen, samples, settings)
        plan, index = dataset.plan, dataset.index
        documents = index.document_index[:].reshape(plan.epochs, -1)
        assert (np.sort(documents, axis=1) == np.sort(np.asarray(chosen))).all()
        numbers = index.shuffle_index[:]
        assert sorted(numbers.tolist()) == list(range(plan.samples))
        for epoch in range(1, plan.epochs + 1):
            end = (epoch * plan.tokens_per_epoch - extra) // 4
            assert sorted(numbers[:end].tolist()) == list(range(end))
        stream = np.concatenate([text[d] for d in documents.ravel().tolist()])
        tokens = dataset.batch(range(len(dataset)))["tokens"]
        np.testing.assert_array_equal(tokens, stream[4 * numbers[:, None] + np.arange(4)])


def test_a_longer_training_goes_on_with_the_order_of_a_shorter_one(text):
    short, long = (GPTDataset(text, range(10), n, GPTSettings(4, index_memory_gib=NONE)) for n in (40, 400))
    np.testing.assert_array_equal(
        long.batch(range(len(short)))["tokens"], short.batch(range(len(short)))["tokens"]
    )


def test_samples_without_the_compiled_helpers_are_the_same(text, monkeypatch):
    dataset = GPTDataset(text, range(10), 40, GPTSettings(4, index_memory_gib=NONE))
    expected = dataset.batch(range(40))
    monkeypatch.setattr(gpt_dataset, "NATIVE", None)
    for key, array in dataset.batch(range(40)).items():
        np.testing.assert_array_equal(array, expected[key])


def test_the_bound_is_exact_and_below_it_the_order_is_megatrons(text):
    plan = plan_samples(sum(LENGTHS), 4, 40)
    need = shuffled_bytes(plan, 10) / 2**30
    assert shuffled_bytes(plan, 10) == 4 * ((plan.epochs + 1) * 10 + plan.samples)
    plain = GPTDataset(text, range(10), 40, GPTSettings(4))
    at, below = (
        GPTDataset(text, range(10), 40, GPTSettings(4, index_memory_gib=m)) for m in (need, need * 0.999)
    )
    assert (at.is_computed, below.is_computed) == (False, True)
    np.testing.assert_array_equal(at.index.shuffle_index, plain.index.shuffle_index)
    assert (plain.notes, at.description == plain.description) == ((), True)
    (note,) = below.notes
    assert note.endswith(
        "text has a computed order: Megatron's would take more memory than --index-memory-gib "
        f"{need * 0.999:g}."
    )
    assert below.description["order"] == "computed"


def test_the_cache_holds_the_sample_index_alone_and_a_planted_one_is_rebuilt(text, tmp_path, monkeypatch):
    monkeypatch.setattr(index_check, "_BLOCK", 3)
    folder = tmp_path / "cache"

    def made() -> np.ndarray:
        settings = GPTSettings(4, cache_dir=folder, index_memory_gib=NONE)
        return GPTDataset(text, range(10), 40, settings).index.sample_index.copy()

    rows = made()
    (path,) = folder.glob("*.npy")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(made(), rows)
    wrong = np.load(path)
    wrong[5, 1] += 1
    np.save(path, wrong)
    manifest = path.with_name(path.name.replace("-sample_index.npy", ".json"))
    manifest.write_text(
        manifest.read_text().replace(cache._record(rows)["blake2b"], cache._record(wrong)["blake2b"])
    )
    with pytest.warns(UserWarning, match="checksums are right, but sample_index does not fit the lengths"):
        np.testing.assert_array_equal(made(), rows)


def test_a_checkpoint_knows_the_order_and_a_resume_in_another_is_refused(text):
    def facts(memory: float, *, blended: bool) -> list[DataFacts]:
        dataset = GPTDataset(text, range(10), 40, GPTSettings(4, index_memory_gib=memory))
        return [
            DataFacts(**fact) for fact in contents(BlendedDataset([dataset], [1], 30) if blended else dataset)
        ]

    for blended in (False, True):
        shuffled, computed = facts(64, blended=blended), facts(NONE, blended=blended)
        assert ([fact.order for fact in shuffled], [fact.order for fact in computed]) == (
            [None],
            ["computed"],
        )
        assert compare_data(computed, computed, changes_pass=False) == ()
        for before, now, was, give in (
            (shuffled, computed, "shuffled", "more"),
            (computed, shuffled, "computed", "less"),
        ):
            with pytest.raises(DataError, match=f"`--index-memory-gib` must .* was {was}, .*; give {give}"):
                compare_data(before, now, changes_pass=True)


def build_slowly(folder: Path, seconds: float, tell: multiprocessing.Queue) -> None:
    """In another process: take a cached entry, and say who built it."""
    built = []

    def build() -> dict[str, np.ndarray]:
        built.append(1)
        tell.put("builds")
        time.sleep(seconds)
        return {"a": np.arange(3)}

    arrays = cached_arrays(folder, "t", {"k": 1}, ("a",), build, lambda arrays: None)
    tell.put((len(built), arrays["a"].tolist()))


def test_one_process_builds_and_a_killed_one_is_replaced(tmp_path):
    context = multiprocessing.get_context("fork")
    tell = context.Queue()
    killed = context.Process(target=build_slowly, args=(tmp_path / "c", 600, tell))
    killed.start()
    assert tell.get(timeout=60) == "builds"
    others = [context.Process(target=build_slowly, args=(tmp_path / "c", 0.3, tell)) for _ in range(3)]
    for process in others:
        process.start()
    time.sleep(0.3)
    assert all(process.is_alive() for process in others)  # they wait
    killed.kill()
    killed.join()
    results = [tell.get(timeout=60) for _ in range(4)]
    for process in others:
        process.join()
    assert results[0] == "builds"
    assert sorted(results[1:]) == [(0, [0, 1, 2]), (0, [0, 1, 2]), (1, [0, 1, 2])]
    assert sorted(path.suffix for path in (tmp_path / "c").iterdir()) == [".json", ".npy"]


@over_table("content", [b"", b"of another program\n", b"123\nelsewhere\n"])
def test_a_lock_file_without_a_holder_is_waited_for_in_vain_but_not_for_ever(tmp_path, monkeypatch, content):
    monkeypatch.setattr(cache, "_LEASE_SECONDS", 0.1)
    (tmp_path / f"t-{cache.cache_key({'k': 1})}.lock").write_bytes(content)
    arrays = cached_arrays(tmp_path, "t", {"k": 1}, ("a",), lambda: {"a": np.arange(3)}, lambda arrays: None)
    assert arrays["a"].tolist() == [0, 1, 2]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".npy"]


def test_who_waits_says_so(tmp_path, monkeypatch, capsys):
    context = multiprocessing.get_context("fork")
    tell = context.Queue()
    builder = context.Process(target=build_slowly, args=(tmp_path, 0.6, tell))
    builder.start()
    tell.get(timeout=60)
    monkeypatch.setattr("megazero.data.build_report._SILENT_SECONDS", 0.0)
    arrays = cached_arrays(tmp_path, "t", {"k": 1}, ("a",), lambda: pytest.fail("built"), lambda arrays: None)
    builder.join()
    assert arrays["a"].tolist() == [0, 1, 2]
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith("waiting for the index t-")
    assert first.endswith(".lock, after 0 s")
