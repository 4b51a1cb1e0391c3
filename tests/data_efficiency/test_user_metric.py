from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megazero.data_efficiency.metrics import Samples
from megazero.data_efficiency.user_metric import UserMetric, measured
from megazero.errors import DataError
from tests.tables import over_table

SAMPLES = Samples.of(
    np.array([5, 6]), {"tokens": np.array([[1, 2], [3, 4]]), "labels": np.array([[2, 9], [4, 7]])}
)


def metric(folder: Path, body: str, accumulates: bool = False) -> UserMetric:
    path = folder / "mine.py"
    path.write_text(f"import numpy as np\n\ndef f(samples):\n    {body}\n")
    return UserMetric(f"{path}:f", accumulates)


def test_a_function_of_a_file(tmp_path):
    found = metric(tmp_path, "return samples['text'].max(1) * -1")
    assert found.name == "f"
    assert measured(found, SAMPLES).tolist() == [-9, -7]


def test_a_function_of_a_module(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "a_metric_of_a_user.py").write_text("def g(samples):\n    return samples['index']\n")
    assert measured(UserMetric("a_metric_of_a_user:g"), SAMPLES).tolist() == [5, 6]


def test_a_function_that_was_edited_is_another_metric(tmp_path):
    before, after = (metric(tmp_path, f"return samples['index'] * {k}") for k in (1, 2))
    assert before.identity != after.identity
    assert measured(after, SAMPLES).tolist() == [10, 12]


@over_table("returned", ["np.uint8([1, 2])", "[1, 2]", "np.int32([1, 2])", "np.uint64([1, 2])"])
def test_integers_of_any_type_will_do(tmp_path, returned):
    found = measured(metric(tmp_path, f"return {returned}"), SAMPLES)
    assert (found.tolist(), found.dtype) == ([1, 2], np.int64)


@over_table(
    ("body", "message"),
    [
        ("return np.array([0.5, 1.0])", "must return integers, but returned float64; round them"),
        ("return np.array([True, False])", "returned bool"),
        ("return None", "returned object"),
        ("return np.array(['a', 'b'])", "returned <U1"),
        ("return np.arange(3)", r"shape \[2\], but returned \[3\]"),
        ("return np.ones((2, 1), int)", r"shape \[2\], but returned \[2, 1\]"),
        ("return np.int64(3)", r"shape \[2\], but returned \[\]"),
        ("return np.array([], int)", r"shape \[2\], but returned \[0\]"),
        ("return np.array([1, 2**63], np.uint64)", r"below 2\*\*63, but returned 9223372036854775808"),
        (
            "return samples['no']",
            r"samples 5..6 must return numbers, but raised KeyError: 'no' \(.*mine.py:4\)",
        ),
    ],
)
def test_what_is_no_value_for_each_sample_is_refused(tmp_path, body, message):
    with pytest.raises(DataError, match=f"metric `f` on samples 5..6 .*{message}|{message}"):
        measured(metric(tmp_path, body), SAMPLES)


@over_table("body", ["return np.ones((2, 2), int)", "return 3", "return np.array([], int)"])
def test_what_is_no_vector_is_refused(tmp_path, body):
    with pytest.raises(DataError, match=r"shape \[any length\]"):
        measured(metric(tmp_path, body, accumulates=True), SAMPLES)


@over_table(
    ("spec", "message"),
    [
        ("f", "module:function or path.py:function, but is 'f'"),
        ("a:b-c", "but is 'a:b-c'"),
        (":f", "but is ':f'"),
        ("no_such_module_at_all:f", "cannot: ModuleNotFoundError"),
        ("/no/such.py:f", "cannot: FileNotFoundError"),
        ("math:nothing", "math has no function nothing"),
        ("math:pi", "has no function pi"),
    ],
)
def test_a_function_that_there_is_not_is_refused(spec, message):
    with pytest.raises(DataError, match=message):
        UserMetric(spec)


def test_a_file_that_cannot_be_imported_is_refused(tmp_path):
    (tmp_path / "broken.py").write_text("def f(:\n")
    with pytest.raises(DataError, match=r"broken.py cannot: SyntaxError"):
        UserMetric(f"{tmp_path}/broken.py:f")
