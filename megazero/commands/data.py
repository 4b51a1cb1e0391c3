"""The command `megazero data`: make datasets of texts, and see what is in them.

A tool is the `main` of a module of `megazero.data_tools`, imported when it runs; it parses its own flags.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module

_TOOLS = (
    ("preprocess", "turn jsonl into token files (.bin and .idx)", "preprocess_data"),
    ("conversations", "turn chats into token files with a mask of the answers", "conversations"),
    ("train-tokenizer", "train a byte-level BPE or a WordPiece on jsonl", "train_tokenizer"),
    ("inspect", "show what is in a dataset", "inspect_dataset"),
    ("plan", "show what a blend would give a training: epochs, repeats, what is never seen", "looking.plan"),
    ("stats", "show lengths, bytes per token, duplicates and unused ids of datasets", "looking.stats"),
    ("show", "show documents or samples as text, with their boundaries and loss masks", "looking.show"),
    ("validate", "check datasets against their format, checksums and vocabulary", "looking.validate"),
    ("merge", "merge several datasets into one", "merge_datasets"),
    ("analyze", "measure every training sample, for a curriculum", "analyze_dataset"),
    ("corpus", "make jsonl of the Python standard library's sources", "corpora.sources"),
    ("corpus-prose", "make jsonl of the King James Bible", "corpora.prose"),
    ("corpus-lexnames", "make a classification task of WordNet", "corpora.lexnames"),
)


def build_parser() -> argparse.ArgumentParser:
    """Build a parser of the tools' names, each with its line of help alone."""
    parser = argparse.ArgumentParser(
        prog="megazero data",
        description="Make datasets of texts, and see what is in them.",
        epilog="`megazero data TOOL --help` lists a tool's flags.",
    )
    tools = parser.add_subparsers(dest="tool", required=True, metavar="TOOL")
    for name, line, _ in _TOOLS:
        tools.add_parser(name, help=line)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run a tool with its flags; returns the exit status: 0, or an error's own."""
    tool, *flags = argv or [""]
    for name, _, module in _TOOLS:
        if name == tool:
            run = import_module(f"megazero.data_tools.{module}").main
            status: int = run(flags, f"megazero data {name}")
            return status
    build_parser().parse_args(argv)  # which ends with help or an error
    return 2
