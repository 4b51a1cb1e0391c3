"""mpu: where each rank sits, how it talks to the others, and where each parameter lives.

Start with `grid.py` (coordinates), `group.py` (the communicator protocol), `context.py` (both together)
and `param_spec.py`. Only this package names torch.distributed.
"""

from megazero.mpu.host_waits import host_waits
from megazero.mpu.transports import transports

__all__ = ["host_waits", "transports"]
