from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from megazero.data.indexed.checksum import BlockChecksum
from megazero.data.indexed.reader import open_indexed
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.data_tools.dataset_facts import LengthFacts, histogram, unigram_entropy
from megazero.data_tools.inspect_dataset import main
from tests.data.corpora import GOLDEN_BIN, write_bytes
from tests.data.indexed.test_format import legacy_index


@pytest.fixture
def prefix(out):
    with IndexedDatasetWriter(str(out / "d"), np.uint16) as writer:
        writer.add_document([np.array([104, 105]), np.array([33])])
        writer.add_document([])
        writer.add_document([np.array([97, 97, 97, 97, 256])])
    return str(out / "d")


def test_facts_as_json(prefix, capsys):
    assert main([prefix, "--json", "--histogram", "--validate", "--unigram-entropy", "--document", "0"]) == 0
    facts = json.loads(capsys.readouterr().out)
    entropy = facts.pop("unigram_entropy")
    assert facts == {
        "prefix": prefix, "sequences": 3, "documents": 3, "tokens": 8, "dtype": "uint16",
        "bin_bytes": 16, "idx_bytes": 34 + 12 * 3 + 8 * 4, "checksums": True, "valid": True,
        "sequence_lengths": {"min": 1, "median": 2.0, "mean": 8 / 3, "max": 5},
        "document_lengths": {"min": 0, "median": 3.0, "mean": 8 / 3, "max": 5},
        "sequences_per_document": {"min": 0, "median": 1.0, "mean": 1.0, "max": 2},
        "documents_of_one_sequence": 1,
        "histogram": [[0, 0, 1], [1, 1, 0], [2, 3, 1], [4, 7, 1]],
        "document": {"number": 0, "ids": [[104, 105], [33]]},
    }  # fmt: skip
    # Half the tokens are one id, the others four different ones: ln 2 / 2 + 4 * ln 8 / 8.
    assert entropy == pytest.approx(2 * math.log(2), abs=1e-12)


def test_text_output_decodes_a_document(prefix, capsys):
    flags = ["--document", "2", "--tokenizer-type", "ByteLevelTokenizer", "--validate", "--histogram"]
    assert main([prefix, *flags]) == 0
    shown = capsys.readouterr().out
    assert shown.rstrip().endswith("document 2: 1 sequences\naaaa<|endoftext|>")
    assert "valid             yes (index and tokens)" in shown
    assert "           4 - 7                     1 " + "#" * 50 in shown


def test_the_cost_of_packing_beside_documents_laid_end_to_end(out, capsys):
    """Of sequences of 8: 6 + 2, 5 + 3 and 4 fill three; 9 is cut anyway. End to end, 5, 9 and 2 are cut."""
    with IndexedDatasetWriter(str(out / "p"), np.uint16) as writer:
        for length in (6, 5, 0, 3, 9, 2):
            writer.add_document([np.full(length, 7)])
    assert main([str(out / "p"), "--pack", "8"]) == 0
    shown = capsys.readouterr().out
    assert "packed            4 sequences of 8 tokens, 7 positions (21.88%) of padding" in shown
    assert "documents cut     1 of 5; 3 if laid end to end" in shown
    assert main([str(out / "p"), "--pack", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["packing"] == {
        **{"sequence_length": 8, "documents": 5, "sequences": 4},
        **{"padding": 7, "cut": 1, "cut_end_to_end": 3},
    }
    with pytest.raises(SystemExit):
        main([str(out / "p"), "--pack", "0"])


def test_sentences_per_document_are_told_where_documents_have_several(out, capsys):
    with IndexedDatasetWriter(str(out / "s"), np.uint16) as writer:
        for sentences in (1, 4, 2, 1):
            writer.add_document([np.array([7, 8])] * sentences)
    assert main([str(out / "s")]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "per document" in line)
    assert line.split(None, 2)[2] == "min 1, median 1.5, mean 2.0, max 4 sequences; 2 documents have one"
    with IndexedDatasetWriter(str(out / "w"), np.uint16) as writer:
        writer.add_document([np.array([7, 8])])
    assert main([str(out / "w")]) == 0
    assert "per document" not in capsys.readouterr().out


@pytest.mark.parametrize("end", [".bin", ".idx"])
def test_damaged_dataset_exits_1(prefix, capsys, end):
    with open(prefix + end, "r+b") as file:
        file.seek(-3, 2)
        byte = file.read(1)[0]
        file.seek(-3, 2)
        file.write(bytes([byte ^ 4]))
    assert main([prefix, "--validate"]) == 1
    assert "error: " in capsys.readouterr().err


def test_missing_dataset_or_document_exits_1(prefix, capsys):
    assert main([prefix + "x"]) == 1
    assert "dx.idx" in capsys.readouterr().err
    assert main([prefix, "--document", "3"]) == 1
    assert "0..2" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([prefix, "--document", "-1"])


def sums(prefix: str) -> Path:
    return Path(f"{prefix}.sum")


def test_sums_are_written_where_there_are_none(prefix, capsys):
    whole = sums(prefix).read_bytes()
    sums(prefix).unlink()
    assert main([prefix, "--write-sums"]) == 0
    assert ".sum              written\n" in capsys.readouterr().out
    assert sums(prefix).read_bytes() == whole  # what the writer of the dataset left
    before = sums(prefix).stat().st_mtime_ns
    assert main([prefix, "--write-sums"]) == 0
    assert "not written: it is there and agrees with all tokens" in capsys.readouterr().out
    assert sums(prefix).stat().st_mtime_ns == before
    assert main([prefix, "--write-sums", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["wrote_sums"] is False


@pytest.mark.parametrize("wrong", ["tokens", "index", "sums", "nonsense"])
def test_sums_that_do_not_agree_are_refused_and_stay(prefix, capsys, wrong):
    if wrong in ("tokens", "index"):
        path = Path(prefix + {"tokens": ".bin", "index": ".idx"}[wrong])
        content = bytearray(path.read_bytes())
        content[-2 if wrong == "tokens" else 70] ^= 1
        path.write_bytes(content)
    else:
        said = json.loads(sums(prefix).read_text())
        said["bin"]["crc32"] = "00000000"
        sums(prefix).write_text(json.dumps(said) if wrong == "sums" else "{")
    there = sums(prefix).read_bytes()
    assert main([prefix, "--write-sums"]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert f"{prefix}." in told.err
    assert "delete" in told.err
    assert sums(prefix).read_bytes() == there


def test_a_legacy_dataset_gets_sums(out):
    prefix = write_bytes(out / "old", legacy_index(), GOLDEN_BIN)
    assert main([str(prefix), "--write-sums"]) == 0
    assert open_indexed(prefix, verify=True)[3].tolist() == [31, 32, 33, 34, 35]


def test_a_dataset_that_changes_gets_no_sums(prefix, capsys, monkeypatch):
    sums(prefix).unlink()
    honest = BlockChecksum.update

    def touched(self, data):
        os.utime(f"{prefix}.bin", (1, 1))
        honest(self, data)

    monkeypatch.setattr(BlockChecksum, "update", touched)
    assert main([prefix, "--write-sums"]) == 1
    assert "must stay as it is while its checksums are computed" in capsys.readouterr().err
    assert not sums(prefix).exists()


def test_histogram_edges_are_exact_at_powers_of_two():
    lengths = np.array([0, 1, 2, 3, 4, 7, 8, 2**30 - 1, 2**30, 2**31 - 1])
    rows = {(first, last): count for first, last, count in histogram(lengths)}
    assert rows[(0, 0)] == rows[(1, 1)] == rows[(8, 15)] == rows[(2**29, 2**30 - 1)] == 1
    assert rows[(2, 3)] == rows[(4, 7)] == rows[(2**30, 2**31 - 1)] == 2
    assert sum(rows.values()) == 10


def test_empty_dataset_has_zero_everywhere(out):
    with IndexedDatasetWriter(str(out / "e"), np.int32):
        pass
    assert main([str(out / "e"), "--histogram", "--unigram-entropy", "--validate"]) == 0
    assert unigram_entropy(open_indexed(str(out / "e"))) == 0.0
    assert LengthFacts.of(np.zeros(0)) == LengthFacts(0, 0.0, 0.0, 0)
