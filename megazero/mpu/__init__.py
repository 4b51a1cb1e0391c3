"""mpu: where each rank sits, how it talks to the others, and where each parameter lives.

Start with `grid.py` (coordinates), `group.py` (the communicator protocol), `context.py` (both together)
and `param_spec.py`. Only this package names torch.distributed.
"""

from megazero.mpu.agreement import agree
from megazero.mpu.context import (
    ParallelContext,
    make_context,
    solo_context,
    thread_context,
)
from megazero.mpu.grid import AXES, COMMUNICATORS, SLICE_AXES, Axis, Place, ProcessGrid, slice_axes
from megazero.mpu.group import DONE, Group, Reduction, Transfer, Work
from megazero.mpu.host import on_device, read_values
from megazero.mpu.host_waits import HostWaits, host_waits
from megazero.mpu.launch import Launch, choose_device, grid_of, join, leave, open_context, reporting
from megazero.mpu.matrices import Matrices
from megazero.mpu.messages import gather_values, name_ranks
from megazero.mpu.param_spec import Cut, InitialValues, ParamSpec, copy_axes, matrix_spec, spec_of
from megazero.mpu.rng import derive_key, sample_keys, site_key
from megazero.mpu.shared_group import SharedGroup
from megazero.mpu.shared_open import open_shared
from megazero.mpu.solo_group import SoloGroup
from megazero.mpu.still_group import StillGroup
from megazero.mpu.thread_group import ThreadGroup, ThreadWorld
from megazero.mpu.traffic import CountingGroup, TrafficLog, count_traffic, recording_context
from megazero.mpu.transports import backends, transports
from megazero.mpu.waits import Waited, Waits
from megazero.mpu.watch import JobFailure
from megazero.mpu.wrapping_group import GroupCall, WrappingGroup

__all__ = [
    "AXES",
    "COMMUNICATORS",
    "DONE",
    "SLICE_AXES",
    "Axis",
    "CountingGroup",
    "Cut",
    "Group",
    "GroupCall",
    "HostWaits",
    "InitialValues",
    "JobFailure",
    "Launch",
    "Matrices",
    "ParallelContext",
    "ParamSpec",
    "Place",
    "ProcessGrid",
    "Reduction",
    "SharedGroup",
    "SoloGroup",
    "StillGroup",
    "ThreadGroup",
    "ThreadWorld",
    "TrafficLog",
    "Transfer",
    "Waited",
    "Waits",
    "Work",
    "WrappingGroup",
    "agree",
    "backends",
    "choose_device",
    "copy_axes",
    "count_traffic",
    "derive_key",
    "gather_values",
    "grid_of",
    "host_waits",
    "join",
    "leave",
    "make_context",
    "matrix_spec",
    "name_ranks",
    "on_device",
    "open_context",
    "open_shared",
    "read_values",
    "recording_context",
    "reporting",
    "sample_keys",
    "site_key",
    "slice_axes",
    "solo_context",
    "spec_of",
    "thread_context",
    "transports",
]
