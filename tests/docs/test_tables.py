"""The table of features, the papers and the tour say what the tree has."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.docs.pages import ROOT, documents

ROW = re.compile(r"^\| (.+?) \| (.+?) \| (.*?) ?\| (.+?) \|$", re.MULTILINE)
PAPER = re.compile(r"https://(?:arxiv\.org/abs/\d{4}\.\d{4,5}|[^\s)]*(?:papers|posts)/[^\s)]+)")
CITED = re.compile(r"\[([^\]]*\d{4}\)?)\]\((" + PAPER.pattern + r")\)")
SIGNS = {"yes", "in part", "not run"}
ELSEWHERE = {"all", "`gpu` marker"}


def rows() -> Iterator[tuple[str, str, str, str]]:
    """The rows of the tables of areas in docs/features.md."""
    page = (ROOT / "docs/features.md").read_text(encoding="utf-8")
    areas = page[: page.index("## Models of Hugging Face")]
    for row in ROW.findall(areas):
        if row[0] != "What" and not row[0].startswith("---"):
            yield row


def test_every_feature_has_a_sign_and_tests() -> None:
    features = [*rows()]
    assert len(features) > 70
    assert {sign for _, sign, _, _ in features} == SIGNS
    for feature, _, _, tests in features:
        missing = [path for path in re.findall(r"`([^`]+)`", tests) if not (ROOT / "tests" / path).exists()]
        assert tests in ELSEWHERE or (tests.startswith("`") and not missing), feature


def test_a_feature_in_part_says_what_part() -> None:
    assert [feature for feature, sign, far, _ in rows() if sign == "in part" and not far] == []


def test_every_paper_that_a_page_links_is_listed_with_its_authors() -> None:
    listed = {
        link: authors
        for line in (ROOT / "docs/papers.md").read_text(encoding="utf-8").splitlines()
        for link, authors in re.findall(r"\]\((http[^)]+)\), ([^|]+) \|", line)
    }
    assert len(listed) > 50
    for document in documents():
        prose = document.prose() if "https://" in document.text else ""
        for link in PAPER.findall(prose):
            assert link in listed, f"{document.path} links to {link}"
        for text, link in CITED.findall(prose):
            assert re.sub(r"[()]", "", text) == listed[link], f"{document.path} says {text}"


def test_the_tour_names_tests_that_exist() -> None:
    tests = re.findall(r"`(tests/[^`]+)`", (ROOT / "docs/tour.md").read_text(encoding="utf-8"))
    assert len(tests) > 15
    assert [path for path in tests if not (ROOT / path).exists()] == []


def test_every_room_of_the_core_is_drawn_and_visited() -> None:
    page = (ROOT / "docs/house.md").read_text(encoding="utf-8")
    core = page[page.index("## Core") : page.index("## Annexes")]
    rooms = set(re.findall(r"^\| `(\w+)` \|", core, re.MULTILINE))
    drawing = (ROOT / "docs/images/house.svg").read_text(encoding="utf-8")
    assert rooms == set(re.findall(r'class="name"[^>]*>(\w+)<', drawing)) - {"annexes"}
    tour = (ROOT / "docs/tour.md").read_text(encoding="utf-8")
    assert {room for room in rooms if f"[reference](../megazero/{room})" not in tour} == set()
