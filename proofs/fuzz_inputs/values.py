"""Values that readers stumble over, and how a document is held while it is changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Raw:
    """Text that stands in a document as it is, whatever the format says about it."""

    text: str


@dataclass
class Pairs:
    """An object with its keys in order; a key may occur twice."""

    items: list[tuple[Any, Any]]


LONG = "n" * 300
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 7, 0.5, 1.5, -0.5, 1e-9, 1e308, 2**31, 2**32, 2**63, 2**64, 10**30,
    "", "auto", "none", "true", "1", "2", "1e3", "nan", "1_000", "٣", " 2 ", "two", [], [1], [None], [[]],
    ["a", "b"], "a\nb", "a\x1b[31mb", "\u202eabc", "\x00", "\x85\u2028\ufeff", "é\u0301",
    "\ud800", LONG, "../x", "/", ".",
    Pairs([]), Pairs([("enabled", True)]), Pairs([("content", [])]), Pairs([("content", "x")]),
    Raw("1" + "0" * 400), Raw("9" * 5000), Raw("1e400"), Raw("-1e400"), Raw("NaN"), Raw("-Infinity"),
    Raw("1e23"), Raw("1.0"), Raw("2.0000000000000001"), Raw("-0"), Raw("01"), Raw("[" * 900 + "]" * 900),
    Raw("[" * 90_000), Raw('{"a":' * 900 + "1" + "}" * 900), Raw(""), Raw('"'),
)  # fmt: skip
YAML_VALUES: tuple[Raw, ...] = tuple(
    Raw(text)
    for text in (
        "0x10", "0x" + "f" * 5000, "0b11", "017", "0o17", "1:30", "1_000", ".inf", "-.INF", ".nan", "~",
        "yes", "off", "2026-99-99", "2026-11-22", "!!str 2", "!!int '3'", "!!float 3", "!!int",
        "!!float x", "!!bool x", "!!binary aGk=",
        "!!set {a, b}", "!!python/object/apply:os.getcwd []", "!unknown 1", "&a [*a]", "*undefined", "&x 2",
        "{a: [}", "[1, 2", "|\n    two\n    lines", ">-\n    2", "'2'",
        '"\\ud800"', '"\\x1b[2J"', '"\\u0085"', "{<<: {a: 1}}",
        "? [a]\n  : 1", "- 1", "%TAG", "@at", "`tick", "1.e3", "+1", "+.5", "6.", "1e5", "1E+2",
        "\t2", "2 # two",
        "[&a [x, x], &b [*a, *a, *a, *a, *a, *a, *a, *a]" + "".join(
            f", &{y} [{', '.join([f'*{x}'] * 8)}]" for x, y in zip("bcdefghijk", "cdefghijkl", strict=True)
        ) + "]",
    )
)  # fmt: skip
ODD_BYTES = (
    b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\xe2\x80\xa8", b"\x1b]0;x\x07", b"9" * 400,
    b"1e999", b"[" * 900, b"{", b"}", b'"', b"\\", b",", b"\r\n", b"\n", b"\t", b"-", b".", b" ", b"#",
    b"&a ", b"*a", b"! ",
)  # fmt: skip
