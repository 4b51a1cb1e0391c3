"""Stacks as text, without the frames of this package."""

from __future__ import annotations

import traceback
from itertools import takewhile
from types import FrameType, TracebackType

from megazero.mpu.watch.log import HERE, spell_place


def spell_trace(trace: TracebackType | None) -> tuple[str, ...]:
    """The frames that an error passed through, outermost first, without those of this package."""
    frames = () if trace is None else traceback.walk_tb(trace)
    return tuple(_spell_frame(frame, line) for frame, line in frames if not _is_ours(frame))


def spell_stack(frame: FrameType | None) -> tuple[str, ...]:
    """The frames from the outermost to the one that called into this package, or else to `frame`."""
    frames = reversed(list(traceback.walk_stack(frame)))
    outer = takewhile(lambda frame_line: not _is_ours(frame_line[0]), frames)
    return tuple(_spell_frame(frame, line) for frame, line in outer)


def _spell_frame(frame: FrameType, line: int) -> str:
    return f"{spell_place(frame.f_code.co_filename, line)} in {frame.f_code.co_name}"


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(HERE)
