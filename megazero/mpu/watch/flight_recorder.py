"""The flight recorder that torch keeps of NCCL's calls on the device: writing it down when a job fails.

torch writes it when its own watchdog ends a process, but the watch has ended it before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

_SWITCHES = ("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT")  # on by default
_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # calls; 2000 by default
_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def write_flight_record(rank: int, environment: Mapping[str, str] | None = None) -> str:
    """Write this process's record where torch would, and say where those of all ranks are.

    Args:
        rank: its world rank, which ends the file's name.
        environment: torch's variables; default: the process's.

    Returns:
        A sentence, the same on all ranks; without a record, how to have one. If it cannot be written, this
        process says so itself.
    """
    environment = os.environ if environment is None else environment
    c10d = getattr(torch._C, "_distributed_c10d", None)
    dump = getattr(c10d, "_dump_nccl_trace", None)
    size, switch = _first(_SIZES, environment) or "2000", _first(_SWITCHES, environment) or "1"
    if dump is None or size == "0" or switch[0] in "0nNfF":
        return (
            "NCCL's flight recorder is off: set TORCH_NCCL_DUMP_ON_TIMEOUT=1 and TORCH_FR_BUFFER_SIZE=2000 "
            "to see each rank's calls as its device saw them"
        )
    cache = environment.get("XDG_CACHE_HOME") or f"{environment.get('HOME', '/tmp')}/.cache"
    prefix = _first(_FILES, environment) or f"{cache}/torch/comm_lib_trace_rank_"
    path = Path(f"{prefix}{rank}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(dump())
    except (OSError, RuntimeError) as error:
        sys.stderr.write(f"NCCL's flight recorder of rank {rank} could not be written to {path}: {error}\n")
    return (
        f"NCCL's flight recorder of each rank, on its host: {prefix}RANK (`torchfrtrace {path.parent} "
        f"--prefix {path.name.removesuffix(str(rank))}` compares them)"
    )


def _first(names: tuple[str, ...], environment: Mapping[str, str]) -> str | None:
    """The value of the first of those variables that is set."""
    return next((environment[name] for name in names if environment.get(name)), None)
