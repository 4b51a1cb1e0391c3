"""Documents split into sentences, and inputs split into partitions."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path

import pytest

from megazero.data_tools.preprocess_data import main
from megazero.data_tools.preprocessing import encode, pipeline
from megazero.data_tools.preprocessing.pipeline import PreprocessRun, Workers, preprocess
from tests.data_tools.conftest import BYTES, NULL, visible, write_jsonl
from tests.data_tools.preprocessing import acting_after, read_documents, spec_of
from tests.tables import over_table

_ASTER = "Dr. Aster paid 3.50 at 5 p.m. He left.\nThen it rained!"
_SPLIT = [
    {"text": _ASTER, "b": "x"},
    {"text": ["Kept whole. As given.", "", "Two."], "b": ["y"]},
    {"text": "  \n\n ", "b": "One. Two."},
    {"text": "Only one\n\n", "b": "z"},
    {"text": "naïve “café. Bar”!\u3000A. B. Ende", "b": ""},
]


def _decoded(prefix: str) -> list[list[str]]:
    return [[bytes(sequence).decode() for sequence in document] for document in read_documents(prefix)]


def test_each_sentence_becomes_a_sequence_and_short_documents_are_counted(tmp_path, out, capsys):
    path = write_jsonl(tmp_path / "f.jsonl", _SPLIT)
    flags = ["--split-sentences", "--json-keys", "text", "b", "--keep-sequential-samples", *BYTES]
    assert main(["--input", path, "--output-prefix", str(out / "p"), *flags]) == 0
    assert _decoded(str(out / "p_text_sentence")) == [
        ["Dr. Aster paid 3.50 at 5 p.m.", "He left.", "Then it rained!"],
        ["Kept whole. As given.", "Two."],
        ["Only one"],
        ["naïve “café. Bar”!", "A. B. Ende"],
    ]
    assert _decoded(str(out / "p_b_sentence")) == [["x"], ["y"], ["One.", "Two."], ["z"]]
    shown = capsys.readouterr().out
    assert "4 documents of one sentence give no samples to BERT's binary head" in shown
    assert [name for name in visible(out) if "sentence" not in name] == []


def test_newlines_are_kept_at_the_end_of_sentences(tmp_path, out):
    path = write_jsonl(tmp_path / "f.jsonl", [{"text": _ASTER + "\n\n \nEnd \n"}])
    flags = ["--split-sentences", "--keep-newlines", "--lang", "EN", *BYTES]
    assert main(["--input", path, "--output-prefix", str(out / "p"), *flags]) == 0
    sentences = ["Dr. Aster paid 3.50 at 5 p.m. ", "He left.\n", "Then it rained!\n\n \n", "End \n"]
    assert _decoded(str(out / "p_text_sentence")) == [sentences]


def test_sentences_are_the_same_bytes_for_any_numbers_of_workers_and_partitions(tmp_path, out):
    from megazero.data_tools.preprocessing.sentences import SentenceRules

    rows = [{"text": f"Mr. {i} went. " * (i % 5) + f"End {i}"} for i in range(120)] + _SPLIT
    plain = write_jsonl(tmp_path / "a.jsonl", rows[:70])
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in rows[70:])))
    job = encode.EncodeJob(spec_of(BYTES), ("text",), sentences=SentenceRules())
    digests = set()
    for workers, partitions, chunk_bytes in ((1, 1, 1 << 20), (2, 1, 300), (2, 2, 200), (3, 3, 1 << 20)):
        prefix = str(out / f"w{workers}_{partitions}_{chunk_bytes}")
        run = PreprocessRun(
            (plain, str(packed)), prefix, job, Workers(workers, partitions), 1000, chunk_bytes
        )
        totals = preprocess(run).totals
        assert (totals.lines, totals.keys["text"].documents, totals.keys["text"].empty) == (125, 124, 1)
        assert (totals.keys["text"].sequences, totals.keys["text"].single) == (368, 25)
        ends = (".bin", ".idx", ".sum")
        digests.add(tuple(Path(f"{prefix}_text_sentence{end}").read_bytes() for end in ends))
    assert len(digests) == 1
    assert len(visible(out)) == 12


def test_bad_lines_are_numbered_from_the_start_of_the_file_in_every_partition(tmp_path, out, capsys):
    rows = [{"text": "1 2"}] * 20 + [b"{bad"] + [{"text": "3"}] * 20 + [{"text": 4}, {"text": "5"}]
    path = write_jsonl(tmp_path / "f.jsonl", rows)
    flags = ["--input", path, "--output-prefix", str(out / "p"), "--workers", "4", "--partitions", "4", *NULL]
    assert main(flags) == 1
    error = capsys.readouterr().err
    assert "f.jsonl, line 21: malformed JSON" in error or "f.jsonl, line 42: wrong type" in error
    assert visible(out) == []
    assert multiprocessing.active_children() == []
    assert main([*flags, "--on-error", "skip"]) == 0
    error = capsys.readouterr().err
    assert [line.split(": ")[0].rsplit(" ", 1)[1] for line in error.splitlines()[1:]] == ["21", "42"]
    assert len(read_documents(str(out / "p_text_document"))) == 41


@pytest.mark.parametrize(
    ("act", "status"),
    [
        (lambda: os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL), 1),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), 143),
    ],
)
def test_stopped_partitions_leave_nothing(tmp_path, out, monkeypatch, act, status):
    path = write_jsonl(tmp_path / "f.jsonl", [{"text": "1 2 3"}] * 500)
    monkeypatch.setattr(pipeline, "cut", acting_after(6, act))
    flags = ["--workers", "2", "--partitions", "2", *NULL]
    assert main(["--input", path, "--output-prefix", str(out / "p"), *flags]) == status
    assert visible(out) == []
    assert multiprocessing.active_children() == []


@over_table(
    ("flags", "words"),
    [
        (
            ["--partitions", "2"],
            "`--workers` must be a multiple of `--partitions` (2), but is 1; set it to 2.",
        ),
        (["--keep-newlines"], "`--keep-newlines` must come with `--split-sentences`"),
        (["--lang", "german"], "`--lang` must come with `--split-sentences`"),
        (["--split-sentences", "--lang", "klingon"], "but is klingon"),
    ],
)
def test_unfit_sentence_flags_are_refused(tmp_path, out, capsys, flags, words):
    path = write_jsonl(tmp_path / "f.jsonl", [{"text": "1"}])
    assert main(["--input", path, "--output-prefix", str(out / "p"), *flags, *NULL]) == 1
    assert words in capsys.readouterr().err
    assert visible(out) == []


def test_missing_splitter_is_named(tmp_path, out, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencex", None)
    path = write_jsonl(tmp_path / "f.jsonl", [{"text": "1"}])
    run = ["--input", path, "--output-prefix", str(out / "p"), *NULL]
    assert main([*run, "--split-sentences"]) == 1
    assert "must have the package sentencex" in capsys.readouterr().err
    assert main(run) == 0


def test_whole_documents_for_bert_are_remarked(tmp_path, out, capsys):
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\n.\n")
    path = write_jsonl(tmp_path / "f.jsonl", [{"text": "The. The the."}])
    run = ["--input", path, "--output-prefix", str(out / "p"), "--vocab-file", str(vocab)]
    run += ["--tokenizer-type", "BertWordPieceLowerCase"]
    assert main(run) == 0
    assert "note: each text is one sentence" in capsys.readouterr().err
    assert main([*run, "--split-sentences"]) == 0
    assert "note:" not in capsys.readouterr().err
    assert read_documents(str(out / "p_text_sentence")) == [[[5, 6], [5, 5, 6]]]


def test_text_that_cannot_be_split_is_a_bad_line(tmp_path, out, capsys, monkeypatch):
    from megazero.data_tools.preprocessing.sentences import SentenceSplitter

    real = SentenceSplitter._ask

    def ask(self, text):
        if "zebra" in text:
            raise encode.DataError("text must be such that sentencex can split it")
        return real(self, text)

    monkeypatch.setattr(SentenceSplitter, "_ask", ask)
    path = write_jsonl(tmp_path / "f.jsonl", [{"text": "1 2"}, {"text": "a zebra"}, {"text": "3"}])
    run = ["--input", path, "--output-prefix", str(out / "p"), "--split-sentences", *NULL]
    assert main(run) == 1
    assert "f.jsonl, line 2: not tokenizable: key `text`: text must be such" in capsys.readouterr().err
    assert main([*run, "--on-error", "skip"]) == 0
    assert read_documents(str(out / "p_text_sentence")) == [[[1, 2]], [[3]]]
