"""The settings of a DeepSpeed JSON for an engine that is given its model; `megazero.initialize` reads it.

The settings of training itself are fields of the tree; these are the rest. Defaults are DeepSpeed's. None
means that the value is left to the caller, because the key is "auto" or missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class OptimizerExtras:
    """The optimizer to build if none is passed; `type` is a name of `--optimizer`.

    What is None has the default of the type's class. The four from `max_coeff` on are LAMB's, see `Lamb`;
    `use_nvlamb` is `adapt_all`. Those after them are of `OnebitAdam`, `OnebitLamb` and `ZeroOneAdam`.
    """

    type: str
    lr: float | None = 1e-3
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = 0.0
    momentum: float | None = None
    rho: float | None = None
    alpha: float | None = None
    muon_lr: float | None = None
    adam_lr: float | None = None
    nesterov: bool | None = None
    max_coeff: float = 10.0
    min_coeff: float = 0.01
    bias_correction: Literal["rate", "none"] = "rate"
    use_nvlamb: bool = True
    freeze_step: int = 100_000
    coeff_beta: float = 0.9
    factor_max: float = 4.0
    factor_min: float = 0.5
    factor_threshold: float = 0.1
    var_freeze_step: int = 100_000
    var_update_scaler: int = 16
    local_step_scaler: int = 32_678
    local_step_clipper: int = 16


@dataclass(frozen=True)
class SchedulerExtras:
    """The DeepSpeed learning rate schedule named by `type`; steps are optimizer steps.

    If `warmup_max_lr` is None, it is the optimizer's learning rate. WarmupDecayLR and WarmupCosineLR need
    `total_num_steps`; the `lr` members are read by the first two types and the `ratio` members by the last.
    """

    type: Literal["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
    total_num_steps: int | None = None
    warmup_num_steps: int | None = 1000
    warmup_type: Literal["log", "linear"] = "log"
    warmup_min_lr: float | None = 0.0
    warmup_max_lr: float | None = None
    warmup_min_ratio: float = 0.0
    cos_min_ratio: float = 0.0001


@dataclass(frozen=True)
class CheckpointExtras:
    """The section `checkpoint`.

    Attributes:
        tag_validation: what happens if ranks save under different tags.
        use_node_local_storage: each node has a folder of its own, which the others do not see.
    """

    tag_validation: Literal["warn", "ignore", "fail"] = "warn"
    use_node_local_storage: bool = False


@dataclass(frozen=True)
class Extras:
    """Everything that the JSON says beyond the tree.

    Attributes:
        optimizer: what to build if the caller passes no optimizer; with None the caller must pass one.
        scheduler: the learning rate schedule to build; None for the caller's, or a constant rate.
        steps_per_print: optimizer steps between log lines.
        auto_cast: cast floating point inputs of the model to its type.
        prescale_gradients: divide gradients by the number of ranks before they are summed, not after.
        gradient_predivide_factor: without `prescale_gradients`, divide by this before the sum and by the
    rest after it.
        dataloader_drop_last: leave out the last batch if it is short.
        zero_allow_untested_optimizer: shard an optimizer whose update is not known to be elementwise.
        gather_16bit_weights_on_save: write whole weights in the model's type beside a checkpoint.
        flops_profiler: report FLOPs and their rate.
        dump_state: print the configuration at start.
        checkpoint: how checkpoints are written.
    """

    optimizer: OptimizerExtras | None = None
    scheduler: SchedulerExtras | None = None
    steps_per_print: int = 10
    auto_cast: bool = False
    prescale_gradients: bool = False
    gradient_predivide_factor: float = 1.0
    dataloader_drop_last: bool = False
    zero_allow_untested_optimizer: bool = False
    gather_16bit_weights_on_save: bool = False
    flops_profiler: bool = False
    dump_state: bool = False
    checkpoint: CheckpointExtras = CheckpointExtras()

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Extras:
        """Build it from attribute paths such as `optimizer.lr`; a group without a `type` is left out."""
        groups: dict[str, dict[str, Any]] = {"optimizer": {}, "scheduler": {}, "checkpoint": {}}
        plain: dict[str, Any] = {}
        for path, value in values.items():
            group, _, name = path.rpartition(".")
            (groups[group] if group else plain)[name] = value
        if "type" in groups["optimizer"]:
            plain["optimizer"] = OptimizerExtras(**groups["optimizer"])
        if "type" in groups["scheduler"]:
            plain["scheduler"] = SchedulerExtras(**groups["scheduler"])
        return cls(**plain, checkpoint=CheckpointExtras(**groups["checkpoint"]))
