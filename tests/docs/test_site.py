"""The site builds: strictly, alone, and with a page for what it promises."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT

SITE = ROOT / "build/site"


@pytest.mark.slow
def test_the_site_builds() -> None:
    done = subprocess.run(
        ["bash", "scripts/build_docs.sh"],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for page in ("guides/pretrain", "configuration", "reference/zero", "repository/CONTRIBUTING"):
        assert (SITE / page / "index.html").is_file()
    assert "ParamSpec" in (SITE / "reference/mpu/index.html").read_text(encoding="utf-8")
