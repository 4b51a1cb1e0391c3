from __future__ import annotations

import numpy as np
import pytest

from megazero.data.indexed.reader import open_indexed
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.data_tools.merge_datasets import main
from tests.data_tools.conftest import visible


def _write(prefix, documents, dtype=np.uint16):
    with IndexedDatasetWriter(str(prefix), dtype) as writer:
        for document in documents:
            writer.add_document([np.array(sequence) for sequence in document])


@pytest.fixture
def parts(tmp_path):
    folder = tmp_path / "parts"
    folder.mkdir()
    _write(folder / "b", [[[4]], [], [[5, 6], [7]]])
    _write(folder / "a", [[[1, 2], [3]]])
    return folder


def _documents(prefix):
    dataset = open_indexed(str(prefix), verify=True)
    return [[s.tolist() for s in dataset.document(k)] for k in range(dataset.document_index.size - 1)]


def test_directory_is_merged_in_name_order_and_again_into_the_same_place(parts, capsys):
    for _ in range(2):
        assert main(["--input", str(parts), "--output-prefix", str(parts / "all")]) == 0
        assert _documents(parts / "all") == [[[1, 2], [3]], [[4]], [], [[5, 6], [7]]]
    assert "all: 4 documents, 7 tokens" in capsys.readouterr().out


def test_prefixes_are_merged_in_the_order_given(parts, out):
    assert main(["--input", str(parts / "b"), str(parts / "a"), "--output-prefix", str(out / "m")]) == 0
    assert _documents(out / "m") == [[[4]], [], [[5, 6], [7]], [[1, 2], [3]]]


def test_other_element_type_is_refused_and_leaves_nothing(parts, out, capsys):
    _write(parts / "c", [[[70000]]], np.int32)
    assert main(["--input", str(parts), "--output-prefix", str(out / "m")]) == 1
    assert "must be uint16" in capsys.readouterr().err
    assert visible(out) == []


def test_unfit_inputs_are_refused(parts, out, capsys):
    a = str(parts / "a")
    for inputs, output, words in (
        ([str(out)], out / "m", "holds no .idx file"),
        ([a, a], out / "m", "twice"),
        ([a], a, "must be a new dataset"),
        ([str(parts / "none")], out / "m", "none.idx"),
    ):
        assert main(["--input", *inputs, "--output-prefix", str(output)]) == 1
        assert words in capsys.readouterr().err
    assert visible(out) == []
    assert _documents(a) == [[[1, 2], [3]]]
