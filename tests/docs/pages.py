"""The Markdown of the repository, taken apart: links, headings, blocks of code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^(`{3,})(\w*)[^\n]*\n(.*?)^\1`*\s*$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^(?:    .*|[ \t]*)\n)+", re.MULTILINE)
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block of code: its language ("" for an indented one), its text, the number of its first line."""

    language: str
    text: str
    line: int


@dataclass(frozen=True)
class Document:
    """A Markdown file. `path` is relative to the root of the repository."""

    path: str
    text: str

    @classmethod
    def read(cls, path: Path) -> Document:
        """The file at `path`."""
        return cls(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))

    def blocks(self) -> Iterator[Block]:
        """Every block of code, fenced ones first."""
        for match in FENCE.finditer(self.text):
            yield Block(match[2], match[3], self._line(match.start(3)))
        for match in INDENTED.finditer(FENCE.sub(_blank, self.text)):
            before = self.text[: match.start()].rstrip().rsplit("\n", 1)[-1]
            if match[0].strip() and not before.lstrip().startswith(("- ", "* ", "1. ")):
                lines = (line[4:] for line in match[0].splitlines())
                yield Block("", "\n".join(lines) + "\n", self._line(match.start()))

    def prose(self) -> str:
        """The text with each block of code and each piece of inline code blanked, line for line."""
        return re.sub(r"`[^`\n]+`", _blank, INDENTED.sub(_blank, FENCE.sub(_blank, self.text)))

    def links(self) -> Iterator[tuple[str, int]]:
        """The target of each link or picture, with its line."""
        for match in LINK.finditer(self.prose()):
            yield match[1], self._line(match.start())

    def anchors(self) -> set[str]:
        """The anchors of headings that GitHub and the site both make; of equal headings the first has it."""
        headings = HEADING.findall(FENCE.sub(_blank, self.text))
        return {anchor_of(heading) for heading in headings} & {
            github_anchor_of(heading) for heading in headings
        }

    def _line(self, position: int) -> int:
        return self.text.count("\n", 0, position) + 1


def says(path: str, words: str) -> bool:
    """Whether a page, by its place in the repository, has these words, wherever its lines end."""
    return words in " ".join((ROOT / path).read_text(encoding="utf-8").split())


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def github_anchor_of(heading: str) -> str:
    """The anchor that GitHub makes of a heading's Markdown."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", text))


def anchor_of(heading: str) -> str:
    """The anchor that the site makes of it: the same, but for several hyphens in a row."""
    return re.sub(r"-+", "-", github_anchor_of(heading))


def documents() -> list[Document]:
    """README.md, CONTRIBUTING.md and the pages of docs/."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    return [Document.read(path) for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *pages]]
