"""Labelled files as they are published, and what is said of those that are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megazero.config.tasks import TASKS, Task
from megazero.data.labelled.files import LabelledText, read_labelled
from megazero.errors import DataError
from tests.tables import over_table

PAIR = Task(("a", "b"))


def write(folder: Path, text: str, name: str = "f.tsv") -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    return str(path)


def read(path: str, task: Task | str, labels_needed: bool = True):
    return read_labelled(path, TASKS[task] if isinstance(task, str) else task, labels_needed=labels_needed)


MNLI = (
    "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\t"
    "sentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label\n"
    '0\t31193\t31193n\tgovernment\t( x )\t( y )\t(R)\t(S)\tSo "called\tNot so\tneutral\tneutral\n'
    "1\t1\t1e\tfiction\t( x )\t( y )\t(R)\t(S)\tA\tB\tentailment\t-\n"
    "2\t2\t2c\tfiction\t( x )\t( y )\t(R)\t(S)\tC\tD\tcontradiction\tcontradiction\r\n"
)


@over_table(
    ("task", "text", "samples"),
    [
        (
            "MNLI",
            MNLI,
            [
                LabelledText("31193n", ('So "called', "Not so"), (), "neutral"),
                LabelledText("2c", ("C", "D"), (), "contradiction"),
            ],
        ),
        (
            "QQP",
            "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n7\t1\t2\tWhy?\tHow?\t0\n8\t3\t4\tcut\n",
            [LabelledText("7", ("Why?", "How?"), (), "0")],
        ),
        ("SST-2", "sentence\tlabel\nfine \t1\n", [LabelledText("1", ("fine ",), (), "1")]),
        ("CoLA", "gj04\t1\t\tThey drank.\ngj04\t0\t*\tDrank they\n", [
            LabelledText("1", ("They drank.",), (), "1"), LabelledText("2", ("Drank they",), (), "0")
        ]),
        (
            "MRPC",
            "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t5\t6\tA\tB\n",
            [LabelledText("1", ("A", "B"), (), "1")],
        ),
        ("RTE", "index\tsentence1\tsentence2\tlabel\n3\tA\tB\tnot_entailment\n", [
            LabelledText("3", ("A", "B"), (), "not_entailment")
        ]),
        ("QNLI", "index\tquestion\tsentence\tlabel\n3\tQ\tS\tentailment\n", [
            LabelledText("3", ("Q", "S"), (), "entailment")
        ]),
    ],
)  # fmt: skip
def test_published_files_are_read_as_they_are(tmp_path, task, text, samples):
    assert list(read(write(tmp_path, text), task).samples) == samples


def test_what_is_left_out_is_counted(tmp_path):
    path = write(tmp_path, MNLI + "3\tcut\n")
    assert read(path, "MNLI").remarks == (
        f"{path}: left out 1 lines with another number of fields",
        f"{path}: left out 1 samples without a label",
    )


@pytest.mark.parametrize(
    ("task", "text"),
    [
        ("MNLI", "index\tpairID\tsentence1\tsentence2\n0\t9\tA\tB\n"),
        ("CoLA", "index\tsentence\n9\tA\n"),
    ],
)
def test_test_files_need_no_labels(tmp_path, task, text):
    (sample,) = read(write(tmp_path, text), task, labels_needed=False).samples
    assert sample.label is None
    with pytest.raises(DataError, match="must be a column of"):
        read(write(tmp_path, text), task)


PASSAGE = {
    "id": "high1.txt",
    "article": "Long ago.",
    "questions": ["When was _ ?", "Who"],
    "options": [["a", "b", "c", "d"], ["e", "f", "g", "h"]],
    "answers": ["B", "D"],
}
QUESTIONS = [
    LabelledText("high1.txt-0", ("Long ago.", "When was _ ?"), ("a", "b", "c", "d"), "B"),
    LabelledText("high1.txt-1", ("Long ago.", "Who"), ("e", "f", "g", "h"), "D"),
]


def test_race_is_a_folder_of_passages(tmp_path):
    write(tmp_path, json.dumps(PASSAGE), "train/high/1.txt")
    write(tmp_path, json.dumps({**PASSAGE, "id": "m"}, indent=1), "train/middle/0.txt")
    found = read(str(tmp_path / "train"), "RACE").samples
    assert list(found[:2]) == QUESTIONS
    assert [sample.identity for sample in found[2:]] == ["m-0", "m-1"]


def test_race_is_a_question_in_each_line(tmp_path):
    columns = ("id", "article", "question", "options", "answer")
    values = [(each.identity, *each.texts, each.choices, each.label) for each in QUESTIONS]
    rows = [dict(zip(columns, row, strict=True)) for row in values]
    assert list(read(write(tmp_path, "\n".join(map(json.dumps, rows))), "RACE").samples) == QUESTIONS


def test_numbers_and_truth_values_are_text(tmp_path):
    path = write(tmp_path, '{"a": 1, "b": true, "label": 0}\n\n{"a": "x", "b": 0.5, "label": null}\n')
    found = read(path, PAIR)
    assert list(found.samples) == [LabelledText("1", ("1", "true"), (), "0")]
    assert found.remarks == (f"{path}: left out 1 samples without a label",)


@over_table(
    ("text", "says"),
    [
        ("", "must hold labelled samples, but is empty"),
        ("\n \n", "must hold labelled samples, but is empty"),
        ("a\tlabel\nx\t1\n", "`b` must be a column of .*, but the columns are a, label; name the right one"),
        ("a\tb\nx\ty\n", "`label` must be a column of .*sample 1, but the columns are a, b"),
        ("a\tb\tlabel\n", "must hold labelled samples, but has none .0 malformed lines, 0 without a label."),
        ("a\tb\tlabel\nx\n", "must hold labelled samples, but has none .1 malformed lines"),
        ('{"a": 1, "b": 2}', "`label` must be a column of"),
        ('{"a": 1, "b": [], "label": 2}', "`b` must be text or a number, but is '..' in"),
        ('{"a": 1, "b": 2, "label": 3}\n{"a"\n', "must hold JSON objects, but line 2 does not"),
        ('{"a": 1, "b": 2, "label": 3}\n[1]\n', "must hold JSON objects, but has '.1.' among them"),
    ],
)
def test_unsuitable_files_get_a_sentence(tmp_path, text, says):
    with pytest.raises(DataError, match=says):
        read(write(tmp_path, text), PAIR)


def test_missing_and_foreign_files_get_a_sentence(tmp_path):
    with pytest.raises(DataError, match="but is missing"):
        read(str(tmp_path / "nowhere"), PAIR)
    with pytest.raises(DataError, match="must hold files ending in"):
        read(str(tmp_path), PAIR)
    (tmp_path / "f.tsv").write_bytes(b"a\tb\tlabel\n\xff\xfe")
    with pytest.raises(DataError, match="must be readable UTF-8 text"):
        read(str(tmp_path / "f.tsv"), PAIR)
    choosing = Task(("a",), choices=("b",), multiple_choice=True)
    with pytest.raises(DataError, match="`b` must list the choices, but is 'y'"):
        read(write(tmp_path, "a\tb\tlabel\nx\ty\t1\n"), choosing)
