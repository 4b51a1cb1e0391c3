"""`PagePool`: which pages of keys and values belong to whom, and which may be shared; no tensors.

A full page is named by its tokens and by the page before it, at last by a salt, so that equal prefixes have
equal names (vLLM's prefix caching; Kwon et al. 2023). A page that nobody holds keeps its name until it is
taken for something else, the longest unused first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Name = tuple[int | str, tuple[int, ...]]
"""The serial number of the page before, or a salt, and the page's tokens. Names are compared, not digests."""


@dataclass(eq=False)
class PageTable:
    """The pages of one sequence.

    Attributes:
        before: the serial number of the last page with a name; the salt before the first.
        pages: their numbers, in order.
        named: how many of them, from the first, have names.
    """

    before: int | str
    pages: list[int] = field(default_factory=list)
    named: int = 0


class PagePool:
    """The pages of one model.

    Args:
        pages: how many there are.
        page: positions of each.
    """

    def __init__(self, pages: int, page: int):
        self.pages, self.page = pages, page
        self._holders = [0] * pages
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(pages))
        self._by_name: dict[Name, int] = {}
        self._names: dict[int, Name] = {}
        self._serials: dict[int, int] = {}
        self._next_serial = 0

    @property
    def free(self) -> int:
        """The number of pages that nobody holds."""
        return len(self._free)

    def name_after(self, table: PageTable, tokens: Sequence[int]) -> Name | None:
        """The name of the page after the named ones, if `tokens` of the sequence fill it."""
        start = table.named * self.page
        ids = tuple(tokens[start : start + self.page])
        return (table.before, ids) if len(ids) == self.page else None

    def adopt(self, table: PageTable, tokens: Sequence[int]) -> int:
        """Give an empty table the named pages that begin `tokens`; return the number of their positions.

        The last token is left out, since somebody has to compute what follows it.
        """
        while (table.named + 1) * self.page < len(tokens):
            name = self.name_after(table, tokens)
            number = None if name is None else self._by_name.get(name)
            if number is None:
                break
            self._hold(number)
            table.pages.append(number)
            table.before, table.named = self._serials[number], table.named + 1
        return table.named * self.page

    def extend(self, table: PageTable, positions: int) -> list[int] | None:
        """Add the pages that a table of `positions` lacks and return them; None if there are too few."""
        lacking = -(-positions // self.page) - len(table.pages)
        if lacking > len(self._free):
            return None
        added = [self._oldest() for _ in range(lacking)]
        table.pages += added
        return added

    def publish(self, table: PageTable, tokens: Sequence[int], computed: int) -> None:
        """Name the pages that the first `computed` of `tokens` fill, whose keys and values are written."""
        while (table.named + 1) * self.page <= computed:
            name = self.name_after(table, tokens)
            assert name is not None, "computed tokens are known"
            number = table.pages[table.named]
            if name in self._by_name:  # somebody else computed the same; this copy stays without a name
                number = self._by_name[name]
            else:
                self._by_name[name], self._names[number] = number, name
                self._serials[number] = self._next_serial
                self._next_serial += 1
            table.before, table.named = self._serials[number], table.named + 1

    def release(self, table: PageTable) -> None:
        """Give up a table's pages, the last first, so that beginnings, which more requests share, stay."""
        for number in reversed(table.pages):
            self._holders[number] -= 1
            if self._holders[number] == 0:
                self._free[number] = None
        table.pages.clear()

    def check(self, tables: Iterable[PageTable]) -> None:
        """Raise AssertionError unless holders, free pages and names agree with all the tables there are."""
        tables = list(tables)
        held = Counter(number for table in tables for number in table.pages)
        assert self._holders == [held[number] for number in range(self.pages)], "holders are not the tables"
        assert set(self._free) == set(range(self.pages)) - set(held), "a free page is held, or one is lost"
        assert {name: number for number, name in self._names.items()} == self._by_name, "names disagree"
        assert self._serials.keys() == self._names.keys(), "a named page has no serial number"
        for table in tables:
            unnamed = [number for number in table.pages if number not in self._names]
            assert all(held[number] == 1 for number in unnamed), "a page without a name is in two tables"
            assert len(set(table.pages)) == len(table.pages), "a page is twice in a table"

    def _hold(self, number: int) -> None:
        if self._holders[number] == 0:
            del self._free[number]
        self._holders[number] += 1

    def _oldest(self) -> int:
        """Take the page that has been free for longest; what it held is forgotten."""
        number, _ = self._free.popitem(last=False)
        if number in self._names:
            del self._by_name[self._names.pop(number)], self._serials[number]
        self._holders[number] = 1
        return number
