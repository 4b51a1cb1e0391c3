"""A fault, what must come of it, and what all of them have in common."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megazero.checkpoint.folder import iteration_folder
from megazero.checkpoint.reader import CheckpointReader, Verify
from megazero.errors import MegazeroError
from proofs.fault_matrix.runs import Outcome

BASE = "--global-batch-size 12 --train-iters 36 --save-interval 10 --spike-window 20 "
STEP = 31  # in which most faults strike, when checkpoints 10, 20 and 30 are there
NOISE = range(12 * (STEP - 1), 12 * STEP)
NAN = float("nan")
KEPT = (10, 20, 30)  # checkpoints that are whole when a later step goes wrong
SHARDED = "--zero-param-persistence-threshold 0"  # stage 3 shards small parameters too


@dataclass(frozen=True)
class Expected:
    """What must come of a fault.

    Attributes:
        status: the exit status.
        told: patterns, each of which an error, an incident or a line of output must match.
        kept: iterations whose checkpoints must be there and whole.
        kinds: the kinds of the incidents, in order; None does not say.
        actions: what the run did about them, in order; None does not say.
    """

    status: int
    told: tuple[str, ...]
    kept: tuple[int, ...] = ()
    kinds: tuple[str, ...] | None = None
    actions: tuple[str, ...] | None = None


@dataclass(frozen=True)
class FaultCase:
    """One fault.

    Attributes:
        kind: of fault, such as ``copies``.
        name: what and where.
        run: trains with it in a folder.
        expected: what must come of it.
        quick: whether it is one of those that the default suite runs.
    """

    kind: str
    name: str
    run: Callable[[Path], Outcome]
    expected: Expected
    quick: bool = False

    def complaints(self, folder: Path) -> list[str]:
        """Run it; what came out otherwise than expected, in words."""
        outcome, expected, found = self.run(folder), self.expected, []
        if outcome.status != expected.status:
            found.append(f"exit status {outcome.status} instead of {expected.status}: {first_error(outcome)}")
        if expected.status and any(error is None for error in outcome.errors):
            found.append("some ranks did not end with the others")
        heard = "\n".join(
            [*map(str, outcome.errors), *(each["summary"] for each in outcome.incidents), outcome.printed]
        )
        found += [f"nothing says {pattern!r}" for pattern in expected.told if not re.search(pattern, heard)]
        for what, field in (("kind", expected.kinds), ("action", expected.actions)):
            told = tuple(each[what] for each in outcome.incidents)
            if field is not None and told != field:
                found.append(f"incidents of {what} {told} instead of {field}")
        return found + _lost(folder, expected.kept)


def first_error(outcome: Outcome) -> str:
    return next((str(error)[:200] for error in outcome.errors if error is not None), "no error")


def _lost(folder: Path, kept: Sequence[int]) -> list[str]:
    """Checkpoints that are not there, or not whole."""
    found = []
    for iteration in kept:
        try:
            reader = CheckpointReader(iteration_folder(folder, iteration), verify=Verify.FULL)
            if reader.facts["healthy"] is not True:
                found.append(f"the checkpoint of iteration {iteration} says that the run was not healthy")
        except (MegazeroError, OSError) as error:
            found.append(f"the checkpoint of iteration {iteration} is lost: {error}")
    return found


def damage(path: Path, byte: int) -> None:
    """Flip a bit of the file."""
    content = bytearray(path.read_bytes())
    content[byte] ^= 0x10
    path.write_bytes(content)
