"""config: DeepSpeed's JSON as an engine takes it (`settings.py`), and as scripts look into it (`user.py`)."""

from collections.abc import Mapping
from typing import Any

Json = Mapping[str, Any]
"""The content of a JSON, or of one of its sections."""
