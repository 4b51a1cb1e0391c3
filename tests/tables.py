"""One test over a table, where `pytest.mark.parametrize` would make hundreds.

    @over_table(("written", "expected"), [("1e3", 1000), ("2k", 2048)])
    def test_numbers_as_they_are_written(written, expected): ...

It takes the same arguments and stacks in the same way. Every row is checked, whatever came of the others; the
test then fails once and says of each row what it is called and what was wrong. A test costs milliseconds
beside its own work, and a place in every worker's list; a row costs neither. Rows that take long stay tests:
workers share these.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

Ids = Iterable[Any] | Callable[[Any], Any] | None

WHOLE = 20
"""Of so many rows that fail all that their error says is shown, and of further ones its first line."""


class Table(NamedTuple):
    """What a test has arguments from: their names, the rows, and what rows are called."""

    names: tuple[str, ...]
    rows: Iterable[Any] | Callable[[], Iterable[Any]]
    ids: tuple[Any, ...] | Callable[[Any], Any] | None


class Row(NamedTuple):
    """One row of each table of a test."""

    name: str
    arguments: dict[str, Any]


def over_table(
    names: str | Sequence[str], rows: Iterable[Any] | Callable[[], Iterable[Any]], ids: Ids = None
) -> Callable[..., Any]:
    """Run a test once, over all these rows, or over those that this function gives when the test runs.

    Each row has a `monkeypatch` and a `tmp_path` of its own, and `capsys`, `capfd` and `caplog` are empty.
    Other fixtures are shared by the rows. Rows with marks of their own need `pytest.mark.parametrize`.
    """
    split = tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else tuple(names)
    table = Table(
        split,
        tuple(rows) if isinstance(rows, Iterable) else rows,
        ids if ids is None or callable(ids) else tuple(ids),
    )

    def decorate(decorated: Callable[..., None]) -> Callable[..., None]:
        test, tables = getattr(decorated, "over_table", (decorated, ()))
        assert not hasattr(test, "hypothesis"), "hypothesis calls a test once for each example"
        parameters = inspect.signature(test).parameters
        assert set(split) <= set(parameters), f"{test.__name__} has no {set(split) - set(parameters)}"
        taken = {name for one in (table, *tables) for name in one.names} | {"monkeypatch"}

        @functools.wraps(decorated)
        def run(**fixtures: Any) -> None:
            __tracebackhide__ = True
            folders = itertools.count()

            def once(**arguments: Any) -> None:
                __tracebackhide__ = True
                with ExitStack() as stack:
                    test(**_own(fixtures, parameters, folders, stack), **arguments)

            check_all([(row.name, row.arguments) for row in _beside(table, *tables)], lambda row: once(**row))

        kept = [value for name, value in parameters.items() if name not in taken]
        run.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
        run.over_table = (test, (table, *tables))  # type: ignore[attr-defined]
        return run

    return decorate


def check_all(rows: Iterable[tuple[str, Any]], check: Callable[[Any], None]) -> None:
    """Check every one of these named rows; raises one `AssertionError` that says of each what was wrong."""
    __tracebackhide__ = True
    count = 0
    failed: list[tuple[str, BaseException]] = []
    skipped: list[BaseException] = []
    for name, row in rows:
        count += 1
        try:
            check(row)
        except pytest.skip.Exception as error:
            skipped.append(error)
        except (Exception, pytest.fail.Exception) as error:
            failed.append((name, error))
    assert count, "a table without rows checks nothing"
    if failed:
        lines = [_report(name, error, place < WHOLE) for place, (name, error) in enumerate(failed)]
        head = f"{len(failed)} of {count} rows fail (all of the first is above):\n"
        raise AssertionError(head + "\n".join(lines)) from failed[0][1]
    if len(skipped) == count:
        raise skipped[0]


def _own(
    fixtures: dict[str, Any], parameters: Iterable[str], folders: Iterator[int], stack: ExitStack
) -> dict[str, Any]:
    """The fixtures of one row."""
    own = dict(fixtures)
    if "monkeypatch" in parameters:
        own["monkeypatch"] = stack.enter_context(pytest.MonkeyPatch.context())
    if "tmp_path" in fixtures:
        own["tmp_path"] = fixtures["tmp_path"] / f"row{next(folders)}"
        own["tmp_path"].mkdir()
    for name in ("capsys", "capfd"):
        if name in fixtures:
            fixtures[name].readouterr()
    if "caplog" in fixtures:
        fixtures["caplog"].clear()
    return own


def _beside(*tables: Table) -> Iterator[Row]:
    """Each row of one table beside each row of the others."""
    for rows in itertools.product(*(list(_rows(table)) for table in tables)):
        arguments = {name: value for row in rows for name, value in row.arguments.items()}
        yield Row("-".join(row.name for row in rows), arguments)


def _rows(table: Table) -> Iterator[Row]:
    for index, row in enumerate(table.rows() if callable(table.rows) else table.rows):
        values, name = (row,) if len(table.names) == 1 else row, None
        if isinstance(row, type(pytest.param())):
            assert not row.marks, "rows of one test cannot have marks of their own"
            values, name = row.values, row.id
        if name is None and table.ids is not None and not callable(table.ids):
            name = str(table.ids[index])
        if name is None:
            name = "-".join(_name(value, table.ids if callable(table.ids) else None) for value in values)
        yield Row(name, dict(zip(table.names, values, strict=True)))


def _name(value: Any, ids: Callable[[Any], Any] | None) -> str:
    """The name that this value is given or has, or else how it is written."""
    name = ids(value) if ids is not None else None
    name = getattr(value, "__name__", value) if name is None else name
    written = name if isinstance(name, str) and name.isprintable() else repr(name)
    return written if len(written) <= 80 else f"{written[:77]}..."


def _report(name: str, error: BaseException, whole: bool) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    tests = [
        frame for frame in frames if frame.filename != __file__ and "tests" in Path(frame.filename).parts
    ]
    places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in (*tests[-1:], frames[-1])]
    kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
    lines = f"{kind}{error}".splitlines() or ["assert"]
    shown = "\n      ".join(lines if whole else lines[:1])
    return f"  [{name}] {' '.join(dict.fromkeys(places))}: {shown}"
