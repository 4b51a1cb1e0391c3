"""Faults planted in context parallelism, one at a time, and whether the tests find them.

    python proofs/context_faults.py [--only TEXT]

Each fault is one edit of a copy of the sources: an offset that is wrong, a merge that is lost, a mask that is
shifted. The tests of the cores run on the copy, then the fast layouts whose sequences ranks share; a fault is
found if one fails. Exits 1 if any is not.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = (
    ("tests/layers/context/test_cores.py",),
    ("tests/equivalence/test_context_layouts.py", "--fast"),
    ("tests/layers/context/test_heads.py", "tests/moe/test_tokens.py", "tests/moe/test_losses.py"),
)


@dataclass(frozen=True)
class Fault:
    """An edit of one file of the package: `before`, which is there once, becomes `after`."""

    name: str
    file: str
    before: str
    after: str


RING, MASKS, CORE = "layers/context/ring.py", "layers/context/masks.py", "layers/context/core.py"
ROWS, TOKENS, LOSSES = "layers/rows.py", "moe/tokens.py", "moe/losses.py"
FAULTS = (
    Fault("the last step's gradients stay away", RING, "_add_home(ring, size - 1, returning, grads)", "pass"),
    Fault(
        "gradients of keys go home to the wrong rows",
        RING,
        "total[rows] += part[start:stop]",
        "total[rows] += part[: stop - start]",
    ),
    Fault(
        "a step's part is not merged", RING, "merge_part(out[rows], lse[..., rows], part, part_lse)", "pass"
    ),
    Fault(
        "only the own keys are seen",
        RING,
        "for pair in ring.pairs(step):",
        "for pair in ring.pairs(step)[: step == 0]:",
    ),
    Fault(
        "keys come from the other side",
        RING,
        "theirs = self.columns(self.group.rank - step)",
        "theirs = self.columns(self.group.rank + step)",
    ),
    Fault("backward takes the keys' gradients twice", RING, "total += part\n", "total += 2 * part\n"),
    Fault(
        "the log-sum-exp has no gradient", RING, "None if grad_lse is None else grad_lse[..., rows]", "None"
    ),
    Fault(
        "queries start a row late",
        MASKS,
        "Part(queries.start, keys.start)",
        "Part(queries.start + 1, keys.start)",
    ),
    Fault(
        "keys start a row late",
        MASKS,
        "Part(queries.start, keys.start)",
        "Part(queries.start, keys.start + 1)",
    ),
    Fault(
        "the own square is not causal",
        MASKS,
        "pattern = CAUSAL if self.attends.causal else ALL",
        "pattern = ALL",
    ),
    Fault("causality is lost between runs", MASKS, "pattern.causally(self.attends.causal)", "pattern"),
    Fault(
        "keys' documents are those of the sequence's beginning",
        MASKS,
        "documents = documents.part(keys)",
        "documents = documents.part(range(len(keys)))",
    ),
    Fault(
        "a query's document is not known",
        MASKS,
        "place = replace(place, query_ids=documents.part(queries).ids)",
        "pass",
    ),
    Fault(
        "a window's keys are cut by one",
        MASKS,
        "start = max(start, queries.start - left)",
        "start = max(start, queries.start - left + 1)",
    ),
    Fault(
        "keys before a run's end are cut",
        MASKS,
        "stop = min(stop, queries.stop + right)",
        "stop = min(stop, queries.stop + right - 1)",
    ),
    Fault(
        "dropout takes keys for those of the beginning",
        MASKS,
        "key_positions=_at(dropout.key_positions, keys",
        "key_positions=_at(dropout.key_positions, tuple(range(len(k)) for k in keys)",
    ),
    Fault(
        "heads count from the tensor rank alone",
        MASKS,
        "head_offset=dropout.head_offset + heads.start",
        "head_offset=dropout.head_offset",
    ),
    Fault(
        "slopes are those of the first heads",
        MASKS,
        "Slopes(bias.by_head[heads.start : heads.stop])",
        "Slopes(bias.by_head[: len(heads)])",
    ),
    Fault(
        "blocks are those of the first heads",
        MASKS,
        "layout.blocks[heads.start : heads.stop]",
        "layout.blocks[: len(heads)]",
    ),
    Fault(
        "the offset is that of the first heads", CORE, "offset[own.start : own.stop]", "offset[: len(own)]"
    ),
    Fault("second runs are not turned", CORE, "pieces[:, 1].flip(0)", "pieces[:, 1]"),
    Fault("rows go back unturned", CORE, "second.flip(0)", "second"),
    Fault(
        "a gather takes keys for those of the beginning",
        CORE,
        "masks.call(own, keys)",
        "masks.call(own, range(len(keys)))",
    ),
    Fault(
        "a gather's queries see their own run alone",
        CORE,
        "masks.seen(own, range(rows.whole_length))",
        "masks.seen(own, own)",
    ),
    Fault(
        "both runs are the first",
        ROWS,
        "numbers = (rank, 2 * ranks - 1 - rank) if zigzag",
        "numbers = (rank, 2 * ranks - 2 - rank) if zigzag",
    ),
    Fault(
        "rotary angles are those of the first columns",
        "layers/rotary.py",
        "rotary_of(self.specs, self.spread.own_columns(positions))",
        "rotary_of(self.specs, positions[: len(self.spread.own_columns(positions))])",
    ),
    Fault(
        "labels are those of the first columns",
        "models/batch.py",
        '_BY_COLUMN = ("tokens", "labels", "loss_mask")',
        '_BY_COLUMN = ("tokens", "loss_mask")',
    ),
    Fault(
        "masked words of other ranks are read",
        "models/bert_batch.py",
        "place[at_column] >= 0, place[column] >= 0",
        "place[at_column] >= -1, place[column] >= 0",
    ),
    Fault(
        "a token's place is that among this rank's",
        TOKENS,
        "if spread.cp.size > 1 else place",
        "if spread.cp.size > 99 else place",
    ),
    Fault(
        "a balance loss counts once a rank",
        LOSSES,
        "return value if ranks == 1 else",
        "return value if ranks > 0 else",
    ),
    Fault(
        "a z-loss is summed over sequences",
        LOSSES,
        "terms[_Z] = reduce_from_slices(squares.sum(), group)",
        "terms[_Z] = reduce_from_slices(squares.sum(), tokens.sharers)",
    ),
    Fault(
        "kept tokens lie in the wrong order",
        "layers/skipping.py",
        "columns = row_of[columns[kept_order.to(device)]]",
        "columns = row_of[columns]",
    ),
    Fault(
        "a shared kv head's gradient counts once",
        "layers/context/heads.py",
        "total[:, :, heads.start : heads.stop] += part",
        "total[:, :, heads.start : heads.stop] = part",
    ),
)


def found(fault: Fault, folder: Path) -> str | None:
    """The first tests that fail with the fault; None if all pass.

    Raises:
        AssertionError: the sources are no more what the fault edits.
    """
    path = folder / "megazero" / fault.file
    text = path.read_text()
    assert fault.before in text, f"{fault.name}: {fault.file} has no {fault.before!r}"
    path.write_text(text.replace(fault.before, fault.after, 1))
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    try:
        for tests in TESTS:
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-x",
                "-n",
                "2",
                "-p",
                "no:cacheprovider",
                *tests,
            ]
            ran = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900
            )
            if failed := [line for line in ran.stdout.splitlines() if line.startswith("FAILED")]:
                return failed[0]
            assert ran.returncode == 0, ran.stdout + ran.stderr
        return None
    finally:
        path.write_text(text)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="a part of a fault's name")
    args = parser.parse_args()
    missed = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("megazero", "tests", "proofs"):
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        for part in ("pyproject.toml", "setup.py"):
            shutil.copy(ROOT / part, folder / part)
        for fault in FAULTS:
            if args.only not in fault.name:
                continue
            by = found(fault, folder)
            missed += [fault.name] if by is None else []
            print(f"{'MISSED' if by is None else 'found '}  {fault.name}  {by or ''}"[:160], flush=True)
    print(f"{len(missed)} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
