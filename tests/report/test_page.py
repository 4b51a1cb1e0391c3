"""The page: a file that loads nothing, whose numbers are the runs', and in which no text is HTML."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import megazero.report.page as module
from megazero.commands.report import main
from megazero.report.page import UPLOT, encoded, page_of, read_runs
from megazero.report.run import Source
from tests.report.samples import data_of, record, start, write

ASSETS = Path(module.__file__).parent / "assets"
EVIL = "</script><script>alert(1)</script><!--"


def page(*folders) -> str:
    return page_of(read_runs([Source.of(folder) for folder in folders]))


def test_the_page_loads_nothing(tmp_path):
    text = page(write(tmp_path, [record(1)]))
    # The library's home page in its comment of licence is the only address.
    assert set(re.findall(r"\w+://[^\s\"'`)]+", text)) == {"https://github.com/leeoniya/uPlot"}
    assert not re.search(
        r"<(link[^>]*href=\"(?!data:)|img|iframe|script[^>]*src|object|embed)|@import|url\((?!data:)", text
    )
    assert "default-src 'none'" in text
    assert "connect-src" not in text


def test_the_library_is_the_version_that_is_named_and_its_licence_is_there():
    assert f"(v{UPLOT})" in (ASSETS / "uPlot.iife.min.js").read_text()
    assert "The MIT License" in (ASSETS / "uPlot.LICENSE").read_text()


def test_only_the_two_scripts_of_the_page_may_run(tmp_path):
    import base64
    import hashlib

    text = page(write(tmp_path, [record(1)]))
    codes = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    allowed = re.findall(r"'sha256-(.*?)'", text)
    assert [base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() for code in codes] == allowed


def test_several_runs_are_in_one_page(tmp_path):
    folders = [
        write(tmp_path / name, [record(i, lm_loss=loss) for i in (1, 2)])
        for name, loss in (("a", 1.0), ("b", 2.0))
    ]
    twin = write(tmp_path / "c/a", [record(1)])
    shown = data_of(page(*folders, twin))
    assert [run["name"] for run in shown["runs"]] == [
        f"{folders[0]}/metrics.jsonl",
        "b",
        f"{twin}/metrics.jsonl",
    ]
    assert [run["steps"]["series"]["lm_loss"]["mean"] for run in shown["runs"][:2]] == [
        [1.0, 1.0],
        [2.0, 2.0],
    ]


def test_no_text_of_a_run_is_html(tmp_path):
    folder = tmp_path / "<b>run&"
    write(folder, [record(1)], run=[start(), {"event": "message", "text": EVIL, "iteration": 1}])
    (folder / "samples.jsonl").write_text(json.dumps({"iteration": 1, "prompt": EVIL, "text": EVIL}) + "\n")
    text = page(folder)
    assert text.count("<script") == 3
    assert "<b>" not in text
    assert "<title>brun</title>" in text
    shown = data_of(text)["runs"][0]
    assert shown["name"] == "<b>run&"
    assert shown["samples"][0]["text"] == shown["log"][0]["text"] == EVIL


def test_odd_numbers_and_letters_do_not_keep_a_page_from_being_written(tmp_path):
    folder = write(tmp_path / "a", [record(1)])
    (folder / "metrics.eval.jsonl").write_text(
        '{"iteration": 1, "a": NaN, "b": 1%s, "c": "\\ud800"}\n' % ("0" * 30)
    )
    (evaluation,) = data_of(page(folder))["runs"][0]["evaluations"]
    assert evaluation == {"iteration": 1, "a": None, "b": 10**30, "c": "\ud800"}


def test_without_orjson_the_page_is_the_same(tmp_path, monkeypatch):
    value = {"a": [1, 2.5, None, "ü"]}
    fast = json.loads(encoded(value))
    monkeypatch.setitem(__import__("sys").modules, "orjson", None)
    assert json.loads(encoded(value)) == fast == value


def test_the_command_writes_into_the_runs_folder_and_names_damage(tmp_path, capsys):
    folder = write(tmp_path / "run", [record(1), record(2)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('rubbish\n{"iter')
    assert main([str(folder)]) == 0
    out, err = capsys.readouterr()
    assert out == f"written to {folder}/report.html\n"
    assert [line.split(", ")[1][:7] for line in err.splitlines()] == ["line 3 ", "line 4 "]
    shown = data_of((folder / "report.html").read_text())["runs"][0]
    assert len(shown["damage"]) == 2
    assert shown["steps"]["x"]["steps"] == [1, 2]
    assert main([str(folder / "metrics.jsonl"), "--output", str(tmp_path / "other.html")]) == 0
    assert data_of((tmp_path / "other.html").read_text())["title"] == "run"


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        ([], 1, "`RUN` must be a folder with a run's metrics"),
        (["--watch", "--output", "x.html"], 2, "`--output` must be left out with `--watch`"),
        (["--port", "70000"], 2, "`--port` must be a number from 0 to 65535"),
    ],
)
def test_wrong_input_is_one_sentence(tmp_path, monkeypatch, capsys, flags, status, message):
    monkeypatch.chdir(tmp_path)
    assert main([str(tmp_path), *flags]) == status
    assert capsys.readouterr().err.startswith(f"error: {message}")
