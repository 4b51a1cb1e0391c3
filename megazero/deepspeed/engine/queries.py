"""Queries that a script may make of an engine: settings, the optimizer's state, the rank's place."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from megazero.deepspeed.comm.world import is_initialized, process_group
from megazero.deepspeed.config.user import DeepSpeedConfig
from megazero.deepspeed.engine.state import EngineState
from megazero.deepspeed.optimizers.grouped_rule import rate_of
from megazero.deepspeed.utils.parts import asked
from megazero.mpu.launch import Launch

T = TypeVar("T")

_BATCH, _RANKS = "_state.settings.batch", "_state.context"
_METHODS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "train_batch_size": (f"{_BATCH}.train", "Samples per update over all ranks."),
        "train_micro_batch_size_per_gpu": (f"{_BATCH}.micro", "Samples per forward on one rank."),
        "gradient_accumulation_steps": (f"{_BATCH}.accumulation", "Micro-batches per update."),
        "gradient_clipping": ("_state.settings.clip_grad", "Largest gradient norm; 0 is off."),
        "zero_optimization_stage": (
            "_state.settings.zero.stage",
            "The stage of ZeRO: 0 shards nothing, 1 the optimizer, 2 also gradients, 3 also parameters.",
        ),
        "get_data_parallel_rank": (f"{_RANKS}.data.rank", "Number of this rank among replicas."),
        **dict.fromkeys(
            ("get_model_parallel_rank", "get_tensor_parallel_rank"),
            (f"{_RANKS}.tp.rank", "Number of this rank among those that layers are sliced over."),
        ),
        "zero_gather_16bit_weights_on_model_save": (
            "_state.settings.extras.gather_16bit_weights_on_save",
            "Whether `save_16bit_model` gathers sharded weights.",
        ),
    }
)
_PROPERTIES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "config": ("_state.given.config", "The JSON's content, as it was given."),
        "client_optimizer": ("_state.given.optimizer", "The `optimizer` of `initialize`."),
        "client_lr_scheduler": ("_state.given.lr_scheduler", "The `lr_scheduler` of `initialize`."),
        "mpu": ("_state.given.mpu", "The `mpu` of `initialize`."),
        "device": (f"{_RANKS}.device", "The device that the module is on."),
        "global_rank": (f"{_RANKS}.rank", "This rank."),
        "world_size": (f"{_RANKS}.world_size", "Number of ranks."),
        "dp_world_size": (f"{_RANKS}.data.size", "The number of ranks that samples are split over."),
        "mp_world_size": (f"{_RANKS}.tp.size", "The number of ranks that each layer is sliced over."),
        "seq_dp_world_size": (f"{_RANKS}.replica.size", "The number of ranks that hold the same parameters."),
        "cur_scale": ("_state.states.cur_scale", "The loss scale."),
    }
)


def with_queries(whole: type[T]) -> type[T]:
    """Decorate a class with the methods and properties of the two tables: name -> (path, docstring)."""
    for name, (path, what) in _METHODS.items():
        setattr(whole, name, asked(name, path, what))
    for name, (path, what) in _PROPERTIES.items():
        setattr(whole, name, property(attrgetter(path), doc=what))
    return whole


class Queries:
    """Queries of a script that take more than a look."""

    def __init__(self, state: EngineState):
        self.state = state

    @property
    def _config(self) -> DeepSpeedConfig:
        """The settings as scripts look into them; nothing reads what is set there."""
        state = self.state
        return DeepSpeedConfig.of(state.given.config, state.settings, state.context.data.size)

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.state.settings.zero.stage > 0

    def fp16_enabled(self) -> bool:
        """Whether weights are fp16."""
        return self.state.settings.precision.dtype == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Whether weights are bf16."""
        return self.state.settings.precision.dtype == "bf16"

    @property
    def basic_optimizer(self) -> torch.optim.Optimizer | None:
        """The torch optimizer whose groups and options are used."""
        return None if self.state.states.idle else self.state.states.optimizer

    def get_global_grad_norm(self) -> float | None:
        """Gradient norm of the last update over all ranks, before clipping."""
        report = self.state.states.report
        return None if report is None else report.grad_norm

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group."""
        return [rate_of(group) for group in self.state.states.param_groups]

    def get_mom(self) -> list[Any]:
        """Momentum of each parameter group: `momentum` if it has one, or else `betas`."""
        groups = self.state.states.param_groups
        return [group.get("momentum", group.get("betas", 0.0)) for group in groups]

    def get_type(self) -> list[Any]:
        """The `type` of each parameter group; 0 where the script gave it none."""
        return [group.get("type", 0.0) for group in self.state.states.param_groups]

    @property
    def local_rank(self) -> int:
        """This rank's number on its node, as given by the launcher."""
        return Launch.from_environment().local_rank or 0

    @property
    def data_parallel_group(self) -> Any:
        """torch's process group of the ranks that samples are split over; None without a world."""
        return process_group(self.state.context.data) if is_initialized() else None

    @property
    def dist_backend(self) -> str:
        """The library that the ranks talk through."""
        return "nccl" if self.state.context.device.type == "cuda" else "gloo"

    def get_sequence_parallel_group(self) -> Any:
        """torch's process group of the ranks that a sequence is split over; None for one rank."""
        group = self.state.context.groups["cp"]
        return process_group(group) if group.size > 1 else None
