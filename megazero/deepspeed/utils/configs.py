"""A DeepSpeed JSON as scripts read it themselves."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from megazero.config.deepspeed.load import load_json, plain_paths
from megazero.errors import ConfigError


def load_ds_config(config: Any) -> dict[str, Any]:
    """The document of a JSON: of a file, of its text in base64, or itself, also within a `DeepSpeedConfig`.

    Raises:
        ConfigError: it is none of these, or names everything that is wrong with the text.
    """
    content = getattr(config, "_param_dict", config)
    if isinstance(content, Mapping):
        return dict(plain_paths(content))
    if not isinstance(content, (str, os.PathLike)):
        raise ConfigError(
            "`config` must be a path, a dictionary or a DeepSpeedConfig, but is a "
            f"{type(content).__name__}; pass one of these"
        )
    document, faults = load_json(content)
    if faults:
        raise ConfigError(faults)
    return dict(document)
