"""A run's folder: its checkpoints, which of them is the newest, and which are kept.

A checkpoint is written into a hidden folder and becomes visible by one rename; then
``latest_checkpointed_iteration.txt`` names it, as in Megatron. To remove a checkpoint, one rename hides it
first. So a visible checkpoint is whole at any moment, and a killed run leaves only hidden folders, which the
next run clears.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path

from megazero.checkpoint.disk import Disk
from megazero.checkpoint.manifest import LARGEST, STATE, json_object
from megazero.checkpoint.remote.mirror import local_folder
from megazero.checkpoint.tensor_file import read_bytes
from megazero.errors import CheckpointError, DamagedCheckpointError

LATEST = "latest_checkpointed_iteration.txt"
_DIGITS = "([0-9]{7}|[1-9][0-9]{7,17})"  # one spelling for each iteration
_VISIBLE = re.compile(f"iter_{_DIGITS}")
_LEFTOVER = re.compile(
    rf"\.iter_{_DIGITS}\.(partial|replaced|removed)|" + re.escape(f".{LATEST}.") + "[0-9a-f]{16}"
)
_IMPORT = "bring it over with `megazero checkpoint import-megatron`"
_HUGGING_FACE = (
    "a Hugging Face model",
    "train on with `pretrain_gpt.py --load-hf`, or import it with `megazero checkpoint from-hf`",
)
# (file name in a folder of another program, what such a folder is, what to do with it)
_FOREIGN = (
    ("manifest.json", "one checkpoint", "name the folder above it"),
    ("model.safetensors", *_HUGGING_FACE),
    ("model.safetensors.index.json", *_HUGGING_FACE),
    ("pytorch_model.bin", *_HUGGING_FACE),
    ("pytorch_model.bin.index.json", *_HUGGING_FACE),
    ("mp_rank_*", "a checkpoint of Megatron", _IMPORT),
    ("latest", "a folder of DeepSpeed or `megazero.initialize`", f"load it there or {_IMPORT}"),
    ("common.pt", "a checkpoint of Megatron", _IMPORT),
    (".metadata", "a checkpoint of torch.distributed.checkpoint", "convert it to a Hugging Face model"),
)


def iteration_folder(directory: str | Path, iteration: int) -> Path:
    """The folder of the checkpoint of `iteration`."""
    return Path(directory) / f"iter_{iteration:07d}"


def hidden_folder(directory: str | Path, iteration: int, state: str) -> Path:
    """The folder of a checkpoint while it is `partial`, `replaced` or `removed`."""
    return Path(directory) / f".iter_{iteration:07d}.{state}"


def saved_iterations(directory: str | Path) -> list[int]:
    """Iterations of the visible checkpoints, in ascending order; none if the folder does not exist.

    Raises:
        CheckpointError: `directory` is not a folder, or may not be read.
    """
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"`{directory}` must be a folder to read, but is not: {error.strerror}; check the path"
        ) from error
    matches = (_VISIBLE.fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in matches if match)


def latest_iteration(directory: str | Path) -> int | None:
    """The iteration that ``latest_checkpointed_iteration.txt`` names, or None if there is no such file.

    Raises:
        DamagedCheckpointError: the file does not hold a number, or is not a regular file.
        CheckpointError: the file holds `release`, which Megatron writes for converted weights.
    """
    path = Path(directory) / LATEST
    if not os.path.lexists(path):
        return None
    text = read_bytes(path, most=1000).decode(errors="replace").strip(" \t\r\n")
    if text == "release":
        raise CheckpointError(
            f"`{path}` must hold an iteration number, but holds 'release', which Megatron writes; {_IMPORT}"
        )
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise DamagedCheckpointError(
            f"`{path}` must hold an iteration number, but holds {text[:40]!r}; correct or delete it"
        )
    return int(text)


@dataclass(frozen=True)
class Candidates:
    """Checkpoints to try, the best first.

    Attributes:
        folders: the checkpoint that the run's file names, then the others, newest first. Leading ones that
            are known to be unhealthy are moved to the end, unless all are.
        remarks: what is odd about the run's file, or why a checkpoint comes last.
        states: the content of each ``state.json`` that was read for this, so that it is read once.
    """

    folders: tuple[Path, ...]
    remarks: tuple[str, ...] = ()
    states: Mapping[Path, bytes] = field(default_factory=dict)

    def facts(self, folder: Path) -> dict[str, object]:
        """A candidate's ``state.json``, before anything else of the checkpoint is checked.

        Raises:
            DamagedCheckpointError: the file cannot be read, or is not a JSON object.
        """
        return json_object(self.states.get(folder) or _state(folder), folder / STATE)


def candidates(directory: str | Path, iteration: int | None = None) -> Candidates:
    """The checkpoints to try when a run is resumed: all, or the one of `iteration`.

    Raises:
        CheckpointError: another program wrote the folder, it cannot be read, or it lacks the iteration.
    """
    directory = local_folder(directory)
    saved = _loadable(directory)
    if iteration is not None:
        if iteration not in saved:
            raise CheckpointError(
                f"`ckpt_step` must be an iteration that {directory} holds "
                f"({', '.join(map(str, sorted(saved))) or 'none'}), but is {iteration}"
            )
        return Candidates((saved[iteration],))
    remarks: list[str] = []
    states: dict[Path, bytes] = {}
    try:
        named = latest_iteration(directory)
    except DamagedCheckpointError as error:
        named = None
        remarks.append(str(error))
    order = sorted(saved, reverse=True)
    if named is not None:
        if named not in saved:
            remarks.append(
                f"`{directory / LATEST}` names {iteration_folder(directory, named)}, which is missing"
            )
        elif named != order[0]:
            remarks.append(f"`{directory / LATEST}` names iteration {named}, although {order[0]} is there")
        order = [named] * (named in saved) + [number for number in order if number != named]
    ailing = list(takewhile(lambda number: not healthy(saved[number], states), order))
    if len(ailing) < len(order):
        order = [number for number in order if number not in ailing] + ailing
        remarks += [
            f"passed over {saved[number]}: something was wrong with the run then" for number in ailing
        ]
    best = saved[order[0]] if order else directory
    ours = any(os.path.lexists(best / name) for name in ("manifest.json", "index.json"))  # perhaps damaged
    if not order or not ours:
        _refuse_foreign(best)
    return Candidates(tuple(saved[number] for number in order), tuple(remarks), states)


def healthy(folder: Path, states: dict[Path, bytes] | None = None) -> bool:
    """Whether a checkpoint's ``state.json`` says that the run was healthy when it saved.

    A file without that fact, from an older version, counts as healthy. So does one that cannot be read: the
    load will refuse it as damaged. The content is added to `states`.
    """
    try:
        state = _state(folder)
        if states is not None:
            states[folder] = state
        return json_object(state, folder / STATE).get("healthy") is not False
    except CheckpointError:
        return True


def _state(folder: Path) -> bytes:
    return read_bytes(folder / STATE, most=LARGEST)


def was_healthy(directory: Path, iteration: int) -> bool:
    """Whether the checkpoint of `iteration` in a run's folder is `healthy`."""
    return healthy(iteration_folder(directory, iteration))


def _loadable(directory: Path) -> dict[int, Path]:
    """Iteration -> folder, with checkpoints that a killed run has set aside and not replaced."""
    places = {iteration: iteration_folder(directory, iteration) for iteration in saved_iterations(directory)}
    for leftover in leftovers(directory) if directory.is_dir() else ():
        if leftover.restored is not None:
            places[int(leftover.restored.name.removeprefix("iter_"))] = leftover.path
    return places


def _refuse_foreign(folder: Path) -> None:
    for pattern, what, remedy in _FOREIGN:
        if next(folder.glob(pattern), None) is not None:
            raise CheckpointError(f"`{folder}` must be a run's folder, but is {what}; {remedy}")


@dataclass(frozen=True)
class Leftover:
    """A hidden file or folder that a killed run left, or that a running one is working on.

    Attributes:
        path: the hidden path.
        restored: the visible path that `recover` gives back to a checkpoint whose replacement was never
            finished; None for what `recover` removes.
    """

    path: Path
    restored: Path | None = None


def leftovers(directory: str | Path) -> list[Leftover]:
    """The files and folders that `recover` clears, sorted by name."""
    directory = Path(directory)
    entries = []
    for name in sorted(os.listdir(directory)):
        match = _LEFTOVER.fullmatch(name)
        if match is None:
            continue
        restored = None
        if match[2] == "replaced" and not iteration_folder(directory, int(match[1])).exists():
            restored = iteration_folder(directory, int(match[1]))
        entries.append(Leftover(directory / name, restored))
    return entries


def recover(disk: Disk, directory: Path, which: Callable[[Path], bool] = lambda path: True) -> None:
    """Remove or restore the leftovers for whose paths `which` is true; the caller holds the lock."""
    for leftover in leftovers(directory):
        if not which(leftover.path):
            continue
        if leftover.restored is not None:
            disk.rename(leftover.path, leftover.restored)
        else:
            disk.remove(leftover.path)


def publish(disk: Disk, directory: Path, iteration: int) -> Path:
    """Make a partial checkpoint, which must be complete and synced, the newest visible one."""
    final = iteration_folder(directory, iteration)
    replaced = hidden_folder(directory, iteration, "replaced")
    if final.exists():
        if replaced.exists():
            disk.remove(replaced)
        disk.rename(final, replaced)
    try:
        disk.rename(hidden_folder(directory, iteration, "partial"), final)
    except OSError:
        if replaced.exists():
            disk.rename(replaced, final)
        raise
    disk.sync_folder(directory)
    disk.write_text(directory / LATEST, f"{iteration}\n")
    if replaced.exists():
        disk.remove(replaced)
    return final


@dataclass(frozen=True)
class Retention:
    """The rule by which older checkpoints are kept.

    Attributes:
        last: the number of newest checkpoints to keep; None keeps all.
        every: keep also iterations that are multiples of this; None keeps no more.
    """

    last: int | None = None
    every: int | None = None

    def superseded(
        self, iterations: list[int], latest: int | None, well: Callable[[int], bool] = lambda iteration: True
    ) -> list[int]:
        """Iterations to remove, oldest first.

        `latest`, which a resume would take, always stays, and so does the newest for which `well` is true.
        """
        if self.last is None:
            return []
        old = sorted(iterations)[: -max(1, self.last)]
        removable = [
            iteration
            for iteration in old
            if iteration != latest and not (self.every and iteration % self.every == 0)
        ]
        if removable and not any(well(iteration) for iteration in iterations if iteration not in removable):
            newest_well = next(filter(well, reversed(removable)), None)
            removable = [iteration for iteration in removable if iteration != newest_well]
        return removable


def prune(
    disk: Disk, directory: Path, retention: Retention, on_removed: Callable[[Path], None] = lambda path: None
) -> None:
    """Remove the checkpoints that `retention` does not keep."""
    latest = latest_iteration(directory)
    for iteration in retention.superseded(
        saved_iterations(directory), latest, partial(was_healthy, directory)
    ):
        remove_checkpoint(disk, directory, iteration)
        on_removed(iteration_folder(directory, iteration))


def remove_checkpoint(disk: Disk, directory: Path, iteration: int) -> None:
    """Remove a visible checkpoint: hide it by one rename, then remove its files."""
    hidden = hidden_folder(directory, iteration, "removed")
    disk.rename(iteration_folder(directory, iteration), hidden)
    disk.sync_folder(directory)  # else a power cut could bring its name back without its files
    disk.remove(hidden)
