"""``python -m megazero.deepspeed [--local_rank] [-m] SCRIPT ...``: a rank of a script, with our `deepspeed`.

`--local_rank` gives the script that argument with the number in the environment's `LOCAL_RANK`, as
DeepSpeed's launcher does. The process is as if ``python SCRIPT ...`` had started it.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from megazero.deepspeed.surface import install


def main() -> None:
    """Run the script that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m megazero.deepspeed")
    parser.add_argument("--local_rank", action="store_true", help="give the script its `--local_rank=N`")
    parser.add_argument("-m", "--module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", help="the script, or the module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    flags = parser.parse_args()
    added = [f"--local_rank={os.environ.get('LOCAL_RANK', 0)}"] if flags.local_rank else []
    sys.argv[:] = [flags.script, *added, *flags.arguments]
    install()
    if flags.module:
        runpy.run_module(flags.script, run_name="__main__", alter_sys=True)
    else:
        sys.path[: sys.path[0] == os.getcwd()] = [os.path.dirname(os.path.abspath(flags.script))]
        runpy.run_path(flags.script, run_name="__main__")


if __name__ == "__main__":
    main()
