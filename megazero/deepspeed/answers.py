"""Queries that a script may make of an engine: its settings, its optimizer's state, and its rank's place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from megazero.deepspeed.comm.world import is_initialized, process_group
from megazero.deepspeed.config.settings import UserSettings
from megazero.deepspeed.config.user import DeepSpeedConfig
from megazero.deepspeed.grouped_rule import rate_of
from megazero.deepspeed.optimizer import DeepSpeedOptimizer
from megazero.mpu.context import ParallelContext
from megazero.mpu.launch import Launch


@dataclass(frozen=True)
class Given:
    """The arguments that a script gave to `initialize`; an engine shows it under DeepSpeed's names.

    Attributes:
        config: the JSON's content.
        optimizer: the optimizer, a function that makes one, or None.
        lr_scheduler: the schedule, a function that makes one, or None.
        mpu: the object that knows the layout, or None.
        training_data: the dataset, or None.
        collate_fn: collates its samples, or None.
    """

    config: dict[str, Any] = field(default_factory=dict)
    optimizer: Any = None
    lr_scheduler: Any = None
    mpu: Any = None
    training_data: Any = None
    collate_fn: Any = None


class SettingsAnswers:
    """The settings that an engine was given at its start."""

    settings: UserSettings
    given: Given
    context: ParallelContext

    @property
    def config(self) -> dict[str, Any]:
        """The JSON's content, as it was given."""
        return self.given.config

    @property
    def _config(self) -> DeepSpeedConfig:
        """The settings as scripts look into them; nothing reads what is set there."""
        return DeepSpeedConfig.of(self.given.config, self.settings, self.context.data.size)

    def train_batch_size(self) -> int:
        """Samples per update over all ranks."""
        return self.settings.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per forward on one rank."""
        return self.settings.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per update."""
        return self.settings.batch.accumulation

    def gradient_clipping(self) -> float:
        """Largest gradient norm; 0 is off."""
        return self.settings.clip_grad

    def zero_optimization_stage(self) -> int:
        """The stage of ZeRO: 0 shards nothing, 1 the optimizer, 2 also gradients, 3 also parameters."""
        return self.settings.zero.stage

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.settings.zero.stage > 0

    def fp16_enabled(self) -> bool:
        """Whether weights are fp16."""
        return self.settings.precision.dtype == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Whether weights are bf16."""
        return self.settings.precision.dtype == "bf16"


class OptimizerAnswers:
    """The state of an engine's optimizer."""

    states: DeepSpeedOptimizer
    given: Given

    @property
    def basic_optimizer(self) -> torch.optim.Optimizer | None:
        """The torch optimizer whose groups and options are used."""
        return None if self.states.idle else self.states.optimizer

    @property
    def client_optimizer(self) -> Any:
        """The `optimizer` that `initialize` was given."""
        return self.given.optimizer

    @property
    def client_lr_scheduler(self) -> Any:
        """The `lr_scheduler` that `initialize` was given."""
        return self.given.lr_scheduler

    def get_global_grad_norm(self) -> float | None:
        """Gradient norm of the last update over all ranks, before clipping."""
        return None if self.states.report is None else self.states.report.grad_norm

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group."""
        return [rate_of(group) for group in self.states.param_groups]

    def get_mom(self) -> list[Any]:
        """Momentum of each parameter group: `momentum` if it has one, or else `betas`."""
        return [group.get("momentum", group.get("betas", 0.0)) for group in self.states.param_groups]

    def get_type(self) -> list[Any]:
        """The `type` of each parameter group; 0 where the script gave it none."""
        return [group.get("type", 0.0) for group in self.states.param_groups]

    @property
    def cur_scale(self) -> float:
        """The loss scale."""
        return self.states.cur_scale


class PlaceAnswers:
    """The place of an engine's rank among the others."""

    context: ParallelContext
    given: Given

    @property
    def mpu(self) -> Any:
        """The `mpu` that `initialize` was given."""
        return self.given.mpu

    @property
    def device(self) -> torch.device:
        """The device that the module is on."""
        return self.context.device

    @property
    def local_rank(self) -> int:
        """This rank's number on its node, as given by the launcher."""
        return Launch.from_environment().local_rank or 0

    @property
    def global_rank(self) -> int:
        """This rank."""
        return self.context.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.context.world_size

    @property
    def dp_world_size(self) -> int:
        """The number of ranks that samples are split over."""
        return self.context.data.size


class LayoutAnswers:
    """The groups of ranks around an engine's rank."""

    context: ParallelContext

    @property
    def mp_world_size(self) -> int:
        """The number of ranks that each layer is sliced over."""
        return self.context.tp.size

    @property
    def seq_dp_world_size(self) -> int:
        """The number of ranks that hold the same parameters."""
        return self.context.replica.size

    @property
    def data_parallel_group(self) -> Any:
        """torch's process group of the ranks that samples are split over; None without a world."""
        return process_group(self.context.data) if is_initialized() else None

    @property
    def dist_backend(self) -> str:
        """The library that the ranks talk through."""
        return "nccl" if self.context.device.type == "cuda" else "gloo"

    def get_data_parallel_rank(self) -> int:
        """This rank's number among those that samples are split over."""
        return self.context.data.rank

    def get_model_parallel_rank(self) -> int:
        """This rank's number among those that each layer is sliced over."""
        return self.context.tp.rank

    get_tensor_parallel_rank = get_model_parallel_rank

    def get_sequence_parallel_group(self) -> Any:
        """torch's process group of the ranks that a sequence is split over; None for one rank."""
        group = self.context.groups["cp"]
        return process_group(group) if group.size > 1 else None
