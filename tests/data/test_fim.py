"""Fill-in-the-middle: what becomes of a document, of samples of both kinds, and what is refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from megazero.config.fim import FimConfig
from megazero.config.resolve import parse_config
from megazero.data.fim import Infill, infill_of
from megazero.data.from_config import GPTBuilder, gpt_datasets
from megazero.data.gpt_dataset import DocumentEnds, GPTDataset, GPTSettings
from megazero.data.indexed.reader import open_indexed
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.data.packed.dataset import PackedDataset
from megazero.data.sampler import BatchSampler, SamplerSpec
from megazero.data.tokenizers.simple import ByteLevelTokenizer, NullTokenizer
from megazero.errors import ConfigError, DataError
from megazero.train.step.feed import make_feed
from tests.tables import over_table

PREFIX, SUFFIX, MIDDLE, EOD, SPLIT = 1, 2, 3, 0, 4
MARKS = (PREFIX, SUFFIX, MIDDLE)
TEXT = np.arange(10, 30)


def infill(seed: int = 7, split: int | None = None, **settings: object) -> Infill:
    return Infill(FimConfig(fim_data=True, **settings), seed, MARKS, EOD, split)


def restored(text: np.ndarray) -> tuple[str, list[int]]:
    """The order of a rearranged text, and the text that it was made of, without its last three tokens."""
    text = text.tolist()
    assert text[0] == PREFIX
    assert [text.count(mark) for mark in MARKS] == [1, 1, 1]
    after, last = text.index(SUFFIX), text.index(MIDDLE)
    suffix = text[after + 1 : last]
    if after == 1:  # or PSM without a prefix, which is the same
        return "SPM", text[last + 1 :] + suffix
    return "PSM", text[1:after] + text[last + 1 :] + suffix


def test_documents_are_rearranged_as_they_always_were():
    """A run that continues after an update relies on these."""
    every = infill(fim_rate=1.0)
    assert [every.rearranged(TEXT[:9], number, 0).tolist() for number in range(3)] == [
        [1, 10, 11, 2, 3, 12, 13, 14, 15],
        [1, 10, 11, 2, 14, 15, 3, 12, 13],
        [1, 2, 14, 15, 3, 10, 11, 12, 13],
    ]


def test_a_document_keeps_its_length_its_tokens_and_its_end():
    every = infill(fim_rate=1.0)
    for number in range(200):
        document = np.append(np.arange(10, 13 + number), EOD)
        text = every.rearranged(document, number, 3)
        assert text.size == document.size
        assert text[-1] == EOD
        assert text.dtype == document.dtype
        if number == 0:
            assert text.tolist() == document.tolist()  # three tokens are no more than the marks
        else:
            assert restored(text[:-1])[1] == document[:-4].tolist()
        np.testing.assert_array_equal(every.rearranged(document, number, 3), text)


def test_rates_orders_and_cuts_are_those_of_the_settings():
    """Of 1,000 documents, to five deviations."""
    some, text, count = infill(fim_rate=0.7, fim_spm_rate=0.2), np.arange(10, 1010), 1000
    changed = [new for n in range(count) if (new := some.rearranged(text, n, 0)) is not text]
    orders = [restored(new)[0] for new in changed]
    assert abs(len(changed) - 0.7 * count) < 5 * (count * 0.21) ** 0.5
    assert abs(orders.count("SPM") - 0.2 * len(changed)) < 5 * (len(changed) * 0.16) ** 0.5
    # The distance of two uniform cuts is a third of the text on average, with a variance of an 18th.
    sizes = [999 - new.tolist().index(MIDDLE) for new, o in zip(changed, orders, strict=True) if o == "PSM"]
    assert abs(np.mean(sizes) / 997 - 1 / 3) < 5 * (1 / 18 / len(sizes)) ** 0.5


def test_turns_documents_and_seeds_have_draws_of_their_own():
    texts = {
        tuple(infill(seed, fim_rate=1.0).rearranged(TEXT, number, turn).tolist())
        for seed in range(4)
        for number in range(4)
        for turn in range(4)
    }
    assert len(texts) > 30  # of 64; SPM has 18 outcomes, PSM 171


def test_texts_between_ends_are_rearranged_by_themselves():
    document = np.concatenate([TEXT, [EOD], TEXT + 30, [EOD]])
    text = infill(fim_rate=1.0).rearranged(document, 0, 0)
    assert np.flatnonzero(text == EOD).tolist() == [20, 41]
    assert restored(text[:20])[1] == TEXT[:-3].tolist()
    assert restored(text[21:41])[1] == (TEXT + 30)[:-3].tolist()


def test_fragments():
    document = np.concatenate([TEXT, [SPLIT], TEXT + 30, [SPLIT], TEXT + 60, [EOD]])
    text = infill(split=SPLIT, fim_rate=1.0, fim_fragment_rate=1.0).rearranged(document, 0, 0)
    for begin in (0, 21, 42):
        assert restored(text[begin : begin + 20])[1] == document[begin : begin + 17].tolist()
    assert text[[20, 41, 62]].tolist() == [SPLIT, SPLIT, EOD]
    half = infill(split=SPLIT, fim_rate=1.0, fim_fragment_rate=0.5)
    firsts = np.array([half.rearranged(document, number, 0)[[0, 21, 42]] == PREFIX for number in range(600)])
    assert np.abs(firsts.mean(axis=0) - 0.5).max() < 0.11
    assert abs(np.corrcoef(firsts.T)[0, 1]) < 0.2
    never = infill(split=SPLIT, fim_rate=1.0, fim_fragment_rate=0.0)
    assert never.rearranged(document, 0, 0) is document
    assert restored(never.rearranged(TEXT, 0, 0))[1] == TEXT[:-3].tolist()  # without a split, all of it


def test_what_begins_with_a_text_is_left_alone():
    settings = FimConfig(fim_data=True, fim_rate=1.0, fim_no_prefix="#!")
    left = Infill(settings, 0, (251, 252, 253), 256, tokenizer=ByteLevelTokenizer())
    for text, stays in (("#!/bin/sh exit", True), ("# comment #! x", False)):
        document = np.frombuffer(text.encode(), dtype=np.uint8)
        assert (left.rearranged(document, 0, 0).tolist() == document.tolist()) is stays


@pytest.fixture
def indexed(tmp_path):
    """40 documents with an end each, one of them nothing else; ids count up from 10."""
    lengths = np.append(np.random.default_rng(0).integers(0, 60, 39), 0)
    with IndexedDatasetWriter(tmp_path / "text", "uint16") as writer:
        for number, length in enumerate(lengths.tolist()):
            writer.add_document([np.append(np.arange(length) + 10 + 100 * number, EOD)])
    return open_indexed(tmp_path / "text")


def settings(fill: Infill | None, **more: object) -> GPTSettings:
    return GPTSettings(16, ends=DocumentEnds(EOD, True, True, True, fill), **more)


@over_table(("memory", "extra"), [(64, True), (64, False), (1e-9, True), (1e-9, False)])
def test_samples_are_cut_from_the_rearranged_documents_end_to_end(indexed, memory, extra):
    fill, more = infill(fim_rate=0.7), {"index_memory_gib": memory, "add_extra_token": extra}
    filled = GPTDataset(indexed, range(2, 40), 200, settings(fill, **more))
    plain = GPTDataset(indexed, range(2, 40), 200, settings(None, **more))
    places = np.arange(len(plain.index.document_index))
    documents = plain.index.document_index[places].tolist()
    stream = np.concatenate([fill.rearranged(indexed[d], d, place) for place, d in enumerate(documents)])
    indices = np.random.default_rng(1).permutation(len(filled))
    batch, before = filled.batch(indices), plain.batch(indices)
    firsts = 16 * plain.index.shuffle_index[indices].astype(np.int64)
    expected = stream[firsts[:, None] + np.arange(16 + extra)]
    np.testing.assert_array_equal(batch["tokens"], expected[:, :16])
    np.testing.assert_array_equal(batch["labels"][:, : 15 + extra], expected[:, 1:])
    assert (batch["tokens"] != before["tokens"]).mean() > 0.3
    for key in ("loss_mask", "position_ids", "document_ids"):
        np.testing.assert_array_equal(batch[key], before[key])


def test_packed_samples_hold_the_rearranged_documents(indexed):
    fill = infill(fim_rate=0.7)
    filled = PackedDataset(indexed, range(40), 300, settings(fill))
    plain = PackedDataset(indexed, range(40), 300, settings(None))
    indices = np.random.default_rng(1).permutation(len(filled))
    batch, before, changed = filled.batch(indices), plain.batch(indices), 0
    for key in ("loss_mask", "position_ids", "document_ids"):
        np.testing.assert_array_equal(batch[key], before[key])
    for row, index in enumerate(indices.tolist()):
        documents, offsets, _ = plain._pieces(np.array([index]))
        for piece, (document, offset) in enumerate(zip(documents.tolist(), offsets.tolist(), strict=True)):
            where = batch["document_ids"][row] == piece
            text = fill.rearranged(indexed[document], document, index // plain.packing.sequences)
            size = int(where.sum())
            assert batch["tokens"][row, where].tolist() == text[offset : offset + size].tolist()
            labels = text[offset + 1 : offset + 1 + size].tolist()
            assert batch["labels"][row, where].tolist() == labels + [0] * (size - len(labels))
            changed += text is not indexed[document]
    assert changed > 0


@over_table("kind", [GPTDataset, PackedDataset])
def test_a_rate_of_0_changes_nothing(indexed, kind):
    never, plain = (kind(indexed, range(40), 99, settings(fill)) for fill in (infill(fim_rate=0.0), None))
    for key, array in plain.batch(range(99)).items():
        np.testing.assert_array_equal(never.batch(range(99))[key], array)


@over_table("kind", [GPTDataset, PackedDataset])
def test_a_description_has_the_settings_and_the_cached_index_does_not_depend_on_them(indexed, tmp_path, kind):
    descriptions = []
    for fill in (None, infill(), infill(fim_rate=0.25), infill(seed=8), infill(split=SPLIT)):
        dataset = kind(indexed, range(40), 99, settings(fill, cache_dir=tmp_path / kind.__name__))
        descriptions.append(str(dataset.description))
    assert len(set(descriptions)) == 5
    assert len(list((tmp_path / kind.__name__).glob("*.json"))) == 1


@over_table(("ranks", "micro", "workers"), [(1, 4, 0), (1, 2, 3), (2, 2, 0), (4, 1, 2)])
def test_layouts_workers_and_resumes_read_the_same(indexed, ranks, micro, workers):
    dataset = GPTDataset(indexed, range(40), 120, settings(infill(fim_rate=0.7)))
    expected = dataset.batch(BatchSampler(SamplerSpec(len(dataset), 8, 0, 1)).at(16))["tokens"]
    rows = []
    for start in range(16, 24, ranks * micro):  # as after a resume: nothing was read before
        for rank in range(ranks):
            spec = SamplerSpec(len(dataset), micro, rank, ranks)
            feed = make_feed(dataset, BatchSampler(spec), lambda arrays, samples: arrays, workers)
            rows += [arrays["tokens"] for arrays in feed.micro_batches(start, 1)]
            feed.close()
    np.testing.assert_array_equal(np.concatenate(rows), expected)
    with ThreadPoolExecutor(4) as pool:
        again = list(pool.map(lambda index: dataset[index]["tokens"], range(99)))
    np.testing.assert_array_equal(again, dataset.batch(range(99))["tokens"])


SMALL = [
    "--num-layers",
    "1",
    "--hidden-size",
    "8",
    "--num-attention-heads",
    "2",
    "--seq-length",
    "16",
    "--lr",
    "1e-2",
    "--micro-batch-size",
    "1",
    "--train-iters",
    "3",
    "--split",
    "1,0,0",
]
BY_NUMBER = ["--fim-prefix-token", "1", "--fim-middle-token", "3", "--fim-suffix-token", "2"]


def test_a_run_reads_rearranged_documents(indexed):
    argv = [*SMALL, "--vocab-size", "9999", "--data-path", indexed.prefix, "--fim-data", *BY_NUMBER]
    config = parse_config([*argv, "--fim-rate", "1", "--fim-eod-token", "0"]).config
    vocabulary = SimpleNamespace(size=9999, eod=None, tokenizer=None)
    train, _, _ = gpt_datasets(config, vocabulary, (50, 0, 0))
    assert train.settings.ends.infill.marks == MARKS
    assert train.settings.ends.infill.eod == EOD
    tokens = train.batch(range(50))["tokens"]
    assert (tokens == PREFIX).sum() > 10
    unfilled = parse_config(argv[: argv.index("--fim-data")]).config
    assert infill_of(unfilled, 9999, None, None) is None


def test_tokens_are_named_by_their_texts():
    flags = ["--fim-data", *BY_NUMBER, "--fim-split-sample", "17"]
    config = parse_config([*SMALL, "--vocab-size", "50", "--data-path", "x", *flags]).config
    fill = infill_of(config, 51, 50, NullTokenizer(50))
    assert (fill.marks, fill.eod, fill.split) == (MARKS, 50, 17)


@over_table(
    ("flags", "tokenizer", "match"),
    [
        ([], None, "'<fim_prefix>' is none; name others by --fim-prefix-token, "),
        ([*BY_NUMBER[:-1], "50"], None, "'50' is none"),
        ([*BY_NUMBER[:-1], "3"], None, "two are one"),
        ([*BY_NUMBER, "--fim-eod-token", "3"], None, "two are one"),
        ([*BY_NUMBER[:-1], "49"], None, "two are one"),  # the end of a document
        ([*BY_NUMBER, "--fim-split-sample", "two words"], NullTokenizer(49), "'two words' is none"),
        ([*BY_NUMBER, "--fim-no-prefix", "x"], None, "`--fim-no-prefix` must come with a tokenizer"),
    ],
)
def test_tokens_that_cannot_be_marks(flags, tokenizer, match):
    argv = [*SMALL, "--vocab-size", "50", "--data-path", "x", "--fim-data", *flags]
    with pytest.raises(DataError, match=match):
        infill_of(parse_config(argv).config, 50, 49, tokenizer)


def test_random_tokens_have_no_documents():
    with pytest.raises(ConfigError, match="`--fim-data`.*random tokens have no documents"):
        parse_config([*SMALL, "--vocab-size", "50", "--mock-data", "--fim-data"])


def test_a_dataset_with_a_mask_is_refused(tmp_path):
    prefix = str(tmp_path / "d")
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.add_raw(np.arange(40), np.array([40]), mask=np.arange(40) > 20)
    builder = GPTBuilder(settings(infill(fim_rate=1.0)))
    with pytest.raises(
        DataError, match=r"`.*/d` must have no .mask with --fim-data, but has one; leave that"
    ):
        builder.build(open_indexed(prefix), range(1), None, "train", None)
