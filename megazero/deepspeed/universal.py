"""DeepSpeed's conversion to universal checkpoints, which nothing here needs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megazero.deepspeed.saved import open_saved

WHY = (
    "nothing to convert: {} is read as it is, by any number of ranks and at any stage; give it to "
    "`engine.load_checkpoint`, and leave `checkpoint.load_universal` out"
)


def main(words: Sequence[str] | argparse.Namespace | None = None) -> None:
    """The command line of ``ds_to_universal``: checks that the checkpoint can be read, and converts nothing.

    Raises:
        CheckpointError: it cannot be read.
    """
    if not isinstance(words, argparse.Namespace):
        parser = argparse.ArgumentParser(prog="ds_to_universal", description=WHY.format("a checkpoint"))
        parser.add_argument("--input_folder", required=True, help="the folder of a tag")
        parser.add_argument("--output_folder", required=True, help="nothing is written there")
        for name in ("num_extract_workers", "num_merge_workers"):
            parser.add_argument(f"--{name}", type=int, help="without effect")
        for name in ("keep_temp_folder", "no_strict", "inject_missing_state"):
            parser.add_argument(f"--{name}", action="store_true", help="without effect")
        words = parser.parse_args(words)
    open_saved(Path(words.input_folder), optimizer=False)
    print(WHY.format(words.input_folder), flush=True)


def enable_universal_checkpoint(param_list: Any) -> None:
    """Nothing: every checkpoint loads on any layout."""


if __name__ == "__main__":
    main()
