"""The trained models, each made once."""

from __future__ import annotations

import pytest

from tests.quantize.samples import EXPERTS, LLAMA, train, write_text


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """The folder of runs, and of their text."""
    folder = tmp_path_factory.mktemp("quantize")
    write_text(folder / "text")
    return folder


@pytest.fixture(scope="session")
def llama(runs):
    """A trained model with gated MLPs."""
    return train(runs / "llama", LLAMA)


@pytest.fixture(scope="session")
def gpt2(runs):
    """A trained model with biases, a tied head and learned positions."""
    return train(runs / "gpt2", "")


@pytest.fixture(scope="session")
def experts(runs):
    """A trained mixture of experts with grouped keys."""
    return train(runs / "experts", EXPERTS)
