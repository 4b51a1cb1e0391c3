"""`import deepspeed` where this folder is on the path: it gives way to megazero's stand-in of that name."""

import sys
from pathlib import Path

HOME = str(Path(__file__).parents[4])
if HOME not in sys.path:  # a child has the path of its parent's script, not of its parent
    sys.path.append(HOME)

from megazero.deepspeed.surface import install  # noqa: E402

if __name__ == "deepspeed":
    del sys.modules[__name__]
    install()
