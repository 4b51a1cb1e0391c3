"""Where a dataset keeps its indexes."""

from __future__ import annotations

import pytest

from megazero.data.build import default_cache


@pytest.mark.parametrize(
    "paths", [("data/a",), ("0.3", "data/a", "0.7", "other/b"), ("3e-1", "data/a", "7e-1", "other/b")]
)
def test_the_index_cache_lies_beside_the_first_dataset(paths):
    # A weight such as 3e-1 was once taken for the dataset, and the cache went to the working folder.
    assert default_cache(paths) == "data/index-cache"


def test_without_files_there_is_no_cache():
    assert default_cache(()) is None
