"""Datasets whose ids are the places of the tokens, so that a sample says which tokens of the file it read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megazero.data.indexed.writer import IndexedDatasetWriter

Write = Callable[[str, list[int]], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, lengths: list[int]) -> str:
        prefix, place = str(tmp_path / name), 0
        with IndexedDatasetWriter(prefix, np.int32) as writer:
            for length in lengths:
                writer.add_document([np.arange(place, place + length)])
                place += length
        return prefix

    return write
