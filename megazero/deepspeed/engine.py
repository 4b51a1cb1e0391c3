"""The engine that `megazero.initialize` returns: a module whose backward and step are ours.

Members have DeepSpeed's names and do what they do there. `stepping.py` holds the training step, `keeping.py`
checkpoints, `answers.py` the queries of a script.
"""

from __future__ import annotations

from typing import Any

from megazero.deepspeed.keeping import KeepingEngine
from megazero.deepspeed.weights import guard_state_dict
from megazero.mpu.launch import leave


class DeepSpeedEngine(KeepingEngine):
    """Wraps a module of any kind: ``loss = engine(batch); engine.backward(loss); engine.step()``.

    Arguments, attributes and the training step are those of `SteppingEngine`, checkpoints those of
    `KeepingEngine`. This class adds the end of the job.
    """

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        guard_state_dict(self.module)

    def destroy(self) -> None:
        """End the job cleanly: close monitors, wait for the other ranks and leave the world."""
        self._reporter.close()
        leave(self.context)
