"""The command `megazero version`: print the version."""

from __future__ import annotations

from collections.abc import Sequence

from megazero.version import VERSION


def main(argv: Sequence[str]) -> int:
    """Print the version; `argv` is ignored."""
    print(f"megazero {VERSION}")
    return 0
