"""`KeptPlans`: a file of the layouts that searches have planned, from which each goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megazero.errors import ConfigError
from megazero.plan.layout import Layout
from megazero.plan.tuning import Planned, Search
from megazero.version import VERSION

_BEGINS = '{"job": "'


class KeptPlans:
    """Plans of one search among those of a file, a line each; those of other searches stay there.

    A plan belongs to a search of the same job on as many ranks of the same device, by this version. A last
    line that was cut off is dropped.

    Args:
        path: the file, whose folder is made if need be.
        search: the search.
        anew: whether what is in the file is forgotten.

    Raises:
        ConfigError: the file cannot be read or written, or a line is no plan.
    """

    def __init__(self, path: Path, search: Search, *, anew: bool = False):
        self.path, self.job = path, _job(search)
        self.others = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w+" if anew else "a+", encoding="utf-8") as file:
                file.seek(0)
                *lines, cut = file.read().split("\n")
                self.known = self._read(lines)
                if cut:
                    if not cut.startswith(_BEGINS) and not _BEGINS.startswith(cut):
                        raise self._foreign(len(lines) + 1)
                    file.truncate(sum(len(f"{line}\n".encode()) for line in lines))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"`{path}` must be a file of plans that can be read and written, but: {error}"
            ) from error

    def add(self, plan: Planned) -> None:
        """Keep a plan."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"job": self.job, **plan.document()}) + "\n")
        self.known[plan.layout] = plan

    def _read(self, lines: Sequence[str]) -> dict[Layout, Planned]:
        """The search's own plans among the lines; others are counted."""
        known = {}
        for number, line in enumerate(lines, 1):
            try:
                document: dict[str, Any] = json.loads(line)
                if document.pop("job") == self.job:
                    plan = Planned.read(document)
                    known[plan.layout] = plan
                else:
                    self.others += 1
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise self._foreign(number) from error
        return known

    def _foreign(self, number: int) -> ConfigError:
        return ConfigError(
            f"`{self.path}` must have a plan of `megazero tune` in each line, but line {number} is none; "
            "move the file away, or name another folder"
        )


def _job(search: Search) -> str:
    """A word that stands for all that a plan depends on."""
    facts = (search.given.model_dump_json(), search.ranks, search.per_node, search.device, VERSION)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
