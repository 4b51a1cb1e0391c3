"""The command `megazero config`: resolve a training's flags; print the tree, or every reason to refuse it."""

from __future__ import annotations

from collections.abc import Sequence

from megazero.config.resolve import resolve_or_exit
from megazero.train.folders import read_folder


def main(argv: Sequence[str]) -> int:
    """Run the command; `resolve_or_exit` ends the process with the exit status."""
    resolve_or_exit([*argv, "--check-config"], program="megazero config", reader=read_folder)
    return 0
