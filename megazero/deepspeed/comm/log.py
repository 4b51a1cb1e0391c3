"""Count and time the calls of `deepspeed.comm`, by operation and size of the message."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, TypeVar

import torch.distributed as dist

from megazero.account.profilers.calls import bus_factor
from megazero.deepspeed.accelerator.choose import get_accelerator
from megazero.deepspeed.reports.logging import log_dist
from megazero.deepspeed.reports.timer import trim_mean
from megazero.errors import ConfigError
from megazero.mpu.torch_group import joined_world

_GATHERING = ("all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor")
_REDUCING = ("all_reduce", "all_reduce_coalesced", "inference_all_reduce")
_EXCHANGING = ("all_to_all", "all_to_all_single")
_MESSAGES = ("tensor", "tensors", "input_list", "input_tensor_list", "p2p_op_list")
_SUMMED = MappingProxyType(
    {
        **{"total_latency_ms": "Total Latency(ms)", "avg_latency_ms": "Avg Latency(ms)"},
        **{"tput_avg_gbps": "tput_avg (Gbps)", "busbw_avg_gbps": "busbw_avg (Gbps)"},
    }
)
_WAITED = MappingProxyType(
    {"total_comm_lat_ms": "Total comm lat(ms)", "total_straggler_ms": "Total straggler(ms)"}
)


Figures = dict[str, float | str]
"""Times, bandwidths and counts, by name."""
R = TypeVar("R")


def calc_bw_log(comm_op: str, size: int, duration: float, members: int | None = None) -> tuple[float, float]:
    """The algorithm and the bus bandwidth (Gbit/s) of a call of `size` bytes in `duration` ms.

    Their definition is that of NCCL's tests. `members` is the size of the group; by default, of the world.
    """
    ranks = members or (joined_world() or (0, 1))[1]
    factor, bus = {
        **dict.fromkeys(_EXCHANGING, (1.0, bus_factor("all_to_all", ranks))),
        **dict.fromkeys(_GATHERING, (float(ranks), ranks * bus_factor("all_gather", ranks))),
        **dict.fromkeys(_REDUCING, (2.0, bus_factor("all_reduce", ranks))),
    }.get(comm_op, (1.0, 1.0))
    rate = size * 8 / 1e6 / max(duration, 1e-6)
    return rate * factor, rate * bus


def convert_size(size_bytes: int) -> str:
    """A size as text, such as ``1.5 KB``."""
    if size_bytes == 0:
        return "0B"
    power = min((size_bytes.bit_length() - 1) // 10, 8)
    unit = ("B", "KB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB")[power]
    return f"{round(size_bytes / 1024**power, 2)} {unit}"


class CommsLogger:
    """The number and the times of calls, by operation and size of the message.

    Attributes:
        enabled: whether calls are timed.
        prof_all: whether all calls are timed; otherwise only operations in `prof_ops`, and calls with `prof`.
        verbose: whether each call is logged when it ends.
        debug: whether an operation's name in the log includes the calling function.
        comms_dict: operation -> size -> the number of calls, their times in ms, and both bandwidths.
    """

    def __init__(self) -> None:
        self.enabled, self.prof_all = False, True
        self.verbose = self.debug = False
        self.prof_ops: list[str] = []
        self.comms_dict: dict[str, dict[int, list[Any]]] = {}

    def configure(self, section: Mapping[str, Any]) -> None:
        """Apply the section ``comms_logger`` of a DeepSpeed JSON."""
        self.enabled = bool(section.get("enabled", False))
        if self.enabled:
            self.verbose, self.debug = bool(section.get("verbose")), bool(section.get("debug"))
            self.prof_ops, self.prof_all = list(section.get("prof_ops", ())), section.get("prof_all", True)

    def start_profiling_comms(self) -> None:
        """Time all calls."""
        self.prof_all = True

    def stop_profiling_comms(self) -> None:
        """Time only the operations in `prof_ops`."""
        self.prof_all = False

    def start_profiling_op(self, op_name_list: Iterable[str]) -> None:
        """Add operations to `prof_ops`."""
        self.prof_ops = sorted({*self.prof_ops, *op_name_list})

    def stop_profiling_op(self, op_name_list: Iterable[str]) -> None:
        """Remove operations from `prof_ops`."""
        self.prof_ops = sorted(set(self.prof_ops).difference(op_name_list))

    def append(
        self, raw_name: str, record_name: str, latency: float, msg_size: int, members: int | None = None
    ) -> None:
        """Record a call of `latency` ms and `msg_size` bytes; `members`: see `calc_bw_log`."""
        rates = calc_bw_log(raw_name, msg_size, latency, members)
        entry = self.comms_dict.setdefault(record_name, {}).setdefault(msg_size, [0, [], [], []])
        entry[0] += 1
        for values, value in zip(entry[1:], (latency, *rates), strict=True):
            values.append(value)
        if self.verbose:
            log_dist(
                f"comm op: {record_name} | time (ms): {latency:.2f} | msg size: {convert_size(msg_size)} | "
                f"algbw (Gbps): {rates[0]:.2f} | busbw (Gbps): {rates[1]:.2f}",
                [0],
            )

    def has_data(self) -> bool:
        """Whether a call has been recorded."""
        return bool(self.comms_dict)

    def reset_data(self) -> None:
        """Forget all calls."""
        self.comms_dict.clear()

    def get_raw_data(self) -> dict[str, dict[int, list[Any]]]:
        """A copy of `comms_dict`."""
        return copy.deepcopy(self.comms_dict)

    def get_operation_names(self) -> list[str]:
        """The operations that have been recorded."""
        return list(self.comms_dict)

    def get_total_operations(self) -> int:
        """The number of recorded calls."""
        return sum(entry[0] for sizes in self.comms_dict.values() for entry in sizes.values())

    def get_operation_summary(self, operation_name: str) -> dict[int, Figures] | None:
        """Size -> count, times and bandwidths of an operation's calls; None if there was no call."""
        sizes = self.comms_dict.get(operation_name)
        return None if sizes is None else {size: _summary(size, sizes[size]) for size in sorted(sizes)}


def _summary(size: int, entry: Sequence[Any]) -> Figures:
    count, times, rates, bus_rates = entry
    return {
        "count": count,
        "total_latency_ms": sum(times),
        "avg_latency_ms": trim_mean(times, 0.1),
        "tput_avg_gbps": trim_mean(rates, 0.1),
        "busbw_avg_gbps": trim_mean(bus_rates, 0.1),
        "msg_size_bytes": size,
        "msg_size_str": convert_size(size),
    }


LOG = CommsLogger()
"""The log of this process; collectives are functions, so it is a module's variable."""


def report(least: Callable[[list[float]], list[float]] | None, show: bool) -> dict[str, object]:
    """Return the figures of all calls, and print them as a table if `show`.

    Args:
        least: reduces each call's time to the minimum over ranks; None leaves out waiting times.
        show: whether to print.
    """
    rank, size = joined_world() or (0, 1)
    summary = {name: LOG.get_operation_summary(name) or {} for name in LOG.get_operation_names()}
    waits = None
    rows = _rows(summary, _SUMMED)
    if least is not None:
        waits = {
            name: {size: _waits(size, LOG.comms_dict[name][size], least) for size in sizes}
            for name, sizes in summary.items()
        }
        rows += _rows(waits, _WAITED)
    if show:
        print("\n".join("".join(f"{cell:<20}" for cell in row).rstrip() for row in rows), flush=True)
    metadata = {"world_size": size, "rank": rank, "timestamp": datetime.now().isoformat()}
    return {"summary": summary, "straggler_analysis": waits, "metadata": metadata}


def _rows(table: Mapping[str, Mapping[int, Figures]], columns: Mapping[str, str]) -> list[Sequence[str]]:
    """The cells of a table: the heading, and for each operation its name and a row per size.

    Args:
        table: operation -> size -> figures by key.
        columns: key -> heading, of the figures to show.
    """
    rows: list[Sequence[str]] = [("Comm. Op", "Message Size", "Count", *columns.values())]
    for name, sizes in table.items():
        rows.append((name,))
        for entry in sizes.values():
            first = (str(entry[key]) for key in ("msg_size_str", "count"))
            rows.append(("", *first, *(f"{entry[key]:.2f}" for key in columns)))
    return rows


def _waits(size: int, entry: Sequence[Any], least: Callable[[list[float]], list[float]]) -> Figures:
    """The times of the fastest rank's calls, and this rank's waiting times beyond them."""
    fastest = least(entry[1])
    waiting = [own - other for own, other in zip(entry[1], fastest, strict=True)]
    return {
        "count": entry[0],
        "total_comm_lat_ms": sum(fastest),
        "total_straggler_ms": sum(waiting),
        "avg_comm_lat_ms": trim_mean(fastest, 0.1),
        "avg_straggler_ms": trim_mean(waiting, 0.1),
        "msg_size_bytes": size,
        "msg_size_str": convert_size(size),
    }


def logged(run: Callable[..., R]) -> Callable[..., R]:
    """Decorate a collective with DeepSpeed's last three arguments, and time calls for the log.

    ``prof`` times this call even if its operation is not in `prof_ops`, ``log_name`` is its name in the log,
    and ``debug`` has no effect, because the log finds the caller itself.
    """
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    name = "all_reduce" if run.__name__ in _REDUCING else run.__name__
    defaults = {"prof": False, "log_name": name, "debug": None}
    own = inspect.signature(run)
    more = [inspect.Parameter(name, kind, default=value) for name, value in defaults.items()]
    signature = own.replace(parameters=[*own.parameters.values(), *more])

    @functools.wraps(run)
    def call(*args: object, **kwargs: object) -> R:
        if joined_world() is None:
            raise ConfigError(
                f"`{run.__name__}` must be called after the world of ranks has been joined, but it has not; "
                "call `init_distributed` or `initialize` first"
            )
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = bound.arguments
        prof, name, _ = (values.pop(argument) for argument in defaults)
        if not LOG.enabled or not (prof or LOG.prof_all or name in LOG.prof_ops):
            return run(**values)
        if LOG.debug:
            name += f" | [Caller Func: {sys._getframe(1).f_code.co_name}]"
        size = _size(values)
        start = time.perf_counter()
        result = run(**values)
        get_accelerator().synchronize()
        latency, group = 1000 * (time.perf_counter() - start), values.get("group")
        LOG.append(run.__name__, name, latency, size, None if group is None else dist.get_world_size(group))
        return result

    call.__signature__ = signature  # type: ignore[attr-defined]  # inspect reads it
    return call


def _size(values: Mapping[str, object]) -> int:
    """The bytes of a call's message; 0 if it has none."""
    message: object = next((values[name] for name in _MESSAGES if name in values), [])
    parts: list[Any] = list(message) if isinstance(message, (list, tuple)) else [message]
    return sum(getattr(part, "tensor", part).nbytes for part in parts)
