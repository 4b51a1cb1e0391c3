"""`import deepspeed` with this folder on the path: installs megazero's stand-in module."""

import sys
from pathlib import Path

HOME = str(Path(__file__).parents[4])
if HOME not in sys.path:  # a child process has the path of its script, not its parent's
    sys.path.append(HOME)

from megazero.deepspeed.surface import install  # noqa: E402

if __name__ == "deepspeed":
    del sys.modules[__name__]
    install()
