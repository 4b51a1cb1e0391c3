"""Make a user's configuration small enough for this machine, keeping what law 1 depends on."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megazero.config.derive import PipelineShape
from megazero.config.steps import Progress
from megazero.config.training_plan import training_plan_of
from megazero.config.tree.config import Config
from megazero.mpu.grid import ProcessGrid
from megazero.optim.build import takes_signs
from megazero.verify.sampling import SAMPLES, shrunk_metric
from megazero.verify.shrink_model import shrunk_model

_AXES = MappingProxyType({"tp": "tensor", "pp": "pipeline", "cp": "context", "dp": "data"})
# The settings that say after how many steps optimizers compress; verification sets them to `_NEVER`.
_NEVER = 1_000_000
_COMPRESSION_STEPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "onebit-adam": ("onebit_freeze_step",),
        "onebit-lamb": ("onebit_freeze_step",),
        "zero-one-adam": ("zero_one_var_freeze_step", "zero_one_var_update_scaler"),
    }
)


@dataclass(frozen=True)
class Shrunk:
    """A configuration made small.

    Attributes:
        config: the small configuration, in fp32.
        grid: the sizes of its mesh axes.
        notes: what had to become smaller or different, a line each.
    """

    config: Config
    grid: ProcessGrid
    notes: tuple[str, ...]


def shrink(config: Config, data_parallel: int, most_ranks: int = 8) -> Shrunk:
    """Shrink to few, narrow layers, a short sequence, few micro-batches, and at most `most_ranks` ranks.

    The kind of model, every parallel axis larger than one, the ZeRO stage, schedule, recompute and sequence
    parallelism are kept. Axes are halved, the largest first, until the ranks fit, but not below two.
    """
    sizes, notes = _axis_sizes(config, data_parallel, most_ranks)
    grid = _grid(config, sizes)
    changes: dict[str, dict[str, object]] = {
        "model": shrunk_model(config, grid),
        "parallel": _parallel(config, grid),
        "zero": _zero(config, grid.dp * grid.cp),
        "offload": _offload(config),
        "batch": _batch(config, data_parallel, grid),
        "optimizer": _optimizer(config),
        "precision": {"dtype": "fp32"},
        "curriculum": _curriculum(config, grid.tp * grid.cp),
        "data_sampling": {
            "curriculum_metrics": tuple(map(shrunk_metric, config.data_sampling.curriculum_metrics)),
            "curriculum_unit": "iters",
        },
        "skipping": _skipping(config, grid.tp * grid.cp),
        "distillation": {"kd_train_iters": None if config.distillation.kd_train_iters is None else 3},
        "training": {"train_iters": 100, "train_samples": None, "train_tokens": None},
    }
    if takes_signs(config.optimizer):
        changes["model"] |= {"add_bias_linear": False, "add_qkv_bias": False}
    sections = {name: getattr(config, name).model_copy(update=update) for name, update in changes.items()}
    return Shrunk(config.model_copy(update=sections), grid, (*notes, *_notes(config, grid)))


def _axis_sizes(config: Config, data_parallel: int, most_ranks: int) -> tuple[dict[str, int], list[str]]:
    """The sizes of the axes in `_AXES`, and a note for each that had to shrink."""
    parallel = config.parallel
    sizes = {
        "tp": parallel.tensor_model_parallel_size,
        "pp": parallel.pipeline_model_parallel_size,
        "cp": parallel.context_parallel_size,
        "dp": min(data_parallel, 2 * config.zero.hpz_partition_size),
    }
    if config.model.num_experts:
        # Enough replicas for experts to be shared, if there are.
        sizes["dp"] = min(data_parallel, max(sizes["dp"], parallel.expert_model_parallel_size))
    wanted = dict(sizes)
    while math.prod(sizes.values()) > most_ranks and max(sizes.values()) > 2:
        largest = max(sizes, key=lambda axis: sizes[axis])
        sizes[largest] = max(2, sizes[largest] // 2)
    smaller = [axis for axis in sizes if sizes[axis] != wanted[axis]]
    return sizes, [f"{_AXES[axis]} parallel size {wanted[axis]} -> {sizes[axis]}" for axis in smaller]


def _grid(config: Config, sizes: Mapping[str, int]) -> ProcessGrid:
    """The grid of these axes, with ep and etp lowered so that they divide a pipeline stage."""
    parallel, stage = config.parallel, sizes["tp"] * sizes["dp"] * sizes["cp"]
    etp = min(parallel.expert_tensor_parallel_size or sizes["tp"], stage)
    while stage % etp:
        etp -= 1
    ep = parallel.expert_model_parallel_size
    while ep > 1 and stage // etp % ep:
        ep = max(1, ep // 2)
    levels = parallel.hierarchical_context_parallel_sizes
    inner = 1 if levels is None else math.gcd(levels[0], sizes["cp"])
    return ProcessGrid(**sizes, ep=ep, etp=etp, cp_inner=inner)


def _notes(config: Config, grid: ProcessGrid) -> list[str]:
    """A line for each change that a user should know, except of the sizes in `_AXES`."""
    notes, experts = [], config.parallel.expert_model_parallel_size
    if takes_signs(config.optimizer):
        notes.append("no biases: the gradient of the keys' bias is rounding alone, and its sign is taken")
    if config.optimizer.optimizer in _COMPRESSION_STEPS:
        notes.append(f"{config.optimizer.optimizer} sums exactly: compressed sums depend on the replicas")
    if grid.ep != experts:
        notes.append(f"expert parallel size {experts} -> {grid.ep}")
    if {config.zero.quantized_weights, config.zero.quantized_gradients} != {"none"}:
        notes.append("weights and gradients are sent as they are, not as codes")
    if config.data_sampling.curriculum_metrics:
        notes.append(f"samples are drawn by difficulty from {SAMPLES} random ones, with made-up indexes")
    if config.distillation.kd:
        notes.append("the teacher is a new one with twice the student's layers")
    return notes


def _parallel(config: Config, grid: ProcessGrid) -> dict[str, object]:
    parallel, shape = config.parallel, PipelineShape.of(config)
    virtual = shape.chunks_per_stage if shape.kind == "interleaved" else 1
    partition = parallel.pipeline_partition
    grouped = parallel.microbatch_group_size_per_virtual_pipeline_stage is not None
    types, levels = parallel.cp_comm_type, parallel.hierarchical_context_parallel_sizes
    if len(types) > 1:  # one for each layer
        layers = max(2, shape.chunks_per_stage) * parallel.pipeline_model_parallel_size
        types = tuple(types[layer % len(types)] for layer in range(layers))
    return {
        "tensor_model_parallel_size": grid.tp,
        "pipeline_model_parallel_size": grid.pp,
        "num_layers_per_virtual_pipeline_stage": None,
        "num_virtual_stages_per_pipeline_rank": virtual if virtual > 1 else None,
        "microbatch_group_size_per_virtual_pipeline_stage": 2 * grid.pp if grouped else None,
        "pipeline_partition": "uniform" if partition[0].isdigit() or "type:" in partition else partition,
        "context_parallel_size": grid.cp,
        "cp_comm_type": types,
        "hierarchical_context_parallel_sizes": levels and (grid.cp_inner, grid.cp // grid.cp_inner),
        "expert_model_parallel_size": grid.ep,
        "expert_tensor_parallel_size": parallel.expert_tensor_parallel_size and grid.etp,
    }


def _zero(config: Config, replicas: int) -> dict[str, object]:
    return {
        "bucket_size": 3000,
        "prefetch_size": 6000,
        "param_persistence_threshold": 40,
        "hpz_partition_size": math.gcd(config.zero.hpz_partition_size, replicas),
        "grad_reduce_dtype": "fp32",
        "grad_accumulation_dtype": "fp32",
        "main_params_dtype": "fp32",
        # Codes and narrow types do not promise to equal one process.
        "quantized_weights": "none",
        "quantized_gradients": "none",
        "quantization_block_size": 256,
        "quantization_rounding": "nearest",
        "node_size": 1,
    }


def _offload(config: Config) -> dict[str, object]:
    changes: dict[str, object] = {"path": config.offload.path and tempfile.gettempdir()}
    if config.offload.delayed_param_update:
        changes["delayed_param_update_start"] = min(config.offload.delayed_param_update_start, 1)
    return changes


def _batch(config: Config, data_parallel: int, grid: ProcessGrid) -> dict[str, object]:
    micro_batch = min(2, config.batch.micro_batch_size)
    accumulated = training_plan_of(config, data_parallel).at(Progress()).micro_batches
    count = 2 * grid.pp if grid.pp > 1 else min(4, accumulated)
    return {
        "micro_batch_size": micro_batch,
        "global_batch_size": micro_batch * count * grid.dp,
        "rampup_batch_size": None,
        "step_batch_size_schedule": (),
    }


def _optimizer(config: Config) -> dict[str, object]:
    # The run is only a few steps long: the learning rate has no lengths and stays what it is.
    fields = type(config.optimizer).model_fields.items()
    changes: dict[str, object] = {name: field.default for name, field in fields if name.startswith("lr_")}
    changes |= {"lr": 1e-2, "adam_eps": 1e-4, "clip_grad": 0.5, "lr_decay_style": "constant"}
    if config.optimizer.optimizer == "adagrad":
        changes["adagrad_eps"] = 1e-4
    return changes | dict.fromkeys(_COMPRESSION_STEPS.get(config.optimizer.optimizer, ()), _NEVER)


def _curriculum(config: Config, multiple: int) -> dict[str, object]:
    """Half of the sequence for two steps, in multiples of `multiple` tokens, if the sequence grows at all."""
    if config.curriculum.seqlen_schedule == "none":
        return {}
    return {
        **{name: field.default for name, field in type(config.curriculum).model_fields.items()},
        "seqlen_schedule": "fixed_discrete",
        "seqlen_difficulty": (4 * multiple, 8 * multiple),
        "seqlen_max_step": (2,),
        "seqlen_kind": config.curriculum.seqlen_kind,
    }


def _skipping(config: Config, multiple: int) -> dict[str, object]:
    """Make random-LTD and progressive layer drop, if they are on, take effect within a few steps.

    The second layer sees half of the tokens for three steps, in multiples of `multiple` tokens.
    """
    settings = config.skipping
    changes: dict[str, object] = {}
    if settings.random_ltd:
        changes |= {
            "random_ltd_layer_id": (1,),
            "random_ltd_min_value": 4 * multiple,
            "random_ltd_max_value": None,
            "random_ltd_require_steps": 4,
            "random_ltd_seq_per_step": 4 * multiple,
            "random_ltd_layer_num": None,
            "random_ltd_total_layer_num": None,
        }
    if settings.progressive_layer_drop:
        changes |= {"pld_theta": min(0.5, settings.pld_theta), "pld_gamma": 1.0}
    return changes
