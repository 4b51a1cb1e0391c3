"""Record memory over one step by kind, from the outputs of operators or from CUDA's allocator."""

from __future__ import annotations

import gzip
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from megazero.account.memory import PeakOfOutputs
from megazero.account.profiler import ProfiledRun, Profiler
from megazero.account.profilers.files import Folder
from megazero.account.profilers.memory_picture import timeline_figure
from megazero.account.profilers.timeline import MemoryHistory
from megazero.mpu.context import ParallelContext
from megazero.mpu.grid import layout_words
from megazero.pictures.style import LIGHT, styled
from megazero.pipeline.actions import Action

_PACKAGE = f"{Path(__file__).parents[2]}{os.sep}"
_BUFFER_PACKAGES = ("zero", "optim")  # they gather, reduce and update
_UPDATE = "update"
_HISTORY = 1_000_000  # entries of CUDA's allocator to record, as in torchtitan


class OutputTimeline(PeakOfOutputs):
    """Adds a point to a timeline whenever an operator makes a storage, or one is freed.

    Args:
        timeline: gets the points.
        rest: the bytes of the store by kind, which stay over the step.
        gathered: returns the bytes of gathered weights, which no operator makes.
    """

    def __init__(self, timeline: MemoryHistory, rest: Mapping[str, int], gathered: Callable[[], int]):
        super().__init__()
        self.timeline = timeline
        self.rest = rest
        self.gathered = gathered
        self.ends = False
        self._began = time.perf_counter()
        self._made: Counter[str] = Counter()

    def made(self, size: int) -> str:
        kind = kind_of_frame(sys._getframe(1))
        self._made[kind] += size
        self._note()
        return kind

    def freed(self, size: int, made: object) -> None:
        self._made[str(made)] -= size
        if not self.ends:
            self._note()

    def _note(self) -> None:
        alive = Counter(self.rest)
        alive.update(self._made)
        alive["buffers"] += self.gathered()
        self.timeline.add(time.perf_counter() - self._began, alive)


def kind_of_frame(frame: FrameType | None) -> str:
    """The kind of memory that a frame allocates, by its innermost file of megazero outside `account`."""
    while frame is not None:
        package = _package_of(frame.f_code.co_filename)
        if package is not None:
            return "buffers" if package in _BUFFER_PACKAGES else "activations"
        frame = frame.f_back
    return "activations"


def _package_of(file: str) -> str | None:
    """The subpackage of megazero that a file is in; None for files outside, and for `account`."""
    inside = file.removeprefix(_PACKAGE)
    package = inside.partition(os.sep)[0]
    return None if inside == file or package == "account" else package


def timeline_of_history(
    entries: Sequence[Mapping[str, Any]], rest: Mapping[str, int], allocated: int
) -> MemoryHistory:
    """Make the timeline of a step from the history of CUDA's allocator.

    Memory that existed before the step and is not the store's, such as a library's workspace, is of the kind
    "other".

    Args:
        entries: the allocator's ``device_traces`` of this device since the step began.
        rest: the bytes of the store by kind.
        allocated: the bytes allocated when the step began.
    """
    timeline, alive = MemoryHistory(), Counter(rest)
    alive["other"] = allocated - sum(rest.values())
    sizes: dict[int, tuple[str, int]] = {}
    began = entries[0]["time_us"] if entries else 0
    timeline.add(0.0, alive)
    for entry in entries:
        if entry["action"] == "alloc":
            packages = (_package_of(str(frame["filename"])) for frame in entry.get("frames", ()))
            innermost = next((package for package in packages if package is not None), None)
            kind = "buffers" if innermost in _BUFFER_PACKAGES else "activations"
            sizes[entry["addr"]] = kind, entry["size"]
            alive[kind] += entry["size"]
        elif entry["action"] == "free_completed":
            kind, size = sizes.pop(entry["addr"], ("other", entry["size"]))
            alive[kind] -= size
        else:
            continue
        timeline.add((entry["time_us"] - began) / 1e6, alive)
    return timeline


class MemoryTimeline(Profiler):
    """Records the memory of one step, and writes it as a picture and as counters of a Chrome trace.

    Args:
        step: the iteration.
        folder: the folder for the files of the chosen ranks.
        context: the ranks.

    Raises:
        ConfigError: matplotlib is not installed.
    """

    def __init__(self, step: int, folder: Folder, context: ParallelContext):
        if folder.writes:
            with styled():
                pass  # raises now, and not during the training, if matplotlib is missing
        self.step = step
        self.folder = folder
        self.context = context
        self._timeline: MemoryHistory | None = None
        self._began = 0.0
        self._say: Callable[[str], None] = print

    def begin(self, run: ProfiledRun) -> None:
        self._say, self._store = run.say, run.store

    @contextmanager
    def over_step(self, iteration: int) -> Iterator[None]:
        if iteration != self.step or not self.folder.writes:
            yield
            return
        self._timeline = timeline = MemoryHistory()
        self._began = time.perf_counter()
        rest, persistent = self._store.sizes().get("device", {}), self._gathered()
        if self.context.device.type == "cuda":
            with self._allocator(timeline, rest):
                yield
        else:
            with OutputTimeline(timeline, rest, lambda: self._gathered() - persistent) as outputs:
                yield
            outputs.ends = True
        self._timeline = None
        self._write(timeline)

    def acted(self, action: Action, seconds: float) -> None:
        if self._timeline is not None and action.op.computes:
            now = time.perf_counter() - self._began
            words = f"{action.op.name.lower()} of micro-batch {action.microbatch}"
            chunk = f", chunk {action.chunk}" if action.chunk else ""
            self._timeline.actions.append((now - seconds, now, words + chunk))

    def phase_ends(self, name: str) -> None:
        if self._timeline is not None and name == "optimizer":
            actions, now = self._timeline.actions, time.perf_counter() - self._began
            last = (
                (now, now, "") if not actions else actions.pop() if actions[-1][2] == _UPDATE else actions[-1]
            )
            actions.append((last[0] if last[2] == _UPDATE else last[1], now, _UPDATE))

    def _gathered(self) -> int:
        sharded = (bucket for bucket in self._store.buckets if bucket.layout.row.shard_params)
        return sum(bucket.full.untyped_storage().nbytes() for bucket in sharded)

    @contextmanager
    def _allocator(self, timeline: MemoryHistory, rest: Mapping[str, int]) -> Iterator[None]:
        device = self.context.device
        torch.cuda.synchronize(device)
        allocated = torch.cuda.memory_allocated(device)
        torch.cuda.memory._record_memory_history("all", stacks="python", max_entries=_HISTORY)
        try:
            yield
            torch.cuda.synchronize(device)
            traces = torch.cuda.memory._snapshot(device)["device_traces"]
        finally:
            torch.cuda.memory._record_memory_history(None)
        recorded = timeline_of_history(traces[torch.cuda.current_device()], rest, allocated)
        timeline.times, timeline.alive = recorded.times, recorded.alive

    def _write(self, timeline: MemoryHistory) -> None:
        if not timeline.times:
            return
        rank, name = self.context.rank, f"memory_step{self.step}_rank{self.context.rank}"
        events = json.dumps({"traceEvents": timeline.events(rank)}).encode()
        self.folder.write(f"{name}.json.gz", gzip.compress(events))
        path = self.folder.make(f"{name}.svg", lambda path: self._draw(timeline, path))
        at = timeline.peak()
        alive = timeline.alive[at]
        parts = ", ".join(f"{kind} {alive[kind] / 2**20:.1f}" for kind in timeline.kinds if alive[kind])
        when = timeline.times[at]
        self._say(
            f"memory: at most {sum(alive.values()) / 2**20:.1f} MiB in iteration {self.step}, "
            f"{1e3 * when:.1f} ms after its beginning, in {timeline.doing(when)}: {parts} MiB"
            + ("" if path is None else f"; wrote {path}")
        )

    def _draw(self, timeline: MemoryHistory, path: Path) -> None:
        device, room = self.context.device, None
        where = f"{self.context.grid.world_size:,} ranks: {layout_words(self.context.grid)}; on {device.type}"
        if device.type == "cuda":
            room = torch.cuda.get_device_properties(device).total_memory
            where += f", {torch.cuda.get_device_name(device)}"
        title = f"Memory of rank {self.context.rank} in iteration {self.step}"
        with styled():
            figure = timeline_figure(timeline, title, where, LIGHT, room)
            figure.savefig(path, format="svg", metadata={"Date": None})


class AllocatorHistory(Profiler):
    """Records the history of CUDA's allocator, and writes it at intervals and if memory runs out.

    https://pytorch.org/memory_viz shows such a file.

    Args:
        path: the file's path; the rank is added to its name.
        interval: iterations from one write to the next.
        context: the ranks.
    """

    def __init__(self, path: str, interval: int, context: ParallelContext):
        self.path = Path(path)
        self.interval = interval
        self.context = context

    @contextmanager
    def over_step(self, iteration: int) -> Iterator[None]:
        torch.cuda.memory._record_memory_history("all", stacks="python", max_entries=_HISTORY)
        try:
            yield
        except torch.OutOfMemoryError:
            self._write()
            raise
        if iteration % self.interval == 0:
            self._write()

    def _write(self) -> None:
        name = f"{self.path.stem}_{self.context.rank}{self.path.suffix}"
        folder = Folder(self.path.parent, writes=True)
        folder.make(name, lambda path: torch.cuda.memory._dump_snapshot(str(path)))
