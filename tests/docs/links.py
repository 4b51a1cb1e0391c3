"""Whether the relative links of pages lead somewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.docs.pages import ROOT, Document

ELSEWHERE = ("http://", "https://", "mailto:")


def link_violations(document: Document, root: Path = ROOT) -> Iterator[str]:
    """Links to files, or to anchors in them, that do not exist."""
    for target, line in document.links():
        if target.startswith(ELSEWHERE):
            continue
        path, _, anchor = target.partition("#")
        home = root / document.path
        file = (home.parent / path).resolve() if path else home
        if not file.exists():
            yield f"{document.path}:{line} links to `{target}`, which does not exist"
        elif anchor and anchor not in anchors_of(document, file, root):
            yield f"{document.path}:{line} links to `{target}`, where no heading has that anchor"


def anchors_of(document: Document, file: Path, root: Path) -> set[str]:
    """The anchors of a file, which may be the document itself."""
    if file == root / document.path:
        return document.anchors()
    return Document(file.as_posix(), file.read_text(encoding="utf-8")).anchors()
