"""The datasets of a run with a blend that may change: the plain order, edits, resumes, broken files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from megazero.config.resolve import parse_config
from megazero.config.tree.config import Config
from megazero.data.build import Datasets, Sizes
from megazero.data.changing.blend import ChangingBlend
from megazero.data.changing.file import BlendFile
from megazero.data.changing.history import History
from megazero.data.changing.start import BEGINNING, Before, changing_datasets
from megazero.data.from_config import gpt_datasets
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.errors import DataError
from megazero.train.parts.vocabulary import Vocabulary
from tests.tables import over_table

VOCABULARY = Vocabulary(50, 64, None, None)
SMALL = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --lr 1e-2 --vocab-size 50 "
    "--train-iters 9 --micro-batch-size 1"
)


def write(prefix: Path, tokens: int, first: int = 0, vocab: int = 50, dtype: type = np.uint16) -> str:
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in np.array_split((np.arange(tokens) * 7 + first) % vocab, 9):
            writer.add_document(document)
    return str(prefix)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Three datasets a, b and c, and a blend of two of them in `blend`."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate("abc"):
        write(tmp_path / name, 400 + 50 * number, number)
    (tmp_path / "blend").write_text("0.7 a 0.3 b\n")
    return tmp_path


def build(config: Config, sizes: Sizes) -> Datasets:
    return gpt_datasets(config, VOCABULARY, sizes)


def config_of(flags: str) -> Config:
    return parse_config([*SMALL.split(), *flags.split()]).config


def opened(flags: str, samples: int = 100, before: Before = BEGINNING) -> Datasets:
    return changing_datasets(config_of(flags), (samples, 8, 0), build, VOCABULARY.size, before)


def changing(flags: str, samples: int = 100, before: Before = BEGINNING) -> ChangingBlend:
    train = opened(flags, samples, before)[0]
    assert isinstance(train, ChangingBlend)
    return train


def same(one, other, places) -> bool:
    a, b = one.batch(places), other.batch(places)
    return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)


@over_table("flags", ["--data-args-path blend --split 8,1,1", "--train-data-path @blend --valid-data-path b"])
def test_an_unedited_blend_is_the_plain_one_to_the_last_index(flags: str, folder: Path) -> None:
    blend, valid, test = opened(flags)
    kept = sorted(folder.glob("index-cache/*.json"))
    plain, plain_valid, plain_test = build(config_of(flags.replace("@blend", "0.7 a 0.3 b")), (100, 8, 0))
    assert isinstance(blend, ChangingBlend)
    assert len(blend) == len(plain) == 100
    assert same(blend, plain, range(100))
    assert same(valid, plain_valid, range(8))
    assert test is plain_test is None
    assert np.array_equal(blend.located(np.arange(100))[1], plain.dataset_index)
    assert blend.padding_share == plain.padding_share
    assert blend.whereabouts(99) == plain.whereabouts(99)
    assert sorted(folder.glob("index-cache/*.json")) == kept, "the indexes are those of a plain run"


def edited(blend: ChangingBlend, words: str, at: int) -> ChangingBlend:
    shares = blend.library.shares(words.split(), blend.history.sources)
    blend.use(blend.edited(shares, at, None), tuple(words.split()))
    return blend


def resumed(blend: ChangingBlend, flags: str, at: int, samples: int = 100) -> ChangingBlend:
    history = History.model_validate_json(blend.history.model_dump_json())
    return changing(flags, samples, Before(history, at))


FLAGS = "--data-args-path blend --split 8,1,1"


def test_a_resume_takes_the_history_and_the_file_is_an_edit(folder):
    blend = changing(FLAGS)
    again = resumed(blend, FLAGS, 40, samples=160)  # of a larger batch: planned as before
    assert again.history == blend.history
    assert same(again, blend, range(100))
    assert len(again) == 160
    assert again.batch(range(100, 160))["tokens"].shape == (60, 8)
    edited(blend, "0.2 b 0.3 c 0.5 a", 40)
    (folder / "blend").write_text('{"train": ["2", "b", "3", "c", "5", "a"], "valid": ["c"]}')
    late = resumed(again, FLAGS, 40)
    assert [s.start for s in late.history.segments] == [0, 40]
    assert same(late, blend, range(100))
    origin = late.history.segments[-1].origin
    assert (origin.file, len(origin.digest)) == ("blend", 32)
    assert "acts from sample 40 on: b 30% -> 20%" in late.notes[-1]
    # The same blend in other words, or given without a file, is no edit; and one without a file may be one.
    assert resumed(late, "--data-path 20 b 30 c 50 a --split 8,1,1", 60).history.segments[-1].start == 40
    for other in ("20 b 30 c", "25 b 25 c 50 a"):
        assert resumed(late, f"--data-path {other} --split 8,1,1", 60).history.segments[-1].start == 60


def test_a_dataset_is_known_by_its_content(folder):
    blend = edited(changing(FLAGS), "1 a 1 c", 30)
    expected = blend.batch(range(50, 100))["tokens"]
    (folder / "moved").mkdir()
    for name in "abc":
        for suffix in (".idx", ".bin", ".sum"):
            os.rename(f"{name}{suffix}", f"moved/{name}{suffix}")
    (folder / "blend").write_text("1 moved/a 1 moved/c")
    again = resumed(blend, FLAGS, 50)
    assert [s.start for s in again.history.segments] == [0, 30]
    assert np.array_equal(again.batch(range(50, 100))["tokens"], expected)
    assert again.notes[-1] == "warning: validation goes on without b, whose files are gone"
    # Another part is another source; the same one named twice counts once.
    both = edited(again, "1 moved/a[0.0:0.5] 1 moved/a 2 moved/a", 60)
    assert [share.weight for share in both.history.segments[-1].shares] == [1.0, 3.0]


def test_files_that_are_removed_from_the_blend_may_go(folder):
    flags = "--train-data-path @blend"
    blend = edited(changing(flags), "1 b 1 c", 30)
    for suffix in (".idx", ".bin", ".sum"):
        (folder / f"a{suffix}").unlink()
    (folder / "blend").write_text("1 b 1 c")
    assert same(resumed(blend, flags, 50), blend, range(50, 100))


def test_a_resume_with_a_broken_file_goes_on_with_the_blend_it_had(folder):
    blend = edited(changing(FLAGS), "1 b 1 c", 30)
    for text in ("1 b nan c", "", "1 b 1 missing", "b c", "1 b 1"):
        (folder / "blend").write_text(text)
        again = resumed(blend, FLAGS, 50)
        assert again.history == blend.history
        assert again.words == ()  # so that the first look says what is wrong
    (folder / "blend").unlink()
    assert resumed(blend, FLAGS, 50).history == blend.history
    with pytest.raises(DataError, match="missing.idx is not a file"):
        resumed(blend, "--data-path 1 missing 1 b", 50)
    with pytest.raises(DataError, match="but blend is not"):
        opened(FLAGS)


@over_table(
    ("flags", "text"),
    [
        ("--data-args-path blend", "a b"),
        ("--data-args-path blend --dataloader-type cyclic", "1 a 2 b"),
        ("--data-args-path blend", "1 a 2 copy"),
        ("--data-path 0.5 a 0.5 b", ""),
    ],
)
def test_other_blends_are_as_before(flags: str, text: str, folder: Path) -> None:
    write(folder / "copy", 400)
    (folder / "blend").write_text(text)
    train = opened(flags)[0]
    assert not isinstance(train, ChangingBlend)
    assert same(train, build(config_of(flags), (100, 8, 0))[0], range(90))


def looked_at(file: BlendFile) -> object:
    assert file.look() is None, "a file that has just changed may still be being written"
    return file.look()


BROKEN = [
    (None, "No such file or directory"),
    ("", "but blend is empty"),
    ("  \n", "but blend is empty"),
    ("-1 a 1 b", "must be a number of at least 0, but is '-1'"),
    ("nan a 1 b", "must be a number of at least 0, but is 'nan'"),
    ("inf a 1 b", "must be a number of at least 0, but is 'inf'"),
    ("0 a 0 b", "must give some dataset a weight above 0"),
    ("0.5 a 0.5", "must be pairs of weight and prefix, but has 3 entries"),
    ("a b", "blend that changes must have weights"),
    ("0.5 a 0.5 gone", "gone.idx is not a file"),
    ("0.5 a 0.5 half", "half.bin is not a file"),
    ('{"train": ["1", "a"', "must be valid JSON"),
    ('{"valid": ["1", "a"]}', "must have a blend for train"),
    (b"\xff\xfe1 a", "must be readable text"),
    ("A: 1 0:1 a, 0.5 b", "must be WEIGHT START:STOP PREFIX"),
    ("x a 1 b", "must be a number of at least 0, but is 'x'"),
    ("1 a[0.5:0.2] 1 b", "the lower first, but is `a[0.5:0.2]`"),
    ("1 a 1 other", "run's tokenizer, of 50 ids, but has the id 198"),
    ("1 a 1 bytes", "run's tokenizer, of 50 ids, but has the id 254"),
    ("1 a 1 tiny", "`tiny` must give the train split samples, but has none"),
    ("1e308 a 1e308 b", "must have a finite sum"),
    ("1 a 1 broken", "broken.idx"),
]


@pytest.mark.filterwarnings("ignore:the train split is empty")
def test_each_broken_edit_is_named(folder):
    """And the run goes on with the blend that it had."""
    (folder / "half.idx").write_bytes(b"")
    (folder / "broken.idx").write_bytes(b"MMIDIDX\0\0 and so on")
    (folder / "broken.bin").write_bytes(b"1234")
    write(folder / "other", 300, vocab=199)
    write(folder / "bytes", 300, vocab=255, dtype=np.uint8)
    with IndexedDatasetWriter(folder / "tiny", np.uint16) as writer:
        writer.add_document(np.array([], dtype=np.uint16))
    blend, path = changing(FLAGS), folder / "blend"
    history, file = blend.history, BlendFile(Path("blend"), blend.words)
    assert (looked_at(file), file.problem) == (None, None)
    for content, expected in BROKEN:
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        try:
            new = looked_at(file)
            problem = file.problem
            if new is not None:
                blend.edited(blend.library.shares(new.words, history.sources), 50, new.origin)
        except DataError as error:
            problem = str(error)
        assert expected in problem, content
        assert "\n" not in problem
        assert blend.history is history
    path.write_text("0.7 a 0.3 b\n")
    assert (looked_at(file), file.problem) == (None, None)


def test_a_file_is_read_when_it_rests(folder, monkeypatch):
    file = BlendFile(Path("blend"), ("0.7", "a", "0.3", "b"))
    assert looked_at(file) is None
    path = folder / "blend"
    path.write_text("0.7 a")
    assert file.look() is None
    path.write_text("0.7 a 0.2 b 0.1 c")
    assert (file.look(), file.problem) == (None, None)
    new = file.look()
    assert new.words == ("0.7", "a", "0.2", "b", "0.1", "c")
    assert json.loads(new.origin.model_dump_json())["file"] == "blend"
    file.words = new.words
    reads = []
    monkeypatch.setattr("megazero.data.changing.file.read_blend", reads.append)
    assert [file.look() for _ in range(3)] == [None] * 3
    assert reads == []
    file.again()
    with pytest.raises(AttributeError):  # read anew, though it rests
        file.look()
