"""mpu: where each rank sits, how it talks to the others, and what each parameter says of itself.

Start with `grid.py` (coordinates), `group.py` (the communicator protocol), `context.py` (both, bundled)
and `param_spec.py`. Only this package names torch.distributed.
"""

from megazero.mpu.context import (
    ParallelContext,
    make_context,
    recording_context,
    solo_context,
    thread_context,
)
from megazero.mpu.counting_group import CountingGroup, count_traffic
from megazero.mpu.grid import AXES, COMMUNICATORS, Coordinate, ProcessGrid
from megazero.mpu.group import DONE, Group, Reduction, Transfer, Work
from megazero.mpu.launch import Launch, choose_device, join, leave, open_context, reporting
from megazero.mpu.messages import gather_values
from megazero.mpu.param_spec import Init, ParamSpec, new_parameter, spec_of
from megazero.mpu.recording_group import RecordingGroup, TrafficLog
from megazero.mpu.rng import SampleStreams, derive_key
from megazero.mpu.shared_group import SharedGroup
from megazero.mpu.shared_open import open_shared
from megazero.mpu.solo_group import SoloGroup
from megazero.mpu.thread_group import ThreadGroup, ThreadWorld

__all__ = [
    "AXES",
    "COMMUNICATORS",
    "DONE",
    "Coordinate",
    "CountingGroup",
    "Group",
    "Init",
    "Launch",
    "ParallelContext",
    "ParamSpec",
    "ProcessGrid",
    "RecordingGroup",
    "Reduction",
    "SampleStreams",
    "SharedGroup",
    "SoloGroup",
    "ThreadGroup",
    "ThreadWorld",
    "TrafficLog",
    "Transfer",
    "Work",
    "choose_device",
    "count_traffic",
    "derive_key",
    "gather_values",
    "join",
    "leave",
    "make_context",
    "new_parameter",
    "open_context",
    "open_shared",
    "recording_context",
    "reporting",
    "solo_context",
    "spec_of",
    "thread_context",
]
