"""Put faults into small trainings and see what the guards make of each.

    python -m proofs.fault_matrix                  # all
    python -m proofs.fault_matrix --kinds copies   # some kinds
    python -m proofs.fault_matrix --quick          # those of the default suite

Prints a line per fault. It counts as caught if the exit status, what was said (the rank and the cause) and
what the run did about it are as expected, and if no good checkpoint was lost. Exits 1 if one was not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from proofs.fault_matrix.cases import all_cases


def main() -> int:
    """Run the command; returns the exit status."""
    cases = all_cases()
    kinds = list(dict.fromkeys(case.kind for case in cases))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--match", default="", help="only those whose name holds this")
    parser.add_argument("--quick", action="store_true", help="only those of the default suite")
    flags = parser.parse_args()
    chosen = [
        case
        for case in cases
        if case.kind in flags.kinds and flags.match in case.name and (case.quick or not flags.quick)
    ]
    missed, began = 0, time.monotonic()
    for number, case in enumerate(chosen):
        with tempfile.TemporaryDirectory() as folder:
            start = time.monotonic()
            complaints = case.complaints(Path(folder) / "run")
        missed += bool(complaints)
        state = "MISSED" if complaints else "caught"
        print(
            f"{number + 1:3} {state} {case.kind:10} {time.monotonic() - start:5.1f} s  {case.name}",
            flush=True,
        )
        for complaint in complaints:
            print(f"      {complaint}", flush=True)
    seconds = time.monotonic() - began
    print(f"{len(chosen) - missed} of {len(chosen)} faults caught in {seconds:.0f} s")
    return 1 if missed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
