"""Finding and reading the files a tokenizer is made of, with errors that name the flag."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megazero.errors import DataError
from megazero.regular_file import read_regular


def require_file(path: str | None, flag: str, kind: str, content: str) -> Path:
    """The existing file `path`; a DataError otherwise says which flag gives `kind` its `content`."""
    if path is None:
        raise DataError(f"`{flag}` must name {content} for {kind}, but is missing; add `{flag} FILE`.")
    file = Path(path)
    if not file.is_file():
        what = "a directory" if file.is_dir() else "not a regular file" if file.exists() else "not there"
        raise DataError(f"`{flag}` must name {content} for {kind}, but {path} is {what}; correct `{flag}`.")
    return file


def read_json(path: Path, flag: str) -> Any:
    """The parsed JSON file, or DataError naming it."""
    try:
        return json.loads(read_regular(path).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"`{flag}` must be a JSON file, but {path} is not ({error}).") from error
    except OSError as error:
        raise DataError(f"`{flag}` must be readable, but {path} is not ({error}).") from error
