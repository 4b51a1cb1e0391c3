"""DeepSpeed's logger, and messages from selected ranks."""

from __future__ import annotations

import json
import logging
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from megazero.errors import ConfigError
from megazero.mpu.torch_group import joined_world

_FORMAT = "[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s"


class LoggerFactory:
    """Makes loggers that write to standard output."""

    @staticmethod
    def create_logger(name: str | None = None, level: int = logging.WARNING) -> OnceLogger:
        """Return a logger that writes to standard output and does not propagate.

        Raises:
            ValueError: `name` is None.
        """
        if name is None:
            raise ValueError("`name` must be the logger's name, but is None; give one")
        kind = logging.getLoggerClass()
        logging.setLoggerClass(OnceLogger)
        try:
            made = logging.getLogger(name)
        finally:
            logging.setLoggerClass(kind)
        assert isinstance(made, OnceLogger), f"a logger {name} of another class exists"
        made.setLevel(level)
        made.propagate = False
        if not made.handlers:
            handler = _StandardOutput()
            handler.setFormatter(logging.Formatter(_FORMAT))
            made.addHandler(handler)
        for own in made.handlers:
            own.setLevel(level)
        return made


class OnceLogger(logging.Logger):
    """A logger that can log a message only once."""

    def __init__(self, name: str, level: int = logging.NOTSET):
        super().__init__(name, level)
        self._logged: set[object] = set()

    def warning_once(self, message: str, *args: object) -> None:
        """Log a warning, unless it has been logged before."""
        self._once(("warning", message, *map(str, args)), logging.WARNING, message, *args)

    def log_dist_once(
        self, message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO
    ) -> None:
        """Log a message on these ranks, unless it has been logged before."""
        text = get_dist_msg(message, ranks)
        if text is not None:
            self._once(("dist", message, tuple(ranks or ()), level), level, text)

    def _once(self, key: object, level: int, message: str, *args: object) -> None:
        if key not in self._logged:
            self._logged.add(key)
            self.log(level, message, *args, stacklevel=3)


class _StandardOutput(logging.StreamHandler[TextIO]):
    """Writes to the current standard output, which a notebook or a test may have replaced."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]  # logging has an attribute
        return sys.stdout


def get_dist_msg(message: object, ranks: Sequence[int] | None = None) -> str | None:
    """Prefix a message with this rank; return None if this rank is not among `ranks`.

    If -1 is the first of `ranks`, all ranks are selected, as is every process that has joined no world.
    """
    joined = joined_world()
    if joined is None:
        return f"[Rank -1] {message}"
    rank = joined[0]
    return f"[Rank {rank}] {message}" if ranks and (ranks[0] == -1 or rank in ranks) else None


def log_dist(message: object, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on these ranks, see `get_dist_msg`."""
    text = get_dist_msg(message, ranks)
    if text is not None:
        logger.log(level, text, stacklevel=2)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on these ranks, unless it has been logged before."""
    logger.log_dist_once(message, ranks, level)


def print_dist(message: object, ranks: Sequence[int] | None = None) -> None:
    """Print a message on these ranks, whatever the logger's level."""
    text = get_dist_msg(message, ranks)
    if text is not None:
        print(text, flush=True)


def print_json_dist(message: dict[str, object], ranks: Sequence[int] | None = None, path: str = "") -> None:
    """Write a dictionary to a JSON file on these ranks, with the rank added."""
    if get_dist_msg("", ranks) is not None:
        joined = joined_world()
        message["rank"] = -1 if joined is None else joined[0]
        Path(path).write_text(json.dumps(message), encoding="utf-8")


def print_configuration(args: Namespace, name: str) -> None:
    """Log the attributes of `args` under a name."""
    logger.info("%s:", name)
    for key, value in sorted(vars(args).items()):
        logger.info("  %s %s %s", key, "." * (29 - len(key)), value)


def get_log_level_from_string(log_level_str: str) -> int:
    """Return the number of a log level.

    Raises:
        ConfigError: the level is unknown.
    """
    levels = {"debug", "info", "warning", "error", "critical"}
    if log_level_str.lower() not in levels:
        raise ConfigError(
            f"`log_level` must be one of {', '.join(sorted(levels))}, but is {log_level_str}; choose one"
        )
    return int(getattr(logging, log_level_str.upper()))


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of a logger, by default DeepSpeed's, and of its handlers."""
    level = get_log_level_from_string(log_level_str)
    chosen = custom_logger or logger
    chosen.setLevel(level)
    for handler in chosen.handlers:
        handler.setLevel(level)


def get_current_level() -> int:
    """Return the level of DeepSpeed's logger."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Whether the logger's level is at most this level."""
    return get_current_level() <= get_log_level_from_string(max_log_level_str)


logger = LoggerFactory.create_logger("DeepSpeed", logging.WARNING)
"""DeepSpeed's logger for scripts; it writes warnings and errors to standard output."""
