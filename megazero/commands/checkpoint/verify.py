"""`megazero checkpoint verify`: check that every byte is as it was written."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megazero.checkpoint.blocks import BLOCK, BlockFile, FileRecord
from megazero.checkpoint.by_parts import part_name, read_part
from megazero.checkpoint.folder import leftovers
from megazero.checkpoint.locate import checkpoints_of, is_checkpoint
from megazero.checkpoint.lock import saved_elsewhere
from megazero.checkpoint.manifest import MANIFEST, read_manifest
from megazero.checkpoint.reader import CheckpointReader, Verify
from megazero.checkpoint.remote.mirror import local_folder, stored_sizes
from megazero.commands.checkpoint.summary import latest_or_trouble
from megazero.commands.show import one_line, size_text
from megazero.errors import CheckpointError, DamagedCheckpointError

_READ_BYTES = 8 * BLOCK  # blocks of one read are hashed by several threads
_MOST_PARTS = 100  # damaged parts that are named; a damaged manifest may claim a million


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the flags of `verify`."""
    parser = verbs.add_parser(
        "verify",
        help="check every byte of a checkpoint, or of all checkpoints of a run",
        description="Compare every block of every file with the hash that was taken when it was written, and "
        "the index with the files. All damage is named, not only the first.",
        epilog="Status 0: all is whole; 1: something is damaged or missing. Warnings do not count.",
    )
    parser.add_argument("path", metavar="DIR", help="folder of a run, or DIR/iter_N of one checkpoint")
    parser.add_argument("--size-only", action="store_true", help="only check the sizes of all files; fast")
    parser.set_defaults(run=run, trouble=1)


@dataclass(frozen=True)
class CheckResult:
    """The result of checking one checkpoint.

    Attributes:
        bytes: the size of the checked files.
        files: the number of checked files.
        damage: a sentence for each damage, with the file's name; empty if the checkpoint is whole.
        warnings: a sentence for each oddity.
    """

    bytes: int
    files: int
    damage: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def run(flags: argparse.Namespace) -> int:
    """Check, and print a line per checkpoint and per damage."""
    path = local_folder(flags.path)
    began = time.perf_counter()
    total = bad = 0
    folders = checkpoints_of(path)
    for folder in folders:
        verdict = check(folder, size_only=flags.size_only)
        total += verdict.bytes
        bad += bool(verdict.damage)
        word = "damaged" if verdict.damage else "whole"
        print(
            f"{word:<8} {one_line(folder)}  {size_text(verdict.bytes)} in {verdict.files} files", flush=True
        )
        for words in verdict.damage:
            print(f"  {one_line(words)}")
        for words in verdict.warnings:
            print(f"  warning: {one_line(words)}")
    lost = None if is_checkpoint(path) else _check_run(path)
    seconds = max(time.perf_counter() - began, 1e-9)
    how = "sizes of" if flags.size_only else "all bytes of"
    speed = "" if flags.size_only else f" ({total / 1e6 / seconds:,.0f} MB/s)"
    print(f"checked  {how} {size_text(total)} in {seconds:.1f} s{speed}: {bad} of {len(folders)} damaged")
    return int(bad > 0 or lost is not None)


def check(folder: Path, *, size_only: bool = False) -> CheckResult:
    """Check one checkpoint, by all bytes or by the sizes of its files alone."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return CheckResult(0, 0, (str(error),))
    damage: list[str] = []
    files, parts = dict(manifest.files), {}
    for number in range(manifest.parts):
        parts[name := part_name(number, manifest.parts)] = 0
        try:
            files |= read_part(folder, manifest, number).files
            parts[name] = (folder / name).stat().st_size
        except DamagedCheckpointError as error:
            damage.append(str(error))
            if len(damage) == _MOST_PARTS:
                damage.append(f"no further parts than {name} were looked at")
                break
    stored = stored_sizes(folder) if size_only else None  # by which nothing large need be fetched
    for name, entry in files.items():
        if stored is None:
            damage += _damage(folder / name, entry.record, size_only)
        elif (size := stored.get(name)) != entry.size:
            has = "is not in the store" if size is None else f"has {size} bytes instead of {entry.size}"
            damage.append(f"`{folder / name}` must be as it was written, but {has}; use another checkpoint")
    if not damage:
        damage += _misfits(folder, files if stored is None else ())
    unknown = sorted(set(os.listdir(folder)) - {MANIFEST, *files, *parts})
    warnings = [f"{name} is not part of the checkpoint" for name in unknown]
    if not damage:
        saved_into = CheckpointReader(folder, verify=Verify.SIZE).saved_into
        warnings += filter(None, [saved_elsewhere(folder, saved_into)])
    size = sum(entry.size for entry in files.values()) + sum(parts.values())
    return CheckResult(size, len(files) + len(parts), tuple(damage), tuple(warnings))


def _damage(path: Path, record: FileRecord, size_only: bool) -> Iterator[str]:
    """Yield a sentence for each run of neighboring blocks that differ from the record."""
    try:
        file = BlockFile(path, record)
    except DamagedCheckpointError as error:
        yield str(error)
        return
    try:
        bad = [] if size_only else list(_bad_blocks(file))
    finally:
        file.close()
    runs: list[tuple[int, int]] = []
    for block in bad:
        if runs and block == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], block
        else:
            runs.append((block, block))
    for first, last in runs:
        words = f"block {first} is" if first == last else f"blocks {first} to {last} are"
        stop = min((last + 1) * BLOCK, file.size)
        yield f"{path.name}: {words} not as written (bytes {first * BLOCK:,} to {stop:,})"


def _bad_blocks(file: BlockFile) -> Iterator[int]:
    buffer = memoryview(bytearray(min(_READ_BYTES, file.size)))
    for start in range(0, file.size, _READ_BYTES):
        if _reads(file, buffer[: file.size - start], start):
            continue
        for begin in range(start, min(start + _READ_BYTES, file.size), BLOCK):
            if not _reads(file, buffer[: min(BLOCK, file.size - begin)], begin):
                yield begin // BLOCK


def _reads(file: BlockFile, memory: memoryview, start: int) -> bool:
    try:
        file.read_into(memory, start)
    except DamagedCheckpointError:
        return False
    return True


def _misfits(folder: Path, files: Iterable[str]) -> Iterator[str]:
    """Yield a sentence if the index and the files do not fit together, although each is as it was written."""
    try:
        reader = CheckpointReader(folder, verify=Verify.SIZE)
        reader.directory.whole()  # raises if pieces overlap or are missing
        for name in files:
            if name.endswith(".safetensors"):
                reader.open(name).close()
    except CheckpointError as error:
        yield str(error)


def _check_run(directory: Path) -> str | None:
    """Report leftovers in a run's folder; returns what is wrong with the file that names the latest."""
    lost = latest_or_trouble(directory)[1]
    if lost is not None:
        print(f"damaged  {one_line(lost)}")
    for leftover in leftovers(directory):
        print(f"warning  {one_line(leftover.path)} is of a save under way, or of one that was killed")
    return lost
