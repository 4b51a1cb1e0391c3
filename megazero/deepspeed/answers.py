"""Queries that a script may make of an engine: its settings, its optimizer's state, and its rank's place."""

from __future__ import annotations

import torch

from megazero.deepspeed.optimizer import DeepSpeedOptimizer
from megazero.deepspeed.settings import UserSettings
from megazero.mpu.context import ParallelContext
from megazero.mpu.launch import Launch


class SettingsAnswers:
    """The settings that an engine was given at its start."""

    settings: UserSettings

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

    optimizer: DeepSpeedOptimizer

    def get_global_grad_norm(self) -> float | None:
        """Gradient norm of the last update over all ranks, before clipping."""
        return None if self.optimizer.report is None else self.optimizer.report.grad_norm

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    @property
    def cur_scale(self) -> float:
        """The loss scale."""
        return self.optimizer.cur_scale

    def loss_scale(self) -> float:
        """The loss scale."""
        return self.optimizer.cur_scale


class PlaceAnswers:
    """The place of an engine's rank among the others."""

    context: ParallelContext

    @property
    def device(self) -> torch.device:
        """The device that the module is on."""
        return self.context.device

    @property
    def local_rank(self) -> int:
        """This rank's number on its node, as given by the launcher."""
        return Launch.from_environment().local_rank

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
