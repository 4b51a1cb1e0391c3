"""The datasets of the product's trainings."""

from __future__ import annotations

import pytest

from tests.oracle import product
from tests.oracle.text import DATASETS


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The folder of the datasets."""
    folder = tmp_path_factory.mktemp("data")
    product.write_datasets(folder, DATASETS)
    return folder
