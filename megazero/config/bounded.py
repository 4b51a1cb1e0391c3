"""Bounds on a document of settings, so that a hostile one is refused before it fills the memory.

A YAML document may repeat a part of itself by an alias (`*alias`). Aliases of aliases let a few lines expand
to more than any memory holds.
"""

from __future__ import annotations

import errno
import io
from pathlib import Path

import yaml

from megazero.regular_file import open_regular

MOST_CHARACTERS = 1 << 20
"""The most characters of a file, and of a YAML document after its aliases are expanded."""


def bounded_text(path: str | Path) -> str:
    """Read the text of a file of settings.

    Raises:
        OSError: the file cannot be read, is no regular file, or has more than `MOST_CHARACTERS`.
        UnicodeDecodeError: the file is not UTF-8.
    """
    with io.TextIOWrapper(open_regular(path), encoding="utf-8") as file:
        text = file.read(MOST_CHARACTERS + 1)
    if len(text) > MOST_CHARACTERS:
        raise OSError(errno.EFBIG, f"it has more than {MOST_CHARACTERS} characters", str(path))
    return text


def expansion_fault(root: yaml.Node) -> str | None:
    """Say why a document's aliases cannot be expanded, in the words after "must"; None if they can.

    Each node is counted once, so the time is linear in the document before the expansion.
    """
    sizes: dict[int, int] = {}
    above: set[int] = set()
    waiting = [root]
    while waiting:
        node = waiting[-1]
        parts = _parts(node)
        if id(node) in sizes:
            waiting.pop()
        elif id(node) not in above:
            above.add(id(node))
            if any(id(part) in above and id(part) not in sizes for part in parts):
                return "not contain itself"
            waiting += [part for part in parts if id(part) not in sizes]
        else:
            text = len(node.value) if isinstance(node, yaml.ScalarNode) else 0
            sizes[id(node)] = 1 + text + sum(sizes[id(part)] for part in parts)
            if sizes[id(node)] > MOST_CHARACTERS:
                return f"have at most {MOST_CHARACTERS} characters where its aliases are written out"
    return None


def _parts(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []
