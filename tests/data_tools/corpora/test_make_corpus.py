from __future__ import annotations

import json
from collections import Counter

import pytest

from megazero.data_tools.corpora import sources as make_corpus
from megazero.data_tools.corpora.sources import documents, main


@pytest.fixture
def library(tmp_path, monkeypatch):
    root = tmp_path / "lib"
    files = {
        "os.py": b"import sys\n", "b/z.py": b"z = 1\n", "b/a.py": "é = 2\n".encode(), "b.py": b"z = 1\n",
        "empty.py": b" \n", "latin.py": b"# -*- coding: latin-1 -*-\n# \xe9\n", "notes.txt": b"no",
        "site-packages/p.py": b"p\n", "test/t.py": b"t = 3\n", "test/tokenizedata/bad.py": b"bad\n",
    }  # fmt: skip
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    monkeypatch.setattr(make_corpus.sysconfig, "get_path", lambda name: str(root))
    return root


def test_documents_are_the_distinct_readable_sources_in_order(library):
    counts = Counter()
    found = [(document["path"], document["text"]) for document in documents(library, counts)]
    assert found == [
        ("b.py", "z = 1\n"),
        ("b/a.py", "é = 2\n"),
        ("os.py", "import sys\n"),
        ("test/t.py", "t = 3\n"),
    ]
    assert counts == {"unreadable": 1, "duplicate": 1, "empty": 1}


def test_corpus_is_written_whole_and_the_same_twice(library, out, capsys):
    for name in ("a", "b"):
        assert main(["--output", str(out / name)]) == 0
    assert "4 documents" in capsys.readouterr().out
    assert (out / "a").read_bytes() == (out / "b").read_bytes()
    rows = [json.loads(line) for line in (out / "a").read_text(encoding="utf-8").splitlines()]
    assert rows[1] == {"text": "é = 2\n", "path": "b/a.py"}


def test_limit_stops_before_the_corpus_grows_beyond_it(library, out, capsys):
    assert main(["--output", str(out / "c"), "--max-mb", "0.00009"]) == 0
    assert 0 < (out / "c").stat().st_size <= 90
    assert main(["--output", str(out / "d"), "--max-mb", "0.000001"]) == 1
    assert "must leave room" in capsys.readouterr().err
    assert not (out / "d").exists()


def test_library_in_a_zip_or_without_sources_is_refused(tmp_path, out, monkeypatch, capsys):
    archive = tmp_path / "python311.zip"
    archive.write_bytes(b"PK")
    for path, words in ((archive, "is a zip archive"), (tmp_path / "nowhere", "holds no sources")):
        monkeypatch.setattr(make_corpus.sysconfig, "get_path", lambda name, path=path: str(path))
        assert main(["--output", str(out / "c")]) == 1
        assert words in capsys.readouterr().err
    assert list(out.iterdir()) == []
