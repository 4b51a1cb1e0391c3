"""The section `distillation`: a teacher, and how much and how long a student learns from it.

Flags are Megatron-DeepSpeed's for its mixture of students (Rajbhandari et al. 2022).
"""

from __future__ import annotations

from pydantic import PositiveFloat, PositiveInt

from megazero.config.condition import config, here
from megazero.config.tree.experts import Counts
from megazero.config.tree.option import Section, option
from megazero.config.tree.roles import Role


class DistillationConfig(Section):
    """Distillation"""

    needs = here.kd

    kd: bool = option(
        False,
        roles=Role.SCHEDULE,
        aliases=("--mos",),
        needs=(here.load_teacher, config.model.family == "gpt", config.finetune.task.is_none),
    )
    """train the model to predict what a teacher predicts too: adds beta x temperature^2 x KL(teacher ||
    model), the mean over the positions that count, to the loss"""
    load_teacher: str | None = option(None)
    """folder of the teacher's run, or of one checkpoint; its shape is the checkpoint's"""
    kd_beta_ce: PositiveFloat = option(1.0)
    """weight of the divergence"""
    kd_temp: PositiveFloat = option(1.0)
    """temperature: divides the logits of both before the softmax"""
    kd_train_iters: PositiveInt | None = option(None, roles=Role.LENGTH | Role.SCHEDULE, unit="iterations")
    """learn from the teacher in this many first steps, since it can hurt towards the end; default: in all"""
    num_layers_teacher: PositiveInt | None = option(None)
    """refuse a teacher with another number of layers; default: take any"""
    hidden_size_teacher: PositiveInt | None = option(None)
    """refuse a teacher of another width; default: take any"""
    num_attention_heads_teacher: PositiveInt | None = option(None)
    """refuse a teacher with another number of attention heads; default: take any"""
    num_experts_teacher: Counts = option(())
    """refuse a teacher with other numbers of experts; default, and 1: take any"""
