"""``python -m megazero.deepspeed [--local_rank] [-m] SCRIPT ...``: run one rank of a DeepSpeed script.

`--local_rank` passes ``--local_rank=N`` to the script, with the environment's `LOCAL_RANK`, as DeepSpeed's
launcher does. Output and exit status are those of ``python SCRIPT ...``, also if the script fails.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from types import FrameType

from megazero.deepspeed.surface import install


def main() -> None:
    """Run the script that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m megazero.deepspeed")
    parser.add_argument("--local_rank", action="store_true", help="pass `--local_rank=N` to the script")
    parser.add_argument("-m", "--module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", help="the script, or the module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    flags = parser.parse_args()
    added = [f"--local_rank={os.environ.get('LOCAL_RANK', 0)}"] if flags.local_rank else []
    sys.argv[:] = [flags.script, *added, *flags.arguments]
    install()
    try:
        if flags.module:
            runpy.run_module(flags.script, run_name="__main__", alter_sys=True)
        else:
            sys.path[: sys.path[0] == os.getcwd()] = [os.path.dirname(os.path.abspath(flags.script))]
            runpy.run_path(flags.script, run_name="__main__")
    except Exception as error:
        sys.exit(_report(error))


def _report(error: Exception) -> int:
    """Report a script's error without the frames of this module and of runpy; returns the exit status."""
    trace = error.__traceback__
    while trace is not None and _is_outside_script(trace.tb_frame):
        trace = trace.tb_next
    if trace is None and isinstance(error, OSError):
        why = f"a file that can be read, but {error.filename}: {error.strerror}"
        print(f"error: the script must be {why}.", file=sys.stderr)
        return 2
    if trace is None and isinstance(error, ImportError):
        print(f"error: the script must be one that can be run, but {error}.", file=sys.stderr)
    else:
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    return 1


def _is_outside_script(frame: FrameType) -> bool:
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    return package in ("runpy", "importlib") or frame.f_globals is globals()


if __name__ == "__main__":
    main()
