"""`DeepSpeedEngine`: the engine that `megazero.initialize` returns.

Its members have DeepSpeed's names and meaning; the table above the class says which part defines each.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from megazero.deepspeed.config.shown import value_at
from megazero.deepspeed.engine.attachment import Attachment
from megazero.deepspeed.engine.batches import Batches
from megazero.deepspeed.engine.checkpoint_calls import CheckpointCalls
from megazero.deepspeed.engine.getters import ATTRIBUTES, GETTERS
from megazero.deepspeed.engine.gradients import Accumulation, ForwardBackward
from megazero.deepspeed.engine.queries import Queries, with_queries
from megazero.deepspeed.engine.report import Reporter
from megazero.deepspeed.engine.state import EngineState
from megazero.deepspeed.engine.updates import Updates
from megazero.deepspeed.engine.weights import empty_state_dict
from megazero.deepspeed.utils.parts import made_of
from megazero.deepspeed.zero.states import ZeroMemory


@with_queries
@made_of(
    {
        "_state": (
            EngineState,
            "states settings context lr_scheduler random_ltd_scheduler "
            "global_steps global_samples micro_steps skipped_steps progress resume",
        ),
        "_passes": (
            ForwardBackward,
            "forward backward scale losses set_custom_curriculum_learning_schedule random_ltd_initialize",
        ),
        "_accumulation": (
            Accumulation,
            "no_sync coalesce_grad_reduction allreduce_gradients is_gradient_accumulation_boundary "
            "set_gradient_accumulation_boundary zero_grad",
        ),
        "_updates": (
            Updates,
            "step was_step_applied get_batch_info compile is_compiled set_train_batch_size "
            "set_train_micro_batch_size",
        ),
        "_batches": (Batches, "train_batch eval_batch deepspeed_io training_dataloader"),
        "_checkpoints": (
            CheckpointCalls,
            "save_checkpoint load_checkpoint module_state_dict load_module_state_dict save_16bit_model "
            "save_fp16_model _consolidated_16bit_state_dict _zero3_consolidated_16bit_state_dict "
            "_get_optimizer_ckpt_name",
        ),
        "_reporter": (Reporter, "monitor tput_timer"),
        "_memory": (ZeroMemory, "offload_states reload_states empty_partition_cache"),
        "_queries": (
            Queries,
            "_config zero_optimization fp16_enabled bfloat16_enabled basic_optimizer get_global_grad_norm "
            "get_lr get_mom get_type local_rank data_parallel_group dist_backend get_sequence_parallel_group",
        ),
    }
)
class DeepSpeedEngine(nn.Module):
    """Trains a module of any kind: ``loss = engine(batch); engine.backward(loss); engine.step()``.

    Attributes that the engine lacks are read from the module.

    Attributes:
        module: the model.
        optimizer: a `DeepSpeedOptimizer`; of an engine that only evaluates, a `DeepSpeedZeRoOffload` at stage
            3, and None below.
        monitor: records a script's own values.
        tput_timer: measures samples per second.
        timers: DeepSpeed's timers of forward, backward and step; they run with `wall_clock_breakdown`.
        loaded_checkpoint_dp_world_size, loaded_checkpoint_mp_world_size: None, as a checkpoint loads on any
            layout.

    Args:
        state: the state that the parts share.
    """

    pipeline_parallelism = False
    optimizer: Any

    def __init__(self, state: EngineState):
        super().__init__()
        self.module, states = state.module, state.states
        self.optimizer = states.offload if states.idle else states
        self.loaded_checkpoint_dp_world_size = self.loaded_checkpoint_mp_world_size = None
        self._state = state
        # A script may override the method, so it is looked up when it is called.
        self._accumulation = Accumulation(state, lambda: self.is_gradient_accumulation_boundary())
        self._passes = ForwardBackward(state, self._accumulation)
        self._updates = Updates(state, self._accumulation)
        self._batches, self._checkpoints, self._queries = (
            Batches(state, self),
            CheckpointCalls(state),
            Queries(state),
        )
        self._memory = ZeroMemory(states.parallel)
        self._reporter, self.timers = state.reporter, state.reporter.clocks
        empty_state_dict(self.module)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in GETTERS:
                return partial(GETTERS[name], self._state)
            if name in ATTRIBUTES:
                return ATTRIBUTES[name](self._state)
            module = self.__dict__.get("_modules", {}).get("module")
            if hasattr(module, name) or hasattr(type(module), name):
                return getattr(module, name)
            message = f"'{type(self).__name__}' object has no attribute '{name}'"
            raise AttributeError(message, name=name, obj=self) from None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "module" and "_state" in self.__dict__:  # a script has wrapped it
            self._state.module = value

    def attach(self, attachment: Attachment) -> None:
        """Record what the engine has put on the module, which `destroy` takes off."""
        self._attachment = attachment
        attachment.watch(self._accumulation.script)

    def autotp_size(self) -> int:
        """The tensor-parallel size that `tp_model_init` or the JSON asks for; 0 if neither does."""
        request = self.module.__dict__.get("tensor_parallel_request")
        configured = value_at(self._state.arguments.config, "tensor_parallel.autotp_size", 0)
        return int(configured if request is None else request.size)

    def destroy(self) -> None:
        """Take the engine off the module, which it can no longer train; every rank calls this.

        At stage 3 the weights stay sharded, as within `zero.Init`. Monitors and process groups stay open.
        """
        self._attachment.detach(whole=False)
