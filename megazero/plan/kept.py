"""`KeptPlans`: a file of the layouts that searches have planned, from which each goes on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from megazero.errors import ConfigError
from megazero.plan.tuning import Planned, Search
from megazero.version import VERSION


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
                whole, _, cut = file.read().rpartition("\n")
                if cut:
                    file.truncate(len(f"{whole}\n".encode()) if whole else 0)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"`{path}` must be a file of plans that can be read and written, but: {error}"
            ) from error
        self.known = {
            plan.layout: plan
            for number, line in enumerate(whole.splitlines(), 1)
            if (plan := self._read(number, line)) is not None
        }

    def add(self, plan: Planned) -> None:
        """Keep a plan."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"job": self.job, **plan.document()}) + "\n")
        self.known[plan.layout] = plan

    def _read(self, number: int, line: str) -> Planned | None:
        try:
            document: dict[str, Any] = json.loads(line)
            if document.pop("job") == self.job:
                return Planned.read(document)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"`{self.path}` must have a plan of `megazero tune` in each line, but line {number} is none; "
                "move the file away, or name another folder"
            ) from error
        self.others += 1
        return None


def _job(search: Search) -> str:
    """A word that stands for all that a plan depends on."""
    facts = (search.given.model_dump_json(), search.ranks, search.per_node, search.device, VERSION)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
