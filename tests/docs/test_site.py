"""The site builds, with a page for what it promises, and does not build with a broken link."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

pytestmark = pytest.mark.slow
NEEDED = ("benchmarks", "data_tools", "docs", "examples_3d", "megazero", "proofs", "scripts")


def build(root: Path) -> subprocess.CompletedProcess[str]:
    """Run the script that builds the site of the repository at `root`."""
    return subprocess.run(
        ["bash", "scripts/build_docs.sh"],
        cwd=root,
        env={**os.environ, "PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_the_site_builds() -> None:
    done = build(ROOT)
    assert done.returncode == 0, done.stdout
    site = ROOT / "build/site"
    for page in ("guides/pretrain", "configuration", "reference/zero", "repository/CONTRIBUTING"):
        assert (site / page / "index.html").is_file()
    assert "ParamSpec" in (site / "reference/mpu/index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[a](missing.md)", "'missing.md', but the target is not found"),
        ("[b](zero.md#missing)", "does not contain an anchor '#missing'"),
        ('<img src="https://example.org/a.png">', "the site must load nothing from elsewhere"),
    ],
)
def test_a_fault_fails_the_build(tmp_path: Path, text: str, complaint: str) -> None:
    for name in NEEDED:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for path in [*ROOT.glob("*.md"), ROOT / "mkdocs.yml", ROOT / "constraints.txt"]:
        shutil.copy2(path, tmp_path)
    (tmp_path / "build").mkdir()
    if (ROOT / "build/docs-venv/pins").is_file():
        (tmp_path / "build/docs-venv").symlink_to(ROOT / "build/docs-venv")
    with (tmp_path / "docs/plan.md").open("a", encoding="utf-8") as page:
        page.write(f"\n{text}\n")
    done = build(tmp_path)
    assert done.returncode == 1
    assert complaint in done.stdout
