"""A run's folder of a real training, trained once and copied for each test."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megazero.config.resolve import parse_config
from megazero.mpu.launch import Launch
from megazero.train.pretraining import pretrain
from tests.commands.checkpoint.samples import SMALL


@pytest.fixture(scope="package")
def trained(tmp_path_factory) -> Path:
    """Checkpoints 2 and 4 of one training; not to be changed."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    pretrain(parse_config([*SMALL.split(), "--save", str(folder)], world_size=1).config, Launch())
    return folder


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy of them."""
    return Path(shutil.copytree(trained, tmp_path / "run"))
