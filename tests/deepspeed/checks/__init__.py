"""What DeepSpeed's documentation says, as small scripts: run here, and by DeepSpeed itself for its answers.

A module of this folder is an area. Each of its functions marked `check` is given `deepspeed` and an empty
folder, and returns plain values: what a script can observe. ``answers/AREA.json`` holds what DeepSpeed 0.19.8
returned (`proofs/deepspeed_answers.py` records it); a check that says `here` and `why` differs on purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Check:
    """One script's worth.

    Attributes:
        run: given `deepspeed` and a folder that all ranks share, returns numbers, texts, lists and
            dictionaries with text keys.
        ranks: how many ranks run it; the first one's value counts.
        tolerance: numbers may differ by this much, absolutely and relatively.
        here: the value here, if it differs from DeepSpeed's on purpose.
        why: why it differs.
    """

    run: Callable[[Any, Path], Any]
    ranks: int
    tolerance: float
    here: Any
    why: str


def check(
    ranks: int = 1, tolerance: float = 1e-6, here: Any = None, why: str = ""
) -> Callable[[Callable[[Any, Path], Any]], Check]:
    """Mark a function as a check; see `Check`."""
    return lambda run: Check(run, ranks, tolerance, here, why)


def checks_of(module: Any) -> dict[str, Check]:
    """The checks of an area by name, in the order in which they stand there."""
    return {name: value for name, value in vars(module).items() if isinstance(value, Check)}


def outcome(attempt: Callable[[], Any]) -> str:
    """ "accepted", or "refused" if an exception says no, whatever its type."""
    try:
        attempt()
    except (Exception, SystemExit):
        return "refused"
    return "accepted"
