"""argparse types of output paths: paths that cannot be written are refused before any work is done."""

from __future__ import annotations

import argparse
import os
from importlib.util import find_spec
from pathlib import Path

from megazero.pictures.style import SUFFIXES


def output_file(text: str) -> Path:
    """A writable file in a folder that exists; an existing file will be replaced."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file, but {path} is a folder; name a file in it")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"must lie in a folder, but `{path.parent}` is none; make it")
    _check_writable(path if path.exists() else path.absolute().parent)
    return path


def output_picture(text: str) -> Path:
    """A writable picture file; needs matplotlib."""
    path = output_file(text)
    if path.suffix.lower() not in SUFFIXES:
        raise argparse.ArgumentTypeError(f"must end in one of {', '.join(SUFFIXES)}, but is {path.name}")
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("needs matplotlib, which is not installed; `pip install matplotlib`")
    return path


def output_folder(text: str) -> Path:
    """A folder that is writable, or can be made."""
    path = Path(text)
    above = next(folder for folder in (path, *path.absolute().parents) if os.path.lexists(folder))
    if not above.is_dir():
        raise argparse.ArgumentTypeError(f"must be a folder, but {above} is none; name another")
    _check_writable(above)
    return path


def _check_writable(path: Path) -> None:
    if not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"must be writable, but {path} may not be written; name another")
