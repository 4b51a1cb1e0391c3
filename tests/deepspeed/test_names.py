"""`import deepspeed` is megazero's: names resolve, modules and version are found, in children too."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import megazero
from megazero.deepspeed import surface
from megazero.deepspeed.surface import PATH, VERSION, Name, Surface, read_names
from megazero.errors import ConfigError
from scripts.names_page import names_page
from tests.forks import run

ROOT = Path(__file__).parents[2]
ROWS = read_names()
ASK = """
import importlib.metadata as metadata, importlib.util as util
spec = util.find_spec("deepspeed")
print(metadata.version("deepspeed"), metadata.metadata("deepspeed")["Name"], spec.origin)
import deepspeed
from deepspeed.runtime.engine import DeepSpeedEngine
print(type(deepspeed).__name__, deepspeed.__file__ == spec.origin, DeepSpeedEngine.__module__)
"""
ANSWER = [
    f"0.19.8 deepspeed {PATH / 'deepspeed/__init__.py'}",
    "SurfaceModule True megazero.deepspeed.engine.engine",
]


def python(code: str, path: str = str(ROOT)) -> subprocess.CompletedProcess[str]:
    """What a fresh interpreter says."""
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def test_the_page_of_names_is_current():
    page = ROOT / "docs/initialize.md"
    text = names_page(ROWS)
    if os.environ.get("MEGAZERO_UPDATE_SNAPSHOTS"):
        page.write_text(text, encoding="utf-8")
    assert page.read_text(encoding="utf-8") == text


def test_a_page_lists_each_name_with_its_state():
    page = names_page(
        [Name(("a.b", "c"), "x", "m:x", "differs", "by | one"), Name((".",), "y", "m:y", "same", "")]
    )
    assert "2 names: 1 same, 1 differs, 0 no effect, 0 refused." in page
    assert "| `a.b.x` | `c` | differs | by \\| one |" in page
    assert (
        "## `deepspeed`\n\n| Name | Also in | State | Note |\n|---|---|---|---|\n| `y` |  | same |  |" in page
    )


def test_modules_and_their_parents_exist_and_others_do_not():
    found = Surface([Name(("a.b",), "x", "math:pi", "same", "")]).as_module("deepspeed")
    assert found.a.b.x == pytest.approx(3.14159265)
    assert dir(found) == ["a"]
    with pytest.raises(
        AttributeError, match="module 'deepspeed.a' has no attribute 'c': megazero knows no such"
    ):
        _ = found.a.c


def test_a_module_is_pickled_by_its_name():
    assert Surface([]).as_module("json").__reduce__() == (importlib.import_module, ("json",))


def test_the_version_that_installers_see_is_that_of_the_names():
    assert (PATH / f"deepspeed-{VERSION}.dist-info/METADATA").read_text().splitlines()[1:3] == [
        "Name: deepspeed",
        f"Version: {VERSION}",
    ]


@pytest.mark.slow
def test_a_child_finds_deepspeed_wherever_it_starts(tmp_path):
    """`install` changes the environment, from which alone a child knows where megazero is."""
    start = "import subprocess, sys; from megazero.deepspeed import install; install(); install();"
    code = f"{start} subprocess.run([sys.executable, '-c', {ASK!r}], cwd={str(tmp_path)!r})"
    assert run("-c", code).stdout.splitlines() == ANSWER


def test_a_deepspeed_that_is_installed_stays_unseen(tmp_path):
    other = tmp_path / "deepspeed"
    other.mkdir()
    (other / "__init__.py").write_text("raise SystemExit('the other one')")
    info = tmp_path / "deepspeed-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.1\n")
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    assert python("import deepspeed", path).stderr.strip() == "the other one"
    code = f"from megazero.deepspeed import install; install(){ASK}"
    found = run("-c", code, environment={"PYTHONPATH": path})
    assert found.stdout.splitlines() == ANSWER


def test_a_deepspeed_that_is_imported_already_is_named(monkeypatch):
    other = type(sys)("deepspeed")
    other.__file__ = "/somewhere/deepspeed/__init__.py"
    monkeypatch.setitem(sys.modules, "deepspeed", other)
    with pytest.raises(
        ConfigError, match="imported before megazero.*but /somewhere/deepspeed/__init__.py is"
    ):
        surface.install()


def test_megazero_has_the_top_names_itself():
    assert megazero.initialize is surface.TOP.initialize
    assert {"initialize", "init_distributed", "zero", "moe"} <= set(dir(megazero))
    assert megazero.runtime.engine.DeepSpeedEngine.__module__ == "megazero.deepspeed.engine.engine"
    assert "deepspeed" not in sys.modules or isinstance(sys.modules["deepspeed"], surface.SurfaceModule)


def test_importing_megazero_takes_less_than_a_tenth_of_a_second():
    code = "import time; start = time.process_time(); import megazero; print(time.process_time() - start)"
    assert float(python(code).stdout) < 0.1
