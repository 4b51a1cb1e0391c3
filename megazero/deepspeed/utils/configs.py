"""A DeepSpeed JSON as scripts read it themselves."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megazero.config.deepspeed.load import load_json
from megazero.errors import ConfigError


def load_ds_config(config: str | dict[str, Any]) -> Mapping[str, Any]:
    """The document of a JSON: itself, a file's, or that of base64 text.

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(config, dict):
        return config
    if isinstance(config, str) and Path(config).exists():
        document, faults = load_json(Path(config))
        if faults:
            raise ConfigError(faults)
        return document
    try:
        decoded = json.loads(base64.urlsafe_b64decode(config).decode())
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"`config` must be a dictionary, the path of a JSON file or base64 text of one, but is "
            f"{config!r}; correct it"
        ) from error
    if not isinstance(decoded, dict):
        raise ConfigError(f"`config` must hold one JSON object, but is {decoded!r}; correct it")
    return decoded
