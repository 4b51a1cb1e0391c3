"""Read the files that `--metrics-jsonl` writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from megazero.errors import DataError, MegazeroError
from megazero.regular_file import read_regular_text

T = TypeVar("T")


def read_metrics(
    path: Path,
    name: str,
    needs: str,
    read: Callable[[dict[str, Any]], T],
    refusal: type[MegazeroError] = DataError,
) -> list[T]:
    """Read each step in a file of metrics by `read`, leaving out a last one that is still being written.

    Args:
        path: the file.
        name: the argument that names it, for messages.
        needs: what each step must have, for messages.
        read: converts a step; raises a ValueError, KeyError, TypeError or AttributeError if it is no step.
        refusal: the error that is raised.

    Raises:
        refusal: the file cannot be read, or `read` refuses a line.
    """
    try:
        text = read_regular_text(path)
    except OSError as error:
        raise refusal(
            f"`{name}` must be a file that can be read, but {path}: {error.strerror}; check the path"
        ) from error
    except UnicodeDecodeError as error:
        raise refusal(
            f"`{name}` must be a file of metrics, but {path} is not text; check the path"
        ) from error
    parsed = []
    # What follows the last line end is the part of a line that a run is writing, or that a crash cut short.
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        try:
            parsed.append(read(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise refusal(
                f"`{name}` must be a file of metrics, but line {number} of {path} is not an object with "
                f"{needs}; check the path"
            ) from error
    return parsed
