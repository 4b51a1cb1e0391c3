"""Rows of the DeepSpeed table: state that is offloaded to the host's memory and to disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megazero.config.deepspeed.row import (
    BOOL,
    COUNT,
    NOTHING,
    NUMBER,
    SECTION,
    SIZE,
    TEXT,
    KeyRow,
    Values,
    ValueShape,
    ignores,
    only,
    refuses,
    sets,
)

_OPTIMIZER = "zero_optimization.offload_optimizer."
_PARAM = "zero_optimization.offload_param."


_PLACES = ("none", "cpu", "nvme")

PLACE = ValueShape(
    '"none", "cpu" or "nvme"',
    lambda value: value if value in _PLACES else NOTHING,
)


def _switched(on: bool, values: Values) -> Any:
    return "cpu" if on else NOTHING


def _at_stage_3(place: Any, values: Values) -> Any:
    """Where parameters lie: below stage 3 they stay where they are used, as in DeepSpeed."""
    return place if values.get("zero_optimization.stage", 3) == 3 else NOTHING


def _unless_the_optimizer_says(name: str) -> Callable[[Any, Values], Any]:
    """Make a converter by which the parameters' value sets a shared setting unless the optimizer's does."""

    def convert(value: Any, values: Values) -> Any:
        return NOTHING if _OPTIMIZER + name in values else value

    return convert


def _as_the_optimizers(name: str) -> Callable[[Any, Values], list[str]]:
    def faults(value: Any, values: Values) -> list[str]:
        other = values.get(_OPTIMIZER + name, value)
        if other == value:
            return []
        return [f"`{_PARAM}{name}` must be `{_OPTIMIZER}{name}`, which is {other!r}, but is {value!r}"]

    return faults


OFFLOAD_ROWS: tuple[KeyRow, ...] = (
    sets(f"{_OPTIMIZER}device", PLACE, "offload.optimizer"),
    sets(f"{_OPTIMIZER}nvme_path", TEXT, "offload.path"),
    sets(f"{_OPTIMIZER}ratio", NUMBER, "offload.fraction"),
    sets(f"{_OPTIMIZER}pin_memory", BOOL, "offload.pin_memory"),
    sets(f"{_PARAM}device", PLACE, "offload.parameters", convert=_at_stage_3),
    sets(
        f"{_PARAM}nvme_path",
        TEXT,
        "offload.path",
        convert=_unless_the_optimizer_says("nvme_path"),
        faults=_as_the_optimizers("nvme_path"),
    ),
    sets(
        f"{_PARAM}pin_memory",
        BOOL,
        "offload.pin_memory",
        convert=_unless_the_optimizer_says("pin_memory"),
        faults=_as_the_optimizers("pin_memory"),
    ),
    *ignores(
        "buffers are as large as a bucket's state, and there are as many as are in use at a time",
        SIZE,
        f"{_OPTIMIZER}buffer_count",
        f"{_PARAM}buffer_count",
        f"{_PARAM}buffer_size",
        f"{_PARAM}max_in_cpu",
    ),
    *ignores(
        "the next bucket is always read, and the last one written, while one is updated",
        BOOL,
        f"{_OPTIMIZER}pipeline_read",
        f"{_OPTIMIZER}pipeline_write",
        f"{_OPTIMIZER}pipeline",
    ),
    *ignores("state is made in its place", BOOL, f"{_OPTIMIZER}fast_init"),
    *ignores("OMP_NUM_THREADS says how many cores update", NUMBER, f"{_OPTIMIZER}cpuadam_cores_perc"),
    *refuses(
        "updates are never made before the norm is known; set it to false",
        BOOL,
        only(False),
        f"{_OPTIMIZER}super_offload",
    ),
    sets("zero_optimization.cpu_offload", BOOL, "offload.optimizer", convert=_switched),
    *(
        sets(
            f"zero_optimization.{name}",
            BOOL,
            "offload.parameters",
            convert=lambda on, values: _at_stage_3("cpu", values) if on else NOTHING,
        )
        for name in ("cpu_offload_param", "cpu_offload_params")
    ),
    sets("zero_optimization.cpu_offload_use_pin_memory", BOOL, "offload.pin_memory"),
    *refuses(
        "every gradient takes part in every update; leave it out, and use `offload_optimizer` alone",
        SECTION,
        None,
        "zero_optimization.zenflow",
    ),
    *ignores("the optimizer steps bucket by bucket", SIZE, "zero_optimization.sub_group_size"),
    *ignores("every optimizer updates where its state is", BOOL, "zero_force_ds_cpu_optimizer"),
    sets("aio.block_size", COUNT, "offload.block_size"),
    sets("aio.queue_depth", COUNT, "offload.queue_depth"),
    *ignores(
        "`queue_depth` requests are under way at a time, each in a thread",
        COUNT,
        "aio.thread_count",
        "aio.intra_op_parallelism",
    ),
    *ignores("requests are started one by one, and always overlap", BOOL, "aio.single_submit"),
    *ignores("requests are started one by one, and always overlap", BOOL, "aio.overlap_events"),
    *refuses(
        "state is updated on the host, so the device does not read the disk; set it to false",
        BOOL,
        only(False),
        "aio.use_gds",
    ),
)
