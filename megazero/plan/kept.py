"""`KeptPlans`: a file of planned layouts, so that a search can go on where it stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from megazero.errors import ConfigError
from megazero.plan.layout import Layout
from megazero.plan.tuning import Planned, Search
from megazero.version import VERSION

_BEGINS = '{"job": "'


class KeptPlans:
    """One search's plans in a file that may hold plans of other searches, one per line.

    A plan belongs to a search if job, number of ranks, device and version are the same. An incomplete last
    line is dropped.

    Args:
        path: the file; its folder is made if it does not exist.
        search: the search.
        anew: whether to empty the file.

    Attributes:
        known: this search's plans by layout.
        others: the number of plans of other searches.

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
        """Append a plan to the file."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"job": self.job, **plan.document()}) + "\n")
        self.known[plan.layout] = plan

    def _read(self, lines: Sequence[str]) -> dict[Layout, Planned]:
        """Parse this search's plans, and count the others."""
        known = {}
        for number, line in enumerate(lines, 1):
            try:
                document: dict[str, object] = json.loads(line)
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
    """Hash everything that a plan depends on."""
    facts = (search.base.model_dump_json(), search.ranks, search.per_node, search.device, VERSION)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
