"""Several validation sets: what each holds, what they are called, and those that cannot be read."""

from __future__ import annotations

import numpy as np
import pytest

from megazero.data.changing.validation import ValidationSet, ValidationSets, validation_sets
from megazero.errors import DataError
from tests.data.changing.test_start import build, config_of, folder, same, write  # noqa: F401 (a fixture)


def sets(flags: str) -> ValidationSets:
    config = config_of(f"--multiple-validation-sets {flags}")
    made = validation_sets(config, 8, build, lambda fault: fault)
    assert made is not None
    return made


def test_each_set_is_that_of_a_run_with_it_alone(folder):  # noqa: F811
    made = sets("--train-data-path a --valid-data-path 0.7 a 0.3 b")
    assert [one.name for one in made.datasets] == ["a", "b"]
    for one in made.datasets:
        alone = build(config_of(f"--train-data-path a --valid-data-path {one.name}"), (0, 8, 0))[1]
        assert same(one, alone, range(8))
    shared = sets("--data-path a b --split 6,4,0 --validation-set-names first second")
    assert [one.name for one in shared.datasets] == ["first", "second"]
    alone = build(config_of("--data-path b --split 6,4,0"), (0, 8, 0))[1]
    assert same(shared.datasets[1], alone, range(8))


def test_what_cannot_be_read_is_said_and_left_out(folder):  # noqa: F811
    write(folder / "foreign", 300, vocab=90)
    made = sets("--train-data-path a --valid-data-path gone foreign c")
    assert [one.name for one in made.datasets] == ["c"]
    gone, foreign = made.notes
    assert gone.startswith("warning: there will be no loss of validation set gone: ")
    assert "`token id` must be in 0..49" in foreign
    with pytest.raises(DataError, match="must have a set that can be read"):
        sets("--train-data-path a --valid-data-path gone")
    with pytest.raises(DataError, match="must be 2 different names, one for each dataset, but are x x"):
        sets("--train-data-path a --valid-data-path b c --validation-set-names x x")


def test_a_set_that_another_rank_cannot_read_is_left_out_here_too(folder):  # noqa: F811
    config = config_of("--multiple-validation-sets --train-data-path a --valid-data-path b c")
    others = iter(["rank 1 has no b", None])
    made = validation_sets(config, 8, build, lambda fault: next(others))
    assert made is not None
    assert [one.name for one in made.datasets] == ["c"]


def test_a_sample_that_cannot_be_read_later_is_no_error():
    class Later:
        notes, padding_share, description = (), 0.0, {}

        def batch(self, indices):
            if max(indices) > 5:
                raise DataError("damaged")
            return {"tokens": np.array([[number] * 3 for number in indices])}

    one = ValidationSet("x", Later())
    assert one.batch([2, 3])["tokens"].tolist() == [[2] * 3, [3] * 3]
    assert one.fault is None
    assert one.batch([5, 6])["tokens"].shape == (2, 3)
    assert one.fault == "damaged"
