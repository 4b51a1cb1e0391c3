"""DeepSpeed's conversion to universal checkpoints, which nothing here needs."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megazero.checkpoint.disk import Disk, appear
from megazero.deepspeed.checkpoint.saved import open_saved

WHY = (
    "nothing to convert: {} is read as it is, by any number of ranks and at any stage; give it to "
    "`engine.load_checkpoint`, and leave `checkpoint.load_universal` out"
)


def main(words: Any = None) -> None:
    """The command line of ``ds_to_universal``: checks that the checkpoint can be read, and converts nothing.

    The output folder gets the same files, as links where the disk has them, so that scripts find it.

    Args:
        words: the words of the command line, or an object with its values; by default those of this process.

    Raises:
        CheckpointError: it cannot be read.
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
    """Make a file appear in another place too."""
    try:
        os.link(source, target)
    except OSError:  # the disk has no links, or it is another one
        shutil.copy2(source, target)


def enable_universal_checkpoint(param_list: Any) -> None:
    """Nothing: every checkpoint loads on any layout."""


if __name__ == "__main__":
    main()
