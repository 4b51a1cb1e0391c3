"""Record traces by torch's profiler: a Chrome trace per step and rank, in which calls of groups are named."""

from __future__ import annotations

import errno
import gzip
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megazero.account.profiler import ProfiledRun, Profiler
from megazero.account.profilers.calls import CollectiveCall
from megazero.account.profilers.files import Folder
from megazero.account.profilers.group import Listener
from megazero.config.tree.profiling import ProfilingConfig


class TraceWindow(Profiler, Listener):
    """Traces the steps of a window, until the files reach their largest size.

    Calls are ranges named by `label`, by which `merge_traces` aligns the ranks' clocks.

    Args:
        settings: the window, the largest size, and what traces record.
        folder: the folder for the traces of the chosen ranks.
        rank: this rank.
        device: the device to trace besides the host.
    """

    def __init__(self, settings: ProfilingConfig, folder: Folder, rank: int, device: torch.device):
        self.settings = settings
        self.folder = folder
        self.rank = rank
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._tracing = False
        self._full = False
        self._say: Callable[[str], None] = print

    def begin(self, run: ProfiledRun) -> None:
        self._say = run.say

    def enters(self, call: CollectiveCall, *, waits: bool) -> object:
        if not self._tracing:
            return None
        named = record_function(f"wait for {label(call)}" if waits or call.later else label(call))
        named.__enter__()
        return named

    def leaves(self, call: CollectiveCall, entered: Any, *, waits: bool) -> None:
        if entered is not None:
            entered.__exit__(None, None, None)

    @contextmanager
    def over_step(self, iteration: int) -> Iterator[None]:
        first, last = self.settings.profile_step_start + 1, self.settings.profile_step_end
        if not first <= iteration <= last or not self.folder.writes or self.folder.fails or self._full:
            yield
            return
        if iteration == first:
            with self._profile():  # the profiler's start-up takes time, and belongs to no step
                pass
        with self._profile() as profiler:
            self._tracing = True
            try:
                yield
            finally:
                self._tracing = False
        name = f"step{iteration}/rank{self.rank}.json.gz"
        path = self.folder.make(name, lambda path: write_trace(profiler, path))
        if path is not None:
            self._say(f"profile: wrote {path}, {path.stat().st_size / 1e6:.1f} MB")
        self._full = self.folder.written >= 1e6 * self.settings.profile_max_mb
        if self._full and iteration < last:
            self._say(
                f"profile: the steps after {iteration} are not traced: {self.folder.written / 1e6:.1f} MB of "
                f"files reach --profile-max-mb {self.settings.profile_max_mb}"
            )

    def _profile(self) -> profile:
        return profile(
            activities=self._activities,
            record_shapes=self.settings.pytorch_profiler_collect_shapes,
            with_stack=self.settings.pytorch_profiler_collect_callstack,
        )


def label(call: CollectiveCall) -> str:
    """The name of a call's range: the same on all members, and different from all other calls."""
    return f"{call.group}@{call.ranks[0]} {call.operation} #{call.number}"


def write_trace(profiler: profile, path: Path) -> None:
    """Write a compressed trace.

    Raises:
        OSError: the disk is full.
    """
    plain = path.with_name(path.name + ".plain")
    try:
        profiler.export_chrome_trace(str(plain))
        with plain.open("rb") as file:
            file.seek(-min(64, plain.stat().st_size), os.SEEK_END)
            if not file.read().rstrip().endswith(b"}"):  # torch does not report an incomplete write
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(plain))
            file.seek(0)
            with gzip.open(path, "wb", compresslevel=5) as packed:
                shutil.copyfileobj(file, packed)
    finally:
        plain.unlink(missing_ok=True)
