"""The compiled helpers, or None where they are not built: the package then uses numpy and says so once."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

NATIVE: Any  # csrc/data, which has no type annotations
try:
    NATIVE = importlib.import_module("megazero.data._native")
except ImportError as error:
    NATIVE = None
    warnings.warn(
        f"megazero.data works without its compiled helpers ({error}): index building and sample gathering "
        "are slower. Install a C++17 compiler and run `pip install -e .` to build them.",
        stacklevel=2,
    )
