"""The walk of the configuration: its figures are counted right, and stay under their limits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from proofs.walk import ROOT, Visit, is_configuration, returns, stays, watched
from tests.config.samples import make_config


def test_a_function_stays_once_and_a_module_returns_each_time():
    """A walk to a, twice to b, to another function of a, to b and to c comes back once to a and once to b."""
    first, second, other, last = (
        Visit("a", "f", 1),
        Visit("b", "f", 1),
        Visit("a", "g", 9),
        Visit("c", "f", 1),
    )
    walked = [first, second, second, other, second, last]
    assert stays(walked) == [first, second, other, last]
    assert returns(walked) == {"a": 1, "b": 1}


def pretrain(config, *, again):
    return inner(config=config), section(config.model), again


def inner(config):
    return section(config.model)


def section(model):
    return model.num_layers


def test_only_the_whole_tree_is_followed_and_only_from_pretrain_on():
    config, visits = make_config(), []
    assert is_configuration(config)
    assert not is_configuration(config.model)
    with watched(Path(__file__).parent, visits):
        inner(config)
        pretrain(config, again=None)
        inner(config)
    assert [(visit.module, visit.function) for visit in visits] == [
        ("test_walk.py", "pretrain"),
        ("test_walk.py", "inner"),
        ("test_walk.py", "inner"),
    ]


@pytest.mark.slow
def test_a_resumed_run_keeps_the_limits():
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "proofs/walk.py"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
