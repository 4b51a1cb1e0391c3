"""How far an engine has come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineCounters:
    """The counters of an engine; checkpoints store them. See `SteppingEngine` for the meaning."""

    global_steps: int
    global_samples: int
    micro_steps: int
    skipped_steps: int
