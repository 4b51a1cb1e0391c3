"""What scripts/setup.sh is told about the Python at hand."""

from __future__ import annotations

import re
import runpy

import pytest

from scripts import setup_facts
from tests.source_tree import ROOT


@pytest.fixture
def installed(monkeypatch):
    """Makes these packages the installed ones."""

    def pretend(**versions):
        monkeypatch.setattr(setup_facts, "version", lambda package: versions.get(package))

    return pretend


@pytest.mark.parametrize(
    ("found", "usable"),
    [
        (None, ""),
        ("2.8.0", ""),
        ("2.9.1", ""),
        ("2.10.0", "2.10.0"),
        ("2.11.0+cu130", "2.11.0+cu130"),
        ("2.13.0a0+git1", "2.13.0a0+git1"),
    ],
)
def test_a_torch_from_2_10_on_is_kept(installed, found, usable):
    installed(torch=found)
    assert setup_facts.torch() == usable


def test_beside_our_torch_everything_is_pinned(installed):
    installed(torch="2.13.0+cpu", numpy="1.0")
    pins = setup_facts.constraints().splitlines()
    assert "torch==2.13.0" in pins
    assert 'numpy==2.2.6; python_version < "3.11"' in pins


def test_beside_another_torch_what_is_installed_is_left_alone(installed):
    installed(torch="2.11.0+cu130", numpy="2.5.2")
    pins = setup_facts.constraints().splitlines()
    assert pins[0] == "torch==2.11.0+cu130"
    assert not [pin for pin in pins[1:] if pin.startswith(("torch", "numpy"))]
    assert [pin for pin in pins if pin.startswith("pydantic==")]


def test_before_torch_is_there_everything_is_pinned(installed):
    """Build tools are installed first."""
    installed(setuptools="70.0")
    pins = setup_facts.constraints().splitlines()
    assert "torch==2.13.0" in pins
    assert [pin for pin in pins if pin.startswith("setuptools==")]


def test_the_key_depends_on_torch(installed):
    installed(torch="2.13.0")
    first = setup_facts.key()
    assert first == setup_facts.key()
    installed(torch="2.11.0")
    assert setup_facts.key() != first


def test_the_compiled_modules_are_those_of_setup_py():
    """A module that nothing builds would be missing for ever, and CI would say that csrc does not compile."""
    text = (ROOT / "setup.py").read_text(encoding="utf-8")
    built = re.findall(r'Pybind11Extension\(\s*"([\w.]+)"', text)
    expected = [path.relative_to(ROOT).with_name("_native").as_posix() for path in setup_facts.modules()]
    assert [name.replace(".", "/") for name in built] == expected


def headers_of(path):
    """The headers of csrc that a file includes, and those that they include."""
    included = re.findall(r'^#include "(.+)"', (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
    direct = {f"csrc/{name}" for name in included}
    return direct.union(*map(headers_of, direct))


def test_a_module_is_built_again_when_a_header_has_changed(monkeypatch):
    """`build_ext --inplace` left a module as it was if none of its .cpp files had changed."""
    pytest.importorskip("pybind11")
    modules = []
    monkeypatch.setattr("setuptools.setup", lambda **facts: modules.extend(facts["ext_modules"]))
    monkeypatch.setattr("pybind11.setup_helpers.ParallelCompile.install", lambda self: None)
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    headers = {module.name: set[str]().union(*map(headers_of, module.sources)) for module in modules}
    assert "csrc/common/product.hpp" in headers["megazero.ops._native"]
    assert "csrc/data/gather.hpp" in headers["megazero.data._native"]
    assert [headers[module.name] - set(module.depends) for module in modules] == [set(), set()]


def test_every_requirement_is_pinned_for_every_python():
    text = (ROOT / "setup.py").read_text(encoding="utf-8")
    wanted = {
        line.split('"')[i].split(">=")[0]
        for line in text.splitlines()
        for i in range(1, line.count('"'), 2)
        if ">=" in line.split('"')[i] and not line.split('"')[i].startswith(">=")
    }
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    for name in wanted:
        markers = sorted(line.partition(";")[2].strip() for line in pins if line.startswith(f"{name}=="))
        assert markers in ([""], ['python_version < "3.11"', 'python_version >= "3.11"']), name
    assert {"torch", "numpy", "pytest"} <= wanted
