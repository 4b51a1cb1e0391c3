"""A dataset that is trained on: damage is met where it is used, and changes of its files are named."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest

from megazero.data.bert.dataset import BERTDataset, BERTSettings
from megazero.data.bert.word_pieces import WordPieces
from megazero.data.blended import BlendedDataset
from megazero.data.build import DatasetRequest, DataSources, build_datasets
from megazero.data.from_config import GPTBuilder
from megazero.data.gpt_dataset import GPTDataset, GPTSettings
from megazero.data.indexed import checksum
from megazero.data.indexed.checksum import TokenBlocks
from megazero.data.indexed.reader import open_indexed
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.data.sources import changed_files, contents
from megazero.errors import DataError
from tests.data.corpora import write_lengths
from tests.tables import over_table

LENGTHS = [30, 0, 1, 200, 7, 0, 0, 45, 100, 3, 64, 50]  # 500 tokens of 2 bytes: 15 blocks of 64 and one of 40
BLOCK = 64


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(checksum, "BLOCK", BLOCK)


def damage(prefix: Path, block: int) -> None:
    """Flip a bit of the last byte of a block."""
    path = Path(f"{prefix}.bin")
    content = bytearray(path.read_bytes())
    content[min((block + 1) * BLOCK, len(content)) - 1] ^= 1
    path.write_bytes(content)


def gpt(prefix: Path, guarded: bool = True, extra: bool = True, length: int = 16) -> GPTDataset:
    indexed = open_indexed(prefix, guarded=guarded)
    settings = GPTSettings(length, add_extra_token=extra)
    return GPTDataset(indexed, range(len(indexed)), None, settings)


def refused(dataset, sample: int) -> bool:
    try:
        dataset.batch([sample])
    except DataError as error:
        return "the tokens are damaged" in str(error)
    return False


@pytest.mark.parametrize("extra", [True, False])
@pytest.mark.parametrize("length", [16, 90])
def test_a_gpt_sample_is_refused_exactly_if_a_block_of_it_is_damaged(tmp_path, length, extra):
    prefix = write_lengths(tmp_path / "d", LENGTHS)
    sound = gpt(prefix, extra=extra, length=length)
    blocks = []
    for i in range(len(sound)):
        found = sound[i]  # ids count up over the file, so an id says where it lies
        ids = {*found["tokens"].tolist(), *(found["labels"].tolist() if extra else [])}
        blocks.append({2 * each // BLOCK for each in ids})
    assert len(set().union(*blocks)) > 12
    whole = Path(f"{prefix}.bin").read_bytes()
    for block in range(16):
        damage(prefix, block)
        for i, used in enumerate(blocks):
            assert refused(gpt(prefix, extra=extra, length=length), i) == (block in used)
        Path(f"{prefix}.bin").write_bytes(whole)


def test_a_bert_sample_is_refused_exactly_if_a_block_of_its_sentences_is_damaged(tmp_path):
    rng, prefix = np.random.default_rng(5), tmp_path / "s"
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        for _ in range(12):
            writer.add_document([np.full(rng.integers(3, 15), 9) for _ in range(rng.integers(2, 6))])
    settings = BERTSettings(sequence_length=32, words=WordPieces.numbered(60))

    def fresh() -> BERTDataset:
        return BERTDataset(open_indexed(prefix, guarded=True), range(12), None, settings)

    sound, whole = fresh(), Path(f"{prefix}.bin").read_bytes()
    ends = np.cumsum(sound.indexed.lengths) * 2
    for block in (0, 4, len(whole) // BLOCK):
        damage(prefix, block)
        used = []
        for first, end, _ in sound.rows.tolist():
            begin = 0 if first == 0 else int(ends[first - 1])
            used.append(begin // BLOCK <= block <= (int(ends[end - 1]) - 1) // BLOCK)
        assert 0 < sum(used) < len(used)
        assert [refused(fresh(), i) for i in range(len(sound))] == used
        Path(f"{prefix}.bin").write_bytes(whole)


def test_the_message_names_file_bytes_sums_and_documents(tmp_path):
    prefix = write_lengths(tmp_path / "d", LENGTHS)
    damage(prefix, 0)
    with pytest.raises(DataError) as caught:
        open_indexed(prefix, guarded=True).get(0)
    message = str(caught.value)
    assert message.startswith(f"`{prefix}.bin` must have CRC-32 ")
    assert "in bytes 0..64, but has " in message
    assert "(documents 0 to 3)" in message  # tokens 0 to 31: 30 of document 0, none, one, and some of 3
    damage(prefix, 0)
    damage(prefix, 15)
    with pytest.raises(DataError, match=r"in bytes 960\.\.1000, .*\(document 11\)"):
        open_indexed(prefix, guarded=True).get(11)


def test_reading_by_sequence_is_guarded_too_and_only_where_it_reads(tmp_path):
    prefix = write_lengths(tmp_path / "d", LENGTHS)
    damage(prefix, 3)  # tokens 96 to 127, of sequence 3
    dataset = open_indexed(prefix, guarded=True)
    assert dataset.get(0).tolist() == list(range(30))
    assert dataset.get(3, 0, 65).size == 65
    assert dataset.get(3, 97).size == 103
    for offset, length in ((65, 1), (96, 1), (0, None), (0, 200)):
        with pytest.raises(DataError, match=r"bytes 192\.\.256"):
            dataset.get(3, offset, length)


def test_without_a_guard_or_without_sums_nothing_is_compared(tmp_path):
    prefix = write_lengths(tmp_path / "d", LENGTHS)
    damage(prefix, 3)
    assert not any(refused(gpt(prefix, guarded=False), i) for i in range(31))
    Path(f"{prefix}.sum").unlink()
    unsummed = gpt(prefix)
    assert not any(refused(unsummed, i) for i in range(31))


@over_table(
    ("spans", "blocks"),
    [
        ([(0, 1)], [0]),
        ([(63, 64), (128, 129)], [0, 2]),
        ([(63, 65)], [0, 1]),
        ([(10, 300), (20, 30)], [0, 1, 2, 3, 4]),
        ([(10, 10), (64, 64)], []),
    ],
)
def test_which_blocks_bytes_lie_in(tmp_path, spans, blocks):
    held = open_indexed(write_lengths(tmp_path / "d", LENGTHS)).blocks[0]
    assert held.covering(*np.array(spans).T) == blocks


def test_each_block_is_read_once(tmp_path, monkeypatch):
    dataset, seen = gpt(write_lengths(tmp_path / "d", LENGTHS)), []
    honest = TokenBlocks.check
    monkeypatch.setattr(TokenBlocks, "check", lambda self, n: (seen.append(n), honest(self, n))[1])
    dataset.batch(range(31))
    dataset.batch(range(31))
    assert sorted(seen) == list(range(16))


def test_threads_share_a_guard(tmp_path):
    prefix = write_lengths(tmp_path / "d", [2000])
    damage(prefix, 40)
    dataset, outcomes = gpt(prefix), {}
    begin = threading.Barrier(6)

    def read(thread: int) -> None:
        begin.wait()
        outcomes[thread] = [refused(dataset, i) for i in range(len(dataset))]

    threads = [threading.Thread(target=read, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [any(2 * int(i) // BLOCK == 40 for i in _ids(prefix, n)) for n in range(len(dataset))]
    assert sum(expected) in (2, 3)
    assert list(outcomes.values()) == [expected] * 6


def _ids(prefix: Path, sample: int) -> list[int]:
    found = gpt(prefix, guarded=False)[sample]
    # The flipped bit makes one id its neighbour, which lies in the same block.
    return [*found["tokens"].tolist(), *found["labels"].tolist()]


def test_a_pickled_dataset_is_guarded_as_it_was(tmp_path):
    prefix = write_lengths(tmp_path / "d", LENGTHS)
    damage(prefix, 0)
    guarded, free = (open_indexed(prefix, guarded=choice) for choice in (True, False))
    assert pickle.loads(pickle.dumps(free)).get(0).size == 30
    with pytest.raises(DataError, match="tokens are damaged"):
        pickle.loads(pickle.dumps(guarded)).get(0)


def built(*prefixes: Path, guarded: bool = True):
    paths = tuple(str(prefix) for prefix in prefixes)
    request = DatasetRequest(
        GPTBuilder(GPTSettings(16)), (None, 0, 0), DataSources(paths, "1,0,0"), guarded=guarded
    )
    return build_datasets(request)[0]


def test_a_blend_guards_and_speaks_for_its_parts(tmp_path):
    one, other = (write_lengths(tmp_path / name, LENGTHS) for name in ("one", "other"))
    damage(other, 7)
    blend = built(one, other)
    assert isinstance(blend, BlendedDataset)
    with pytest.raises(DataError, match=r"other\.bin` must have CRC-32"):
        blend.batch(range(len(blend)))
    blend.datasets[0].batch(range(31))
    built(one, other, guarded=False).batch(range(62))
    assert changed_files(blend) == []
    os.utime(f"{one}.idx", ns=(1, 1_000_000_000))
    (clause,) = changed_files(blend)
    assert clause.startswith(f"{one}.idx was written to at 1970-01-01T00:00:01.000000Z, and before that at 2")
    assert changed_files(built(one, other)) == []  # opened after that
    assert changed_files(built(one, other, guarded=False)) == []


def test_missing_sums_are_told_with_the_command_that_writes_them(tmp_path):
    (tmp_path / "my data").mkdir()
    prefix = write_lengths(tmp_path / "my data/d", LENGTHS)
    assert built(prefix).notes == ()
    Path(f"{prefix}.sum").unlink()
    assert built(prefix, guarded=False).notes == ()
    (note,) = built(prefix).notes
    assert note == (
        f"{prefix} has no checksums, so damage to its tokens would not be seen; write them with: "
        f"megazero data inspect '{prefix}' --write-sums"
    )


def lose(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 2)  # within its last page: reading on would not end the process


def replace(path: Path) -> None:
    then = path.stat()
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(then.st_atime_ns, then.st_mtime_ns))
    os.replace(other, path)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0\0")


@over_table("suffix", [".idx", ".bin"])
@over_table(
    ("change", "clause"),
    [
        (lose, "is gone or cannot be read, and was {size} bytes"),
        (cut, "is {less} bytes, and was {size}"),
        (grow, "is {more} bytes, and was {size}"),
        (replace, "is another file of the same size and time (inode "),
    ],
)
def test_how_a_file_changed_is_said(tmp_path, change, clause, suffix):
    dataset = gpt(write_lengths(tmp_path / "d", LENGTHS))
    path = tmp_path / f"d{suffix}"
    size = path.stat().st_size
    change(path)
    (found,) = changed_files(dataset)
    assert found.startswith(f"{path} {clause.format(size=size, less=size - 2, more=size + 2)}")
    if change in (lose, cut):  # an access behind the end of a mapped file would end the process
        with pytest.raises(DataError, match=f"d{suffix}` must stay as it is while it is trained on, but is "):
            dataset.batch([0])
    else:
        dataset.batch([0])


def test_contents_follow_the_bytes_alone(tmp_path):
    """Neither where they lie, nor how many samples are asked for, nor how long they are."""
    (tmp_path / "far").mkdir()
    here, far = (write_lengths(tmp_path / name, LENGTHS) for name in ("d", "far/d"))
    indexed = open_indexed(here)
    few, many = (GPTDataset(indexed, range(12), n, GPTSettings(16)) for n in (3, 300))
    (facts,) = contents(few)
    assert contents(many) == [facts]
    assert contents(gpt(here, length=90)) == [facts]
    assert contents(gpt(far)) == [{**facts, "prefix": str(far)}]
    assert contents(built(here, far)) == [facts, {**facts, "prefix": str(far)}]
    Path(f"{far}.sum").unlink()
    assert contents(gpt(far)) == [{**facts, "prefix": str(far), "blocks": None}]
    damage(far, 3)
    (other,) = contents(gpt(far))
    assert (other["idx"] == facts["idx"], other["bin"] == facts["bin"]) == (True, False)
    assert built(here).description != built(far).description
