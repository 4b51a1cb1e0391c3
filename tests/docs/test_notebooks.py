"""The notebooks of docs/notebooks: clean files whose commands exist, and which run every night."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.docs.commands import command_violations, commands
from tests.docs.pages import ROOT, Document

FOLDER = ROOT / "docs/notebooks"
IN_ORDER = ("quickstart", "convert_and_continue", "plan_a_cluster")
"""The second continues with what the first has made."""


def cells(name: str) -> list[dict[str, object]]:
    """The cells of a notebook."""
    listed: list[dict[str, object]] = json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
    return listed


def test_every_notebook_is_run_and_kept_without_what_it_printed():
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(IN_ORDER)
    for name in IN_ORDER:
        for cell in cells(name):
            assert cell.get("outputs", []) == []
            assert cell.get("execution_count") is None


def test_the_commands_of_notebooks_exist():
    """As those of pages: a notebook's shell cells, as a page with a block for each."""
    shown = 0
    for name in IN_ORDER:
        sources = ["".join(cell["source"]) for cell in cells(name)]  # type: ignore[arg-type]
        shells = [text.removeprefix("!") for text in sources if text.startswith(("%%bash", "!"))]
        page = "\n".join(f"```bash\n{text}\n```\n" for text in shells)
        lines = list(commands(Document(f"docs/notebooks/{name}.ipynb", page)))
        assert [problem for line in lines for problem in command_violations(line)] == []
        shown += len(lines)
    assert shown >= 13


@pytest.mark.slow
def test_the_notebooks_run_from_the_first_to_the_last(tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    for name in IN_ORDER:
        notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
        client.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": tmp_path}}).execute()
    assert (tmp_path / "out/notebook/report.html").stat().st_size > 10_000
    assert Path(tmp_path / "out/notebook/further/metrics.jsonl").exists()
