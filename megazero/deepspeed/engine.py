"""The engine that `megazero.initialize` returns: a module whose backward and step are ours.

Members have DeepSpeed's names and do what they do there. `backward.py` has losses and gradients,
`stepping.py` updates, `keeping.py` checkpoints, `answers.py` the queries of a script.
"""

from __future__ import annotations

from typing import Any

from megazero.deepspeed.config.shown import value_at
from megazero.deepspeed.keeping import KeepingEngine
from megazero.deepspeed.parallel import UserParallel
from megazero.deepspeed.tenancy import Tenancy
from megazero.deepspeed.weights import empty_state_dict
from megazero.deepspeed.zero.states import ZeroCalls


class DeepSpeedEngine(ZeroCalls, KeepingEngine):
    """Wraps a module of any kind: ``loss = engine(batch); engine.backward(loss); engine.step()``.

    Arguments, attributes and the training step are those of `SteppingEngine`, checkpoints those of
    `KeepingEngine`, and what is sharded moves as `ZeroCalls` says. This class adds the engine's end.
    """

    pipeline_parallelism = False

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        empty_state_dict(self.module)

    @property
    def _parallel(self) -> UserParallel:
        return self.states.parallel

    def stay(self, tenancy: Tenancy) -> None:
        """Note what the engine has put on the module, for `destroy` to take off."""
        self._tenancy = tenancy
        tenancy.serve(self._script)

    def autotp_size(self) -> int:
        """The ranks that `tp_model_init` or the JSON slices the model's layers over; 0 if neither does."""
        recorded = self.module.__dict__.get("tensor_parallel_request")
        given = value_at(self.config, "tensor_parallel.autotp_size", 0)
        return int(given if recorded is None else recorded.size)

    def destroy(self) -> None:
        """Let go of the module; every rank calls this. It can no longer be trained by this engine.

        At stage 3 its weights stay sharded, as within `zero.Init`. Monitors and process groups stay open.
        """
        self._tenancy.end(whole=False)
