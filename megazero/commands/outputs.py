"""Flags and argparse types of what commands write: a path that cannot be written is refused at the start."""

from __future__ import annotations

import argparse
import os
from importlib.util import find_spec
from pathlib import Path

from megazero.checkpoint.remote.mirror import local_folder
from megazero.errors import MegazeroError
from megazero.pictures.style import LIGHT, SUFFIXES, THEMES, Theme
from megazero.storage.urls import is_url


def add_picture_flags(
    parser: argparse.ArgumentParser, purpose: str = "also draw it", *, required: bool = False
) -> None:
    """Add `--output FILE`, a picture for a purpose, and `--theme` to a command's flags."""
    text = f"{purpose} into this file (.png, .svg or .pdf); needs matplotlib"
    parser.add_argument("--output", type=output_picture, required=required, metavar="FILE", help=text)
    add_theme(parser)


def add_theme(parser: argparse.ArgumentParser) -> None:
    """Add `--theme`, the paper of a command's pictures, whose value is a `Theme`."""
    text = f"paper of pictures: {' or '.join(THEMES)} (default: {LIGHT.name})"
    parser.add_argument("--theme", type=_theme, default=LIGHT, metavar="NAME", help=text)


def output_file(text: str) -> Path:
    """A writable file in a folder that exists; an existing file will be replaced."""
    path = Path(text)
    if is_url(text):
        raise argparse.ArgumentTypeError(f"must be a local file, but is {text}; write one, and copy it")
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


def output_run(text: str) -> Path:
    """As `output_folder`, or the mirror of a URL."""
    return run_folder(text) if is_url(text) else output_folder(text)


def run_folder(text: str) -> Path:
    """A path as it is, or the mirror of a run's folder at a URL."""
    try:
        return local_folder(text)
    except MegazeroError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def output_folder(text: str) -> Path:
    """A folder that is writable, or can be made."""
    path = Path(text)
    if is_url(text):
        raise argparse.ArgumentTypeError(f"must be a local folder, but is {text}; write one, and copy it")
    above = next(folder for folder in (path, *path.absolute().parents) if os.path.lexists(folder))
    if not above.is_dir():
        raise argparse.ArgumentTypeError(f"must be a folder, but {above} is none; name another")
    _check_writable(above)
    return path


def _check_writable(path: Path) -> None:
    if not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"must be writable, but {path} may not be written; name another")


def _theme(text: str) -> Theme:
    if text not in THEMES:
        raise argparse.ArgumentTypeError(f"must be {' or '.join(THEMES)}, but is {text}")
    return THEMES[text]
