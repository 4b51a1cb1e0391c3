"""Bounds of stages, by tables measured on DeepSpeed 0.19.8; the checks hold many more against it."""

from __future__ import annotations

import re

import pytest

from megazero.deepspeed.utils.split import partition_balanced, partition_uniform, split_layers
from megazero.errors import ConfigError
from tests.tables import over_table


@over_table(
    ("weights", "parts", "bounds"),
    [
        ([1] * 10, 4, [0, 3, 6, 8, 10]),
        ([5, 1, 1, 1, 1, 5], 2, [0, 3, 6]),
        ([0, 1, 1, 1, 0, 1, 0], 2, [0, 3, 7]),
        ([10, *[1] * 6, 10], 4, [0, 1, 4, 7, 8]),
        ([3, *[1] * 7, 3], 3, [0, 3, 7, 9]),
        ([100, *[12] * 8, 100], 4, [0, 1, 5, 9, 10]),
        ([7, 7], 4, [0, 1, 2, 2, 2]),
    ],
)
def test_balanced_bounds(weights, parts, bounds):
    assert partition_balanced(weights, parts) == bounds


def test_uniform_bounds():
    assert partition_uniform(10, 4) == [0, 3, 6, 8, 10]
    assert partition_uniform(2, 3) == [0, 1, 2, 2]


def test_a_regex_is_read_as_it_is_written():
    types = ["Linear", "Linear9", "Linear", None, "linear"]

    def split(method):
        return split_layers(method, 2, types, lambda: [1, 1, 1, 1, 1])

    def matches(regex):
        return [int(name is not None and bool(re.search(regex, name, re.IGNORECASE))) for name in types]

    for regex in (r"^\D+$", r"\d", "(?:linear)$", "LINEAR9"):
        assert split(f"Type:{regex}") == partition_balanced(matches(regex), 2)
    assert split("Uniform") == [0, 3, 5]


@over_table(
    ("method", "message"),
    [
        ("profile", "must be uniform, parameters or type:REGEX, but is 'profile'"),
        ("type:(", "must have a regular expression after `type:`"),
        ("type:conv", "matches none of: Linear, Tanh"),
    ],
)
def test_what_no_layer_can_be_split_by_is_refused(method, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        split_layers(method, 2, ["Linear", "Tanh", None], lambda: [1, 1, 1])
