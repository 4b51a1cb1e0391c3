"""What a search on the site shows, and in which order: guides, then pages, then the reference.

The theme builds an index of all headings. Four things are changed in it. Each entry gets a weight by where it
is. A page is called what the navigation calls it. Of the reference, each entry keeps its name and the first
paragraph that describes it, so that thousands of signatures do not drown the pages. And each flag of
configuration.md becomes an entry of its own, with its row as the place. `docs/search.js` words the query.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TypedDict


class Entry(TypedDict, total=False):
    """A heading of a page as the search knows it: its place, title, text as HTML, tags and weight."""

    location: str
    title: str
    text: str
    tags: list[str]
    boost: float


WEIGHTS: tuple[tuple[str, float], ...] = (
    ("guides/", 1.0),
    ("guides/coming_from_deepspeed/*", 3.0),
    ("guides/*", 6.0),
    ("watch/*", 6.0),
    ("features/*", 0.5),
    ("configuration/*", 0.5),
    ("compatibility/*", 0.3),
    ("foreign_flags/*", 0.2),
    ("launch_lines/*", 0.2),
    ("dialects/*", 0.3),
    ("deepspeed_json/*", 0.3),
    ("initialize/*", 0.2),
    ("deepspeed/*", 0.5),
    ("decisions/*", 0.1),
    ("ablations/*", 0.5),
    ("performance/*", 0.5),
    ("plan_published/*", 0.5),
    ("repository/*", 0.5),
    ("reference/*", 0.05),
)
"""How much a find counts, by the first pattern that its place has; 1 for all others."""

OVERVIEW = "Overview"
"""What the navigation calls the first page of a folder, whose heading says more."""
TABLE = re.compile(r"<table>(.*?)</table>", re.DOTALL)
ROW = re.compile(r"<tr>\s*<td>(?P<flags>.*?)</td>(?P<rest>.*?)</tr>", re.DOTALL)
FLAG = re.compile(r"<code>(--[\w-]+)</code>")
PLACED = re.compile(r'<code id="(--[\w-]+)">')


def weight(location: str) -> float:
    """How much a find at `location` counts; a flag more, the fewer parts its name has."""
    _, is_flag, flag = location.partition("#--")
    if is_flag:
        return 2.0 / math.pow(len(re.findall(r"[^-]+", flag)), 0.25)
    return next((factor for pattern, factor in WEIGHTS if fnmatchcase(location, pattern)), 1.0)


def with_flag_anchors(html: str) -> str:
    """The page with an anchor at each flag that begins a row; such tables are left to `flag_entries`."""
    placed: set[str] = set()

    def flag(match: re.Match[str]) -> str:
        name = match[1]
        if name in placed:
            return match[0]
        placed.add(name)
        return f'<code id="{name}">{name}</code>'

    def row(match: re.Match[str]) -> str:
        return match[0].replace(match["flags"], FLAG.sub(flag, match["flags"]), 1)

    def table(match: re.Match[str]) -> str:
        rows = ROW.sub(row, match[0])
        marked = '<table data-kind="flags" data-search-exclude="true">'
        return rows.replace("<table>", marked, 1) if rows != match[0] else rows

    return TABLE.sub(table, html)


def flag_entries(page: str, html: str) -> Iterator[Entry]:
    """An entry for each flag that `with_flag_anchors` has placed on a page, with its row as the text."""
    for row in ROW.finditer(html):
        for name in PLACED.findall(row["flags"]):
            cells = re.sub(r"</?t[dr][^>]*>", " ", f"{row['flags']} {row['rest']}")
            text = " ".join(PLACED.sub("<code>", cells).split())
            tags = [part[0] for part in re.findall(r"[^-]+", name)]  # see docs/search.js
            yield {"location": f"{page}#{name}", "title": name, "text": f"<p>{text}</p>", "tags": tags}


def brief(entry: Entry) -> Entry:
    """The entry of the reference without its signature and all but the first paragraph."""
    prose = re.sub(r"<pre>.*?</pre>", "", entry["text"], flags=re.DOTALL)
    first = re.search(r"<p>.*?</p>", prose, re.DOTALL)
    return {**entry, "text": first[0] if first else ""}


def titled(entry: Entry, called: str) -> Entry:
    """The entry of a page under what the navigation calls it, which may be more telling than its heading."""
    heading = re.sub(r"<[^>]*>", "", entry["title"]).partition(":")[0]
    if called == OVERVIEW:
        return entry
    if heading.lower() in called.lower():
        return {**entry, "title": called}
    return {**entry, "title": f"{called} ({heading})"}


def searchable(entries: Iterable[Entry], titles: Mapping[str, str]) -> list[Entry]:
    """The entries of the index with their weights and titles, those of the reference shortened.

    Args:
        entries: as the theme writes them.
        titles: of pages, by place, as the navigation has them.
    """
    shown: list[Entry] = []
    for entry in entries:
        place = entry["location"]
        entry = brief(entry) if place.startswith("reference/") else entry
        entry = titled(entry, titles[place]) if place in titles else entry
        shown.append({**entry, "boost": weight(place)})
    return shown
