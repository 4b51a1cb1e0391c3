"""`--deterministic-mode`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from megazero.train.determinism import compute_deterministically


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


def test_torch_and_cublas_are_told() -> None:
    compute_deterministically()
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_a_setting_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    compute_deterministically()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
