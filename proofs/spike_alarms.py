"""How often the search for spikes gives an alarm in trainings that went well: it reads their metrics again.

    python proofs/spike_alarms.py RUNS/*/metrics.jsonl

For each file of --metrics-jsonl, the losses and gradient norms of all steps are judged as a run with default
settings judges them. Prints a line per file with an alarm, and the totals. Exits 1 if there was one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megazero.commands.incidents import read_steps
from megazero.config.tree.guards import GuardsConfig
from megazero.train.step.spikes import Recent

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("metrics", nargs="+", type=Path)
    parser.add_argument("--threshold", type=float, default=GuardsConfig().spike_threshold)
    parser.add_argument("--window", type=int, default=GuardsConfig().spike_window)
    flags = parser.parse_args()
    steps = alarms = 0
    for path in flags.metrics:
        recent = Recent()
        for iteration, loss, norm in read_steps(path):
            for spike in recent.spikes(loss, norm, flags.threshold):
                print(f"{path}: step {iteration}: {spike}")
                alarms += 1
            recent = recent.after(loss, norm, flags.window)
            steps += 1
    print(f"{alarms} alarms in {steps} steps of {len(flags.metrics)} trainings")
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
