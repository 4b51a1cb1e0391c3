from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from megazero.data.indexed import writer as indexed_writer
from megazero.data.indexed.reader import open_indexed
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.errors import DataError
from tests.data.corpora import GOLDEN_BIN, GOLDEN_DOCUMENTS, GOLDEN_IDX, GOLDEN_SEQUENCES, write_golden
from tests.tables import over_table


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_writes_the_golden_bytes(tmp_path):
    prefix = write_golden(tmp_path / "g.h")
    assert Path(f"{prefix}.idx").read_bytes() == GOLDEN_IDX
    assert Path(f"{prefix}.bin").read_bytes() == GOLDEN_BIN
    assert names(tmp_path) == ["g.h.bin", "g.h.idx", "g.h.sum"]


def test_bulk_append_gives_the_same_bytes(tmp_path):
    ids = np.concatenate([np.array(s) for s in GOLDEN_SEQUENCES])
    with IndexedDatasetWriter(tmp_path / "a", "uint16") as writer:
        writer.add_raw(ids, np.array([3, 1, 1, 5, 2]), np.array([2, 1, 2]))
        assert (writer.tokens, writer.sequences, writer.documents) == (12, 5, 3)
    with IndexedDatasetWriter(tmp_path / "b", np.uint16) as writer:
        writer.add_raw(ids[:5].astype("<u2").tobytes(), [3, 1, 1], [2, 1])
        writer.add_raw(memoryview(ids[5:].astype("<u2").tobytes()), [5, 2], [2])
    for name in "ab":
        assert (tmp_path / f"{name}.idx").read_bytes() == GOLDEN_IDX
        assert (tmp_path / f"{name}.bin").read_bytes() == GOLDEN_BIN


def test_empty_sequences_documents_and_datasets(tmp_path):
    with IndexedDatasetWriter(tmp_path / "e", "int32") as writer:
        writer.add_document([])
        writer.add_document([np.array([]), np.array([7])])
        writer.add_raw(b"", [], [])
        writer.add_document([[]])
    dataset = open_indexed(tmp_path / "e", verify=True)
    assert [[s.tolist() for s in dataset.document(k)] for k in range(3)] == [[], [[], [7]], [[]]]
    with IndexedDatasetWriter(tmp_path / "n", "int32"):
        pass
    nothing = open_indexed(tmp_path / "n", verify=True)
    assert (len(nothing), nothing.document_index.tolist(), nothing.total_tokens) == (0, [0], 0)


def test_index_larger_than_one_spool_read(tmp_path, monkeypatch):
    monkeypatch.setattr(indexed_writer, "_COPY_BYTES", 16)
    lengths = np.arange(23)
    with IndexedDatasetWriter(tmp_path / "s", "uint16") as writer:
        writer.add_raw(np.arange(253), lengths, np.array([5, 0, 6, 12]))
    dataset = open_indexed(tmp_path / "s", verify=True)
    assert dataset.document_index.tolist() == [0, 5, 5, 11, 23]
    assert np.concatenate(list(dataset)).tolist() == list(range(253))
    with IndexedDatasetWriter(tmp_path / "t", "uint16") as writer:
        writer.append_dataset(tmp_path / "s")
    assert (tmp_path / "t.bin").read_bytes() == (tmp_path / "s.bin").read_bytes()
    assert (tmp_path / "t.idx").read_bytes() == (tmp_path / "s.idx").read_bytes()


def test_merging_appends_documents(tmp_path):
    golden = write_golden(tmp_path / "g")
    with IndexedDatasetWriter(tmp_path / "m", "uint16") as writer:
        writer.append_dataset(golden)
        writer.add_document([[9]])
        writer.append_dataset(golden)
    merged = open_indexed(tmp_path / "m", verify=True)
    assert [s.tolist() for s in merged] == [*GOLDEN_SEQUENCES, [9], *GOLDEN_SEQUENCES]
    assert merged.document_index.tolist() == [0, 2, 3, 5, 6, 8, 9, 11]


def test_merging_refuses_another_type_and_damaged_tokens(tmp_path):
    golden = write_golden(tmp_path / "g")
    with pytest.raises(DataError, match="must be int32"), IndexedDatasetWriter(tmp_path / "m", "int32") as w:
        w.append_dataset(golden)
    Path(f"{golden}.bin").write_bytes(b"\xff" + GOLDEN_BIN[1:])
    with pytest.raises(DataError, match="damaged"), IndexedDatasetWriter(tmp_path / "m", "uint16") as w:
        w.append_dataset(golden)
    assert names(tmp_path) == ["g.bin", "g.idx", "g.sum"]


@over_table(
    ("dtype", "ids", "words"),
    [
        ("uint16", [65536], "0..65535 to fit uint16"),
        ("uint16", [-1], "but is -1"),
        ("int32", [1 << 31], "but is 2147483648"),
        ("int32", [-1], "but is -1"),
        ("uint8", [256], "but is 256"),
        ("int64", np.array([1 << 63], dtype=np.uint64), "but is 9223372036854775808"),
        ("uint16", [1.0], "must be integers"),
        ("int64", [1 << 70], "must be integers"),
    ],
)
def test_ids_that_do_not_fit_are_refused_and_never_wrapped(tmp_path, dtype, ids, words):
    with IndexedDatasetWriter(tmp_path / "w", dtype) as writer:
        with pytest.raises(DataError, match=words):
            writer.add_document([ids])
        writer.add_document([[5]])
    assert [s.tolist() for s in open_indexed(tmp_path / "w")] == [[5]]


@over_table("dtype", ["float32", "uint32", "uint64"])
def test_a_type_the_format_lacks_is_refused(tmp_path, dtype):
    with pytest.raises(DataError, match="`dtype` must be one of"):
        IndexedDatasetWriter(tmp_path / "w", dtype)


@over_table(
    ("tokens", "lengths", "documents", "words"),
    [
        ([1, 2, 3], [2], None, "`lengths` must add up to 3"),
        ([1, 2, 3], [4, -1], None, "`lengths` must be in"),
        ([1, 2, 3], [1, 2], [1], "`document_lengths` must add up to 2"),
        ([1, 2, 3], [1, 2], [3, -1], "`document_lengths` must be in"),
        ([1, 2, 3], [3.0], None, "`lengths` must be integers"),
        (b"abc", [1], None, "multiple of 2 bytes"),
        ([1], np.array([(1 << 64) - 1, 2], dtype=np.uint64), None, "`lengths` must be in"),
    ],
)
def test_counts_that_disagree_append_nothing(tmp_path, tokens, lengths, documents, words):
    with IndexedDatasetWriter(tmp_path / "w", "uint16") as writer:
        with pytest.raises(DataError, match=words):
            writer.add_raw(tokens, lengths, documents)
        writer.add_raw([8], [1])
    assert [s.tolist() for s in open_indexed(tmp_path / "w", verify=True)] == [[8]]


def fail_after_writing(writer: IndexedDatasetWriter) -> None:
    writer.add_document([[1]])
    raise DataError("trouble in the middle of a corpus")


def test_an_exception_leaves_nothing_and_spares_an_older_dataset(tmp_path):
    with pytest.raises(DataError), IndexedDatasetWriter(tmp_path / "new", "uint16") as writer:
        fail_after_writing(writer)
    assert names(tmp_path) == []
    golden = write_golden(tmp_path / "g")
    with pytest.raises(DataError), IndexedDatasetWriter(golden, "int32") as writer:
        fail_after_writing(writer)
    assert [s.tolist() for s in open_indexed(golden, verify=True)] == GOLDEN_SEQUENCES


def test_a_dataset_of_the_same_name_is_replaced_whole(tmp_path):
    golden = write_golden(tmp_path / "g")
    with IndexedDatasetWriter(golden, "int32") as writer:
        writer.append_dataset(write_int32(tmp_path / "other"))
    assert [s.tolist() for s in open_indexed(golden, verify=True)] == [[70000]]


def write_int32(prefix: Path) -> Path:
    with IndexedDatasetWriter(prefix, "int32") as writer:
        writer.add_document([[70000]])
    return prefix


def test_nothing_is_visible_before_the_index(tmp_path, monkeypatch):
    golden = write_golden(tmp_path / "g")
    seen = []
    replace = os.replace

    def watched(source, target):
        seen.append((Path(target).name, (tmp_path / "g.idx").exists()))
        replace(source, target)

    monkeypatch.setattr(indexed_writer.os, "replace", watched)
    with IndexedDatasetWriter(golden, "uint16") as writer:
        writer.add_document([[1]])
    assert seen == [("g.bin", False), ("g.sum", False), ("g.idx", False)]


def test_writing_to_a_closed_writer_is_refused(tmp_path):
    writer = IndexedDatasetWriter(tmp_path / "c", "uint16")
    writer.add_document(GOLDEN_DOCUMENTS[0])
    writer.close()
    writer.close()
    with pytest.raises(DataError, match="is closed"):
        writer.add_document([[1]])
    writer.abort()
    assert len(open_indexed(tmp_path / "c")) == 2


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="file/sub"):
        IndexedDatasetWriter(tmp_path / "file" / "sub" / "x", "uint16")


def run_limited(directory: Path, body: str) -> subprocess.CompletedProcess:
    """Runs `body` in a process whose files may not pass 64 KiB: writes then fail as on a full disk."""
    program = f"""
    import resource, signal, sys
    import numpy as np
    from megazero.data.indexed.writer import IndexedDatasetWriter
    from megazero.errors import DataError
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
    prefix = {str(directory / "full")!r}
    {body}
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True, text=True, cwd=Path(__file__).parents[3], check=False,
    )  # fmt: skip


FULL_DISK = {
    "while tokens are added": "w.add_raw(np.zeros(3_000_000, 'u2'), [3_000_000])",
    "while the index is written": "w.add_raw(np.zeros(9000, 'u2'), np.ones(9000, int))",
}


@over_table("when", FULL_DISK)
def test_a_full_disk_is_a_named_error_and_leaves_nothing(tmp_path, when):
    body = f"""
    try:
        with IndexedDatasetWriter(prefix, "uint16") as w:
            {FULL_DISK[when]}
    except DataError as error:
        print(error)
        sys.exit(7)
    """
    done = run_limited(tmp_path, body)
    assert done.returncode == 7, done.stderr
    assert "must be writable" in done.stdout
    assert str(tmp_path) in done.stdout
    assert names(tmp_path) == []


def test_a_killed_process_leaves_no_dataset(tmp_path):
    body = """
    w = IndexedDatasetWriter(prefix, "uint16")
    w.add_raw(np.zeros(9000, "u2"), [9000])
    signal.raise_signal(signal.SIGKILL)
    """
    assert run_limited(tmp_path, body).returncode == -signal.SIGKILL
    assert not [name for name in names(tmp_path) if name.startswith("full")]
    with pytest.raises(DataError, match=r"full\.idx"):
        open_indexed(tmp_path / "full")
