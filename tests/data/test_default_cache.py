"""Where a dataset keeps its indexes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megazero.data.build import default_cache
from megazero.data.from_config import gpt_datasets
from tests.config.samples import make_config
from tests.data.corpora import write_lengths


@pytest.mark.parametrize(
    "paths", [("data/a",), ("0.3", "data/a", "0.7", "other/b"), ("3e-1", "data/a", "7e-1", "other/b")]
)
def test_the_index_cache_lies_beside_the_first_dataset(paths):
    # A weight such as 3e-1 was once taken for the dataset, and the cache went to the working folder.
    assert default_cache(paths) == "data/index-cache"


def test_without_files_there_is_no_cache():
    assert default_cache(()) is None


@pytest.mark.parametrize("named", [None, "elsewhere"])
def test_a_run_keeps_its_indexes_there_unless_it_names_a_folder(tmp_path, named):
    data = {"data.data_path": (str(write_lengths(tmp_path / "a", [40] * 20)),), "data.split": "1,0,0"}
    if named is not None:
        data["data.data_cache_path"] = str(tmp_path / named)
    vocabulary = SimpleNamespace(size=60000, eod=None, tokenizer=None)
    gpt_datasets(make_config(data), vocabulary, (4, 0, 0))
    folders = [path.name for path in tmp_path.iterdir() if path.is_dir()]
    assert folders == [named or "index-cache"]
