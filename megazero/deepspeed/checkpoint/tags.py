"""The folders and tags of checkpoints: checks of a script's arguments, and agreement of all ranks."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from megazero.checkpoint.tensor_file import read_bytes
from megazero.config.deepspeed.load import plain_paths
from megazero.errors import CheckpointError, CommunicationError
from megazero.formats.deepspeed.files import inventory
from megazero.mpu.context import ParallelContext
from megazero.mpu.messages import gather_values
from megazero.storage.urls import is_url

LATEST = "latest"
UNIVERSAL = "latest_universal"


def folder_of(folder: object, name: str) -> Path:
    """Return the path of a folder that a script passed as the argument `name`.

    Raises:
        CheckpointError: the value is no path.
    """
    if not isinstance(folder, (str, os.PathLike)) or not str(folder):
        shown = "empty" if folder == "" else f"of type {type(folder).__name__}"
        raise CheckpointError(
            f"`{name}` must be the path of a folder, but is {shown}; name the folder of the checkpoints"
        )
    if is_url(folder):
        raise CheckpointError(f"`{name}` must be a local folder, but is {folder}; save to one, and copy it")
    return Path(folder)


def agree_on_tag(tag: object, call: str, context: ParallelContext, differing: str = "fail") -> str:
    """Return the first rank's tag; every rank calls this.

    Args:
        tag: the tag of this rank.
        call: the function that the script called, for messages.
        context: the ranks.
        differing: the reaction to different tags: ``fail``, ``warn`` or ``ignore``.

    Raises:
        CheckpointError: on every rank, if tags differ and `differing` is ``fail``.
        CommunicationError: a rank does not call this.
    """
    try:
        tags = gather_values(context.world, str(plain_paths(tag)), context.device)
    except CommunicationError as error:
        raise CommunicationError(
            f"`{call}` must be called by every rank, also by those that write nothing, but not all did: "
            f"{error}; take the call out of any condition on the rank"
        ) from error
    other = next((rank for rank, entry in enumerate(tags) if entry != tags[0]), None)
    if other is not None and differing != "ignore":
        wrong = (
            f"`tag` must be the same on every rank, but is {tags[0]!r} on rank 0 and {tags[other]!r} on rank "
            f"{other}"
        )
        if differing == "fail":
            raise CheckpointError(f"{wrong}; make it from values that all ranks have")
        if context.rank == 0:
            warnings.warn(f"{wrong}; {tags[0]!r} is used", stacklevel=3)
    return str(tags[0])


def newest_tag(load_dir: Path) -> str | None:
    """Return the tag in a folder's file ``latest``; None without that file.

    Raises:
        CheckpointError: the tag is no name of a subfolder.
    """
    pointers = [load_dir / name for name in (LATEST, UNIVERSAL) if (load_dir / name).is_file()]
    if not pointers:
        return None
    tag = read_bytes(pointers[0], most=1000).decode(errors="replace").strip()
    if not tag or "\0" in tag or Path(tag).is_absolute() or ".." in Path(tag).parts:
        raise CheckpointError(
            f"`{pointers[0]}` must name a folder beside it, but holds {tag!r:.60}; correct it or give a tag"
        )
    return tag


def warn_of_nothing(load_dir: Path) -> None:
    """Warn that nothing is loaded, and list what the folder has; the run starts from scratch."""
    warnings.warn(
        f"nothing is loaded: `{load_dir / LATEST}` must name the checkpoint to load, but is missing; "
        f"{load_dir} has {inventory(load_dir)}; correct the path or give a tag",
        stacklevel=3,
    )
