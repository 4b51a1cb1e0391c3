"""The engine that `megazero.initialize` returns: a module whose backward and step are ours.

Members have DeepSpeed's names and do what they do there; the table at the class says which part has each.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from megazero.deepspeed.config.shown import value_at
from megazero.deepspeed.engine.batches import Batches
from megazero.deepspeed.engine.getters import ATTRIBUTES, GETTERS
from megazero.deepspeed.engine.gradients import Accumulation, Passes
from megazero.deepspeed.engine.keeper import Keeper
from megazero.deepspeed.engine.queries import Queries, with_queries
from megazero.deepspeed.engine.report import Reporter
from megazero.deepspeed.engine.state import EngineState
from megazero.deepspeed.engine.tenancy import Tenancy
from megazero.deepspeed.engine.updates import Updates
from megazero.deepspeed.engine.weights import empty_state_dict
from megazero.deepspeed.utils.parts import made_of
from megazero.deepspeed.zero.states import ZeroMemory


@with_queries
@made_of(
    {
        "_state": (
            EngineState,
            "states settings context given lr_scheduler random_ltd_scheduler "
            "global_steps global_samples micro_steps skipped_steps progress resume",
        ),
        "_passes": (
            Passes,
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
        "_keeper": (
            Keeper,
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
    """Wraps a module of any kind: ``loss = engine(batch); engine.backward(loss); engine.step()``.

    Attributes of the module can be read through the engine.

    Attributes:
        module: the model.
        optimizer: see `DeepSpeedOptimizer`; if the engine has none to train with, a `DeepSpeedZeRoOffload` at
            stage 3, and None otherwise.
        monitor: takes a script's own values.
        tput_timer: the samples per second so far.
        timers: what forward, backward and step took, with `wall_clock_breakdown`, under DeepSpeed's names.
        loaded_checkpoint_dp_world_size, loaded_checkpoint_mp_world_size: None; a checkpoint loads on any
            layout.

    Args:
        state: the state that its parts share.
    """

    pipeline_parallelism = False

    def __init__(self, state: EngineState):
        super().__init__()
        self.module, states = state.module, state.states
        self.optimizer = states.offload if states.idle else states
        self.loaded_checkpoint_dp_world_size = self.loaded_checkpoint_mp_world_size = None
        self._state, self._accumulation = state, Accumulation(state, self)
        self._passes, self._updates = Passes(state, self._accumulation), Updates(state, self._accumulation)
        self._batches, self._keeper, self._queries = Batches(state, self), Keeper(state), Queries(state)
        self._memory = ZeroMemory(states.parallel)
        self._reporter, self.timers = state.reporter, state.reporter.clocks
        empty_state_dict(self.module)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in GETTERS:
                return partial(GETTERS[name], self)
            if name in ATTRIBUTES:
                return ATTRIBUTES[name](self)
            module = self.__dict__.get("_modules", {}).get("module")
            if hasattr(module, name) or hasattr(type(module), name):
                return getattr(module, name)
            words = f"'{type(self).__name__}' object has no attribute '{name}'"
            raise AttributeError(words, name=name, obj=self) from None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "module" and "_state" in self.__dict__:  # a script has put something around it
            self._state.module = value

    def stay(self, tenancy: Tenancy) -> None:
        """Note what the engine has put on the module, for `destroy` to take off."""
        self._tenancy = tenancy
        tenancy.serve(self._accumulation.script)

    def autotp_size(self) -> int:
        """The ranks that `tp_model_init` or the JSON slices the model's layers over; 0 if neither does."""
        recorded = self.module.__dict__.get("tensor_parallel_request")
        given = value_at(self._state.given.config, "tensor_parallel.autotp_size", 0)
        return int(given if recorded is None else recorded.size)

    def destroy(self) -> None:
        """Let go of the module; every rank calls this. It can no longer be trained by this engine.

        At stage 3 its weights stay sharded, as within `zero.Init`. Monitors and process groups stay open.
        """
        self._tenancy.end(whole=False)
