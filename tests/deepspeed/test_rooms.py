"""The rooms of DeepSpeed's interface: who imports whom, how few files lie flat, and parts that are shown."""

from __future__ import annotations

import inspect
import pickle
from collections import defaultdict

import pytest

from megazero.deepspeed.utils.parts import made_of
from tests.source_tree import find_cycle, sources

pytestmark = pytest.mark.fast

PACKAGE = "megazero.deepspeed"


def room_of(module: str) -> str | None:
    """The folder below the package that a dotted name lies in; None for what lies flat, or outside."""
    parts = module.removeprefix(f"{PACKAGE}.").split(".")
    return parts[0] if module.startswith(f"{PACKAGE}.") and len(parts) > 1 else None


def rooms() -> dict[str, set[str]]:
    """Room -> the rooms that it imports, in functions and for types too."""
    imported: defaultdict[str, set[str]] = defaultdict(set)
    for source in sources("megazero/deepspeed"):
        own = room_of(f"{source.module}.x" if source.package else source.module)
        for line in source.imports():
            other = room_of(line.target)
            if own is not None and other is not None and own != other:
                imported[own].add(other)
    return dict(imported)


def test_rooms_import_downwards():
    assert len(rooms()) > 10
    assert find_cycle({room: others & set(rooms()) for room, others in rooms().items()}) == []


def test_no_room_needs_what_is_gone_upstream():
    assert [room for room, others in rooms().items() if "legacy" in others] == []


def test_few_files_lie_flat():
    flat = [s.module for s in sources("megazero/deepspeed") if s.module.count(".") == 2 and not s.package]
    assert len(flat) <= 12


class Counter:
    """A part."""

    def __init__(self):
        self.count = 0

    def add(self, by: int = 1) -> int:
        """Count on."""
        self.count += by
        return self.count

    @property
    def twice(self) -> int:
        """Twice the count."""
        return 2 * self.count


@made_of({"_counter": (Counter, "count add twice")})
class Whole:
    """Shows a counter."""

    def __init__(self):
        self._counter = Counter()


class Derived(Whole):
    def add(self, by: int = 1) -> int:
        return 10 * super().add(by)


def test_a_whole_shows_its_parts():
    whole = Whole()
    assert (whole.add(3), whole.count, whole.twice) == (3, 3, 6)
    whole.count = 5
    assert whole._counter.count == 5
    with pytest.raises(AttributeError):
        whole.twice = 1
    assert str(inspect.signature(Whole.add)) == "(self, by: 'int' = 1) -> 'int'"
    assert (Whole.add.__doc__, Whole.twice.__doc__) == ("Count on.", "Twice the count.")
    assert pickle.loads(pickle.dumps(whole)).count == 5


def test_a_derived_class_overrides_what_is_shown():
    assert (Derived().add(2), isinstance(Derived(), Whole)) == (20, True)
