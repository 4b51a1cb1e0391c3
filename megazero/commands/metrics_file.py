"""Read the files that `--metrics-jsonl` writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from megazero.errors import DataError, MegazeroError
from megazero.regular_file import read_regular_text

T = TypeVar("T")


def read_metrics(
    path: Path,
    name: str,
    needs: str,
    read: Callable[[dict[str, object]], T],
    refusal: type[MegazeroError] = DataError,
) -> list[T]:
    """Parse each line of a file of metrics by `read`, except an incomplete last line.

    Args:
        path: the file.
        name: the argument that names the file, for messages.
        needs: what each line must have, for messages.
        read: converts a line's object; raises ValueError, KeyError, TypeError or AttributeError to refuse it.
        refusal: the class of the error that is raised.

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
    # A text after the last line end is a line that a run is still writing, or that a crash cut short.
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        try:
            parsed.append(read(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise refusal(
                f"`{name}` must be a file of metrics, but line {number} of {path} is not an object with "
                f"{needs}; check the path"
            ) from error
    return parsed
