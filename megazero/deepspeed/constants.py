"""Numbers that scripts import from DeepSpeed's modules of constants; words are in the tables of names."""

from __future__ import annotations

import importlib.util

from megazero.deepspeed.adopt import TIMEOUT
from megazero.deepspeed.surface import VERSION

VERSION_MAJOR, VERSION_MINOR, VERSION_PATCH = map(int, VERSION.split("."))
GIT_HASH = "megazero"
GIT_BRANCH = "megazero"
HAS_TRITON = importlib.util.find_spec("triton") is not None
DIST = None
"""`deepspeed.dist` is None until an engine is made; scripts import `deepspeed.comm` instead."""
TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
DEFAULT_PG_TIMEOUT = TIMEOUT

DEEPSPEED_OPTIMIZERS = (
    *("adagrad", "adam", "adamw", "lamb", "muadam"),
    *("muadamw", "musgd", "lion", "muon"),
)
ADAM_W_MODE_DEFAULT = True
