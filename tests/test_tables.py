"""A test over a table runs every row and names each that fails."""

from __future__ import annotations

import enum
import inspect

import pytest

from tests.tables import over_table


def test_every_row_runs_and_each_that_fails_is_named():
    seen = []

    @over_table("letter", ["a", "b"])
    @over_table(("number", "half"), [(2, 1), pytest.param(3, 1, id="odd"), (4, 2)])
    def check(letter, number, half):
        seen.append((letter, number))
        assert (letter, number) != ("b", 4), "a bad pair"
        int("x") if (letter, number) == ("a", 2) else None
        if number % 2:
            with pytest.raises(KeyError):
                {"a": 1}["a"]

    with pytest.raises(AssertionError) as raised:
        check()
    assert seen == [(letter, number) for letter in "ab" for number in (2, 3, 4)]
    head, *rows = [line for line in str(raised.value).splitlines() if not line.startswith("      ")]
    assert head == "4 of 6 rows fail (all of the first is above):"
    assert [row.split(" ")[2] for row in rows] == ["[a-2-1]", "[a-odd]", "[b-odd]", "[b-4-2]"]
    assert "ValueError: invalid literal" in rows[0]
    assert "Failed: DID NOT RAISE" in rows[1]
    assert rows[3].endswith("a bad pair")
    assert f"test_tables.py:{inspect.getsourcelines(check)[1] + 4}:" in rows[3]
    assert isinstance(raised.value.__cause__, ValueError)


@over_table("name", ["first", "second"])
def test_each_row_has_fixtures_of_its_own(name, monkeypatch, tmp_path, capsys):
    assert __name__ != "changed"
    monkeypatch.setattr(f"{test_each_row_has_fixtures_of_its_own.__module__}.__name__", "changed")
    (tmp_path / "folder").mkdir()
    print(name)
    assert capsys.readouterr().out == f"{name}\n"
    print("left over")


@pytest.mark.fast
@pytest.mark.parametrize("name", ["one"])
@over_table("number", lambda: (value for value in (1, 2)), ids={"one": 1, "two": 2}.keys())
@pytest.mark.slow
def marked(name, number, tmp_path):
    assert name == "one"
    assert number < 3
    assert tmp_path.name in ("row0", "row1")


def test_marks_and_fixtures_are_those_of_one_test(tmp_path):
    assert list(inspect.signature(marked).parameters) == ["name", "tmp_path"]
    assert [mark.name for mark in marked.pytestmark] == ["slow", "parametrize", "fast"]
    for run in ("first", "again"):
        (tmp_path / run).mkdir()
        marked(name="one", tmp_path=tmp_path / run)


class Letter(enum.Enum):
    A = 1
    B = 2


@over_table("letter", Letter)
def test_rows_may_be_members_of_an_enum(letter):
    assert letter in (Letter.A, Letter.B)


def test_skipped_if_every_row_is():
    @over_table("number", [1, 2])
    def check(number, last):
        if number <= last:
            pytest.skip(f"{number} is not here")

    check(last=1)
    with pytest.raises(pytest.skip.Exception, match="1 is not here"):
        check(last=2)


def test_no_rows_and_marks_of_one_row_are_refused():
    with pytest.raises(AssertionError, match="checks nothing"):
        over_table("number", [])(lambda number: None)()
    with pytest.raises(AssertionError, match="marks of their own"):
        over_table("number", [pytest.param(1, marks=pytest.mark.slow)])(lambda number: None)()
    with pytest.raises(AssertionError, match="has no {'size'}"):
        over_table("size", [1])(lambda number: None)
