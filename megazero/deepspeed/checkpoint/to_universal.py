"""DeepSpeed's conversion to universal checkpoints, which megazero does not need."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megazero.checkpoint.disk import Disk, appear
from megazero.deepspeed.checkpoint.saved import open_saved

WHY = (
    "nothing to convert: {} is read as it is, by any number of ranks and at any stage; give it to "
    "`engine.load_checkpoint`, and leave `checkpoint.load_universal` out"
)


def main(words: Sequence[str] | argparse.Namespace | None = None) -> None:
    """Run ``ds_to_universal``, which checks that a checkpoint can be read, and converts nothing.

    The output folder gets the same files, as hard links if possible, because scripts expect it.

    Args:
        words: the arguments of the command line, or the parsed ones; by default those of this process.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    if words is None or isinstance(words, Sequence):
        parser = argparse.ArgumentParser(prog="ds_to_universal", description=WHY.format("a checkpoint"))
        parser.add_argument("--input_folder", required=True, help="the folder of a tag")
        parser.add_argument("--output_folder", required=True, help="gets the same files")
        for name in ("num_extract_workers", "num_merge_workers"):
            parser.add_argument(f"--{name}", type=int, help="without effect")
        for name in ("keep_temp_folder", "no_strict", "inject_missing_state"):
            parser.add_argument(f"--{name}", action="store_true", help="without effect")
        words = parser.parse_args(words)
    open_saved(Path(words.input_folder), optimizer=False)
    source, target = Path(words.input_folder), Path(words.output_folder)
    if not target.exists():
        copied = partial(shutil.copytree, source, copy_function=_link, dirs_exist_ok=True)
        appear(Disk(), target, copied)
    print(WHY.format(words.input_folder), flush=True)


def _link(source: str, target: str) -> None:
    """Link a file, or copy it if links are not supported."""
    try:
        os.link(source, target)
    except OSError:  # no links on this file system, or the target is on another one
        shutil.copy2(source, target)


def enable_universal_checkpoint(param_list: object) -> None:
    """Do nothing: every checkpoint loads on any layout."""


if __name__ == "__main__":
    main()
