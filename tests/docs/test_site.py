"""The site builds, with a page for what it promises, and does not build with a broken link."""

from __future__ import annotations

import json
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


@pytest.fixture(scope="module")
def site() -> Path:
    """The site of this repository."""
    done = build(ROOT)
    assert done.returncode == 0, done.stdout
    return ROOT / "build/site"


def test_the_site_builds(site: Path) -> None:
    for page in ("guides/pretrain", "configuration", "reference/zero", "repository/CONTRIBUTING"):
        assert (site / page / "index.html").is_file()
    assert "ParamSpec" in (site / "reference/mpu/index.html").read_text(encoding="utf-8")
    assert 'href="../reference/mpu/"' in (site / "tour/index.html").read_text(encoding="utf-8")


def test_the_index_has_no_sources_and_no_data(site: Path) -> None:
    index = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))
    pages = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert [page for page in pages if "." in page] == []  # a page that shows a file has its ending
    assert {"repository/CONTRIBUTING/", "guides/debug/", "configuration/", "reference/zero/"} < pages


SHOWN_FIRST = {
    "out of memory": "guides/debug/",
    "oom": "guides/debug/",
    "it hangs": "guides/debug/",
    "NaN": "guides/debug/",
    "loss spike": "guides/debug/",
    "resume": "guides/resume/",
    "how do I resume a run": "guides/resume/",
    "convert": "guides/convert/",
    "hugging face": "guides/convert/",
    "deepspeed": "guides/coming_from_deepspeed/",
    "megatron": "guides/from_megatron/",
    "fine-tune": "guides/fine_tune/",
    "experts": "guides/experts/",
    "long context": "guides/long_context/",
    "multi node": "guides/scale_out/",
    "ring attention": "context_parallel/",
    "generate text": "inference/",
    "slurm": "launch/",
    "--zero-stage": "configuration/#--zero-stage",
    "--lr": "configuration/#--lr",
    "--bf16": "configuration/#--bf16",
    "--no-load-optim": "configuration/#--no-load-optim",
    "--micro-batch-size": "configuration/#--micro-batch-size",
    "--tensor-model-parallel-size": "configuration/#--tensor-model-parallel-size",
    "--swin-backbone-type": "foreign_flags/",
    "stage3_prefetch_bucket_size": "deepspeed_json/",
    "ParamSpec": "guides/add_a_model/",
}
"""Query -> how the place begins that is shown first."""


@pytest.mark.skipif(shutil.which("node") is None, reason="the site's search runs in node")
def test_guides_are_found_before_the_reference(site: Path) -> None:
    command = ["node", str(ROOT / "tests/docs/search.js"), str(site), *SHOWN_FIRST]
    places = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    first = {query: places[query][0] for query in SHOWN_FIRST}
    assert {query: place for query, place in first.items() if not place.startswith(SHOWN_FIRST[query])} == {}


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
    for path in [*ROOT.glob("*.md"), *ROOT.glob("*.py"), ROOT / "mkdocs.yml", ROOT / "constraints.txt"]:
        shutil.copy2(path, tmp_path)
    (tmp_path / "build").mkdir()
    if (ROOT / "build/docs-venv/pins").is_file():
        (tmp_path / "build/docs-venv").symlink_to(ROOT / "build/docs-venv")
    with (tmp_path / "docs/plan.md").open("a", encoding="utf-8") as page:
        page.write(f"\n{text}\n")
    done = build(tmp_path)
    assert done.returncode == 1
    assert complaint in done.stdout
