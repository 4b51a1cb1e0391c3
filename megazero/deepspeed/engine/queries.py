"""Read-only members of an engine: its settings, the optimizer's state, and the rank's groups."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import TypeVar

import torch

from megazero.deepspeed.comm.world import ProcessGroup, is_initialized, process_group
from megazero.deepspeed.config.user import DeepSpeedConfig
from megazero.deepspeed.engine.state import EngineState
from megazero.deepspeed.optimizers.grouped_rule import rate_of
from megazero.deepspeed.utils.parts import getter_method
from megazero.mpu.launch import Launch

T = TypeVar("T")

_BATCH, _RANKS = "_state.settings.batch", "_state.context"
_METHODS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "train_batch_size": (f"{_BATCH}.train", "Samples per update, over all ranks."),
        "train_micro_batch_size_per_gpu": (f"{_BATCH}.micro", "Samples per forward on one rank."),
        "gradient_accumulation_steps": (f"{_BATCH}.accumulation", "Micro-batches per update."),
        "gradient_clipping": (
            "_state.settings.clip_grad",
            "The largest gradient norm; 0: no clipping.",
        ),
        "zero_optimization_stage": (
            "_state.settings.zero.stage",
            "The ZeRO stage: 0 shards nothing, 1 the optimizer's state, 2 also gradients, 3 also parameters.",
        ),
        "get_data_parallel_rank": (f"{_RANKS}.data.rank", "This rank among the data-parallel ranks."),
        **dict.fromkeys(
            ("get_model_parallel_rank", "get_tensor_parallel_rank"),
            (f"{_RANKS}.tp.rank", "This rank among the tensor-parallel ranks."),
        ),
        "zero_gather_16bit_weights_on_model_save": (
            "_state.settings.extras.gather_16bit_weights_on_save",
            "Whether `save_16bit_model` gathers sharded weights.",
        ),
    }
)
_PROPERTIES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "config": ("_state.arguments.config", "The content of the JSON."),
        "client_optimizer": ("_state.arguments.optimizer", "The `optimizer` of `initialize`."),
        "client_lr_scheduler": ("_state.arguments.lr_scheduler", "The `lr_scheduler` of `initialize`."),
        "mpu": ("_state.arguments.mpu", "The `mpu` of `initialize`."),
        "device": (f"{_RANKS}.device", "The device that the module is on."),
        "global_rank": (f"{_RANKS}.rank", "This rank."),
        "world_size": (f"{_RANKS}.world_size", "The number of ranks."),
        "dp_world_size": (f"{_RANKS}.data.size", "The number of data-parallel ranks."),
        "mp_world_size": (f"{_RANKS}.tp.size", "The number of tensor-parallel ranks."),
        "seq_dp_world_size": (
            f"{_RANKS}.replica.size",
            "The data-parallel size x the sequence-parallel size.",
        ),
        "cur_scale": ("_state.states.cur_scale", "The loss scale."),
    }
)


def with_queries(whole: type[T]) -> type[T]:
    """Decorate a class with a method or property for each row of the tables: name -> (path, docstring)."""
    for name, (path, what) in _METHODS.items():
        setattr(whole, name, getter_method(name, path, what))
    for name, (path, what) in _PROPERTIES.items():
        setattr(whole, name, property(attrgetter(path), doc=what))
    return whole


class Queries:
    """Queries that compute their answer."""

    def __init__(self, state: EngineState):
        self.state = state

    @property
    def _config(self) -> DeepSpeedConfig:
        """The settings as a `DeepSpeedConfig`, for scripts to read; changes to it have no effect."""
        state = self.state
        return DeepSpeedConfig.of(state.arguments.config, state.settings, state.context.data.size)

    def zero_optimization(self) -> bool:
        """Whether the ZeRO stage is above 0."""
        return self.state.settings.zero.stage > 0

    def fp16_enabled(self) -> bool:
        """Whether weights are fp16."""
        return self.state.settings.precision.dtype == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Whether weights are bf16."""
        return self.state.settings.precision.dtype == "bf16"

    @property
    def basic_optimizer(self) -> torch.optim.Optimizer | None:
        """The torch optimizer whose parameter groups and options the engine uses."""
        return None if self.state.states.idle else self.state.states.optimizer

    def get_global_grad_norm(self) -> float | None:
        """The gradient norm of the last update, over all ranks and before clipping."""
        report = self.state.states.report
        return None if report is None else report.grad_norm

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group."""
        return [rate_of(group) for group in self.state.states.param_groups]

    def get_mom(self) -> list[float | tuple[float, ...]]:
        """The `momentum` of each parameter group, or its `betas` if it has no `momentum`."""
        groups = self.state.states.param_groups
        return [group.get("momentum", group.get("betas", 0.0)) for group in groups]

    def get_type(self) -> list[object]:
        """The `type` of each parameter group; 0 if the script set none."""
        return [group.get("type", 0.0) for group in self.state.states.param_groups]

    @property
    def local_rank(self) -> int:
        """This rank's number on its node, by the launcher's environment."""
        return Launch.from_environment().local_rank or 0

    @property
    def data_parallel_group(self) -> ProcessGroup | None:
        """torch's process group of the data-parallel ranks; None if no world has been joined."""
        return process_group(self.state.context.data) if is_initialized() else None

    @property
    def dist_backend(self) -> str:
        """The communication library: nccl or gloo."""
        return "nccl" if self.state.context.device.type == "cuda" else "gloo"

    def get_sequence_parallel_group(self) -> ProcessGroup | None:
        """torch's process group of the sequence-parallel ranks; None if there is one alone."""
        group = self.state.context.groups["cp"]
        return process_group(group) if group.size > 1 else None
