"""`NATIVE`: the compiled helpers of csrc/data, or None if they are not built; numpy then does their work."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

NATIVE: Any  # the extension module has no type annotations
try:
    NATIVE = importlib.import_module("megazero.data._native")
except ImportError as error:
    NATIVE = None
    warnings.warn(
        f"megazero.data works without its compiled helpers ({error}): index building and sample gathering "
        "are slower. Install a C++17 compiler and run `pip install -e .` to build them.",
        stacklevel=2,
    )
