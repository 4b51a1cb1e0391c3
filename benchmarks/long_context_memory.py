"""Does a long sequence fit? Plans of examples_3d/long_context/paper, on the meta device.

    python benchmarks/long_context_memory.py --node 8

Ranks that share a sequence hold what as many replicas of its part would: so the plan is that of sequences of
s / cp tokens on cp replicas. What attention sends between ranks comes on top.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import yaml

from megazero.commands.memory_report.formula import activation_bytes
from megazero.commands.memory_report.planned import planned_memory
from megazero.commands.memory_report.table import COLUMNS, RankMemory, rows, shown
from megazero.commands.show import print_table
from megazero.config.resolve import parse_config
from megazero.config.tree.config import Config

PAPER = Path(__file__).parents[1] / "examples_3d/long_context/paper"


def part_of(path: Path, overrides: list[str]) -> tuple[Config, int]:
    """The configuration with each rank's part of the sequence as a sequence of its own, and the ranks."""
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    ranks = settings["parallel"].pop("context_parallel_size")
    length = settings["model"]["seq_length"] // ranks
    words = [f"--seq-length={length}", f"--max-position-embeddings={settings['model']['seq_length']}"]
    words += ["--context-parallel-size=1", f"--global-batch-size={ranks}", *overrides]
    return parse_config(["--config", str(path), *words], world_size=ranks).config, ranks


def main() -> None:
    """Print the plans."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--node", type=int, default=8, help="ranks of a node, which share its memory")
    parser.add_argument("--only", default="", help="a part of the configurations' names")
    arguments, overrides = parser.parse_known_args()
    for path in sorted(PAPER.glob(f"*{arguments.only}*.yaml")):
        begun = time.perf_counter()
        config, ranks = part_of(path, overrides)
        (memory,) = planned_memory(config, ranks)
        print(f"{path.stem}: {config.model.seq_length * ranks:,} tokens on {ranks} ranks")
        print_table(COLUMNS, rows([RankMemory((0,), memory.places)]), left=2)
        formula = activation_bytes(config, config.model.vocab_size or 0, apart=True)
        print(f"formula of activations: {shown(formula.most)}, at the {formula.when}", end="; ")
        print({moment: shown(size) for moment, size in formula.moments.items()})
        host = memory.total("cpu") * arguments.node
        seconds = time.perf_counter() - begun
        print(f"host, for each node of {arguments.node}: {shown(host)} ({seconds:.0f} s)\n")


if __name__ == "__main__":
    main()
