"""scripts/setup.sh, with stand-ins for pip and the compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.source_tree import ROOT

# Facts are asked of a real Python. What pip is told, and whether it may use a network, is noted.
STAND_IN = """#!/bin/bash
case $1 in
    scripts/setup_facts.py) exec {python} "$@" ;;
    scripts/pip_progress.py)
        echo "index ${{PIP_NO_INDEX:-yes}}, links ${{PIP_FIND_LINKS:-none}}: ${{*:2}}" >>{folder}/pip
        ;;
esac
"""


@pytest.fixture
def installed(tmp_path):
    """What pip is asked for by a setup with more settings, in a new environment."""

    def setup(**more: str) -> list[str]:
        # A setup compiles csrc from scratch, and removes what is there first: not in this checkout.
        checkout, venv = tmp_path / "checkout", tmp_path / "venv"
        shutil.copytree(ROOT / "scripts", checkout / "scripts")
        for name in ("setup.py", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, checkout)
        (venv / "bin").mkdir(parents=True)
        (venv / "bin/python").write_text(STAND_IN.format(python=sys.executable, folder=tmp_path))
        (venv / "bin/python").chmod(0o755)
        (venv / ".megazero").mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "SETUP_"))}
        run = subprocess.run(
            ["bash", "-c", ". scripts/setup.sh"],
            cwd=checkout,
            env={**kept, "VIRTUAL_ENV": str(venv), **more},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert run.returncode == 0, run.stdout + run.stderr
        return (tmp_path / "pip").read_text().splitlines()

    return setup


def test_a_folder_of_wheels_is_all_that_pip_reads(installed):
    """Without it, pip asked a network that a GPU machine lacked, for minutes."""
    lines = installed(SETUP_WHEELS="/some/wheels", SETUP_EXTRAS="plot")
    assert len(lines) == 2
    assert all(line.startswith("index 1, links /some/wheels: -c ") for line in lines)
    assert lines[0].endswith("setuptools>=68 pybind11>=2.12 ninja>=1.11")
    assert lines[1].endswith("--no-build-isolation --editable .[plot]")


def test_otherwise_pip_reads_its_index(installed):
    assert all(line.startswith("index yes, links none: ") for line in installed(SETUP_EXTRAS="plot"))
