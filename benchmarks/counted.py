"""Run a training script and write how many operators of torch and functions of the package it called.

    python benchmarks/counted.py COUNTS.json SCRIPT [ARGUMENT ...]

Unlike seconds, these numbers do not depend on what else the machine does. Only the main thread is counted;
on a CPU, autograd computes there too. `COUNTS.json` gets ``[operators, functions]``, from rank 0 alone.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from types import FrameType

from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Counts the operators that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += 1
        return operator(*args, **(kwargs or {}))


class Functions:
    """Counts calls of Python functions in files of a folder."""

    def __init__(self, folder: str):
        self.folder = folder
        self.count = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        self.count += event == "call" and frame.f_code.co_filename.startswith(self.folder)


def main() -> None:
    output, script = Path(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[2:]
    operators, functions = Operators(), Functions(str(Path(script).resolve().parent / "megazero"))
    try:
        sys.setprofile(functions)
        with operators:
            runpy.run_path(script, run_name="__main__")
    finally:
        sys.setprofile(None)
        if os.environ.get("RANK", "0") == "0":
            output.write_text(json.dumps([operators.count, functions.count]))


if __name__ == "__main__":
    main()
