"""Arguments that commands share: the flags of a training after `--`, bounded integers, and prices."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megazero.errors import ConfigError


def training_words(config: str | None, training: Sequence[str] | None) -> list[str]:
    """The flags of a training, from a file, from after ``--``, or both.

    Raises:
        ConfigError: neither is given.
    """
    if config is None and training is None:
        raise ConfigError(
            "`CONFIG` must be a YAML file of a training, or its flags must follow after `--`, but both are "
            "left out; give one of them"
        )
    return [*([] if config is None else ["--config", config]), *(training or ())]


def positive(text: str) -> int:
    """An argparse type: a positive integer."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, but is {text}")
    return number


def price(text: str) -> float:
    """An argparse type: what an hour of a device costs, in any currency."""
    try:
        amount = float(text)
    except ValueError:
        amount = 0.0
    if not 0 < amount < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, but is {text}")
    return amount
