"""A problem of a machine, and its remedy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Trouble:
    """Something that stops a training or slows it down.

    Attributes:
        name: a short name, for machines.
        message: "`x` must be ..., but is ...".
        remedy: what to do.
        stops: whether a training would end with an error or hang.
    """

    name: str
    message: str
    remedy: str
    stops: bool = False

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy} [{self.name}]"
