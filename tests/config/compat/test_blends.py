"""Blends in files and parts of datasets."""

from __future__ import annotations

from pathlib import Path

import pytest

from megazero.config.compat.blends import expanded, part_of, prefix_of, weighted
from megazero.errors import DataError
from tests.tables import over_table


@over_table(
    ("text", "expected"),
    [
        ("0.3 a\n0.7 b\n", ("0.3", "a", "0.7", "b")),
        ("a b", ("a", "b")),
        ("0.3 a stack\n0.7 b wiki\n", ("0.3", "a", "0.7", "b")),
        ("a b c\n", ("a", "b", "c")),
        ("a b c\nd e f\n", ("a", "b", "c", "d", "e", "f")),
        ("0.3 a stack\n0.7 b 0.5\n", ("0.3", "a", "stack", "0.7", "b", "0.5")),
        ('{"train": ["1", "a"], "valid": ["b"], "test": []}', ("1", "a")),
        ('"train: 0.2 0:0.95 a, 0.8 0:1 b"', ("0.2", "a[0:0.95]", "0.8", "b")),
        ('"train: 1 0:1 a" "more: 2 0.5:1 b"', ("1", "a", "2", "b[0.5:1]")),
    ],
)
def test_a_file_has_a_blend_in_one_of_the_known_forms(
    text: str, expected: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "blend"
    path.write_text(text, encoding="utf-8")
    assert expanded((f"@{path}",), "train") == expected


def test_what_is_no_file_stays() -> None:
    assert expanded(("1", "a", "2", "b"), "train") == ("1", "a", "2", "b")


def test_a_file_without_a_blend_of_the_split_is_named(tmp_path: Path) -> None:
    """An empty file was said to be a data source that is none."""
    contents = {
        "empty": (b" \n", "must name datasets, but .*empty is empty"),
        "binary": (b"\x80", "must be readable text, but .*binary is not"),
        "cut": (b'{"train": [', "must be valid JSON, but .*cut is not: .*line 1 column 12"),
        "another": (b'{"valid": []}', "another must have a blend for train"),
    }
    for name, (content, _) in contents.items():
        (tmp_path / name).write_bytes(content)
    said = {name: reason for name, (_, reason) in contents.items()}
    for name, reason in (said | {"none": "must be readable text, but .*none is not: No such file"}).items():
        with pytest.raises(DataError, match=reason):
            expanded((f"@{tmp_path}/{name}",), "train")


def test_parts_are_shares_of_the_sequences() -> None:
    """As BigScience's `get_split_by_range_`: both ends are rounded."""
    assert (prefix_of("a[0.1:0.55]"), part_of("a[0.1:0.55]", 10)) == ("a", range(1, 6))
    assert (prefix_of("a"), part_of("a", 10)) == ("a", range(10))
    assert part_of("a[0.95:1.0]", 100) == range(95, 100)


@over_table("name", ["a[0.9:0.5]", "a[0.5:0.5]", "a[900:1000]", "a[0:1.5]", "a[.:1]"])
def test_a_part_within_a_dataset_has_two_shares(name: str) -> None:
    with pytest.raises(DataError, match="must be two shares such as"):
        part_of(name, 1000)


def test_a_group_of_another_form_is_refused() -> None:
    with pytest.raises(DataError, match="must be WEIGHT START:STOP PREFIX, but is `0.5 a`"):
        list(weighted("train: 0.5 a"))
