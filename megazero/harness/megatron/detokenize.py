"""From the spaced words of a corpus to running text, by the rules of Megatron's zero-shot tasks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from megazero.errors import DataError

# Megatron also rewrites a quote before a digit, by a pattern with the slashes of sed in it, which no text
# matches; published scores are without it, so it is left out.
_WIKI: tuple[tuple[str, str] | str, ...] = (
    ("s '", "s'"),
    *((f" @{mark}@ ", mark) for mark in "-,."),
    *((f" {mark} ", f"{mark} ") for mark in ":;.!?,"),
    *("()", "[]", "{}", '""', "''"),
    *(("= " * n + "=", "=" * (n + 1)) for n in (3, 2, 1)),
    *((" ° ", "°"), (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")),
)
_PTB = (" '", "'"), (" \n", "\n"), ("\n ", "\n"), (" n't", "n't"), (" N ", "1 "), ("$ 1", "$1"), ("# 1", "#1")
RULES: Mapping[str, tuple[tuple[str, str] | str, ...]] = MappingProxyType(
    {"ptb": _PTB, "wiki": _WIKI, "lambada": ()}
)
"""Part of a path -> its rules in their order: text and what replaces it, or a pair of brackets or quotes,
which lose the blanks inside them."""


def detokenize(text: str, path: str) -> str:
    """Return the running text of a file's content, by the rules of the first name in its path.

    Raises DataError if the path names no corpus whose rules are known.
    """
    name = next((name for name in RULES if name in path), None)
    if name is None:
        raise DataError(
            f"`--valid-data` must have {', '.join(RULES)} in its path, to say how words are joined, but "
            f"is {path}; rename the file"
        )
    for rule in RULES[name]:
        if isinstance(rule, tuple):
            text = text.replace(*rule)
            continue
        opening, closing = rule[0], rule[1]
        inside = rf"\{opening}\s*([^\{closing}]*?)\s*\{closing}"
        text = re.sub(inside, rf"{opening}\1{closing}", text)
    return text
