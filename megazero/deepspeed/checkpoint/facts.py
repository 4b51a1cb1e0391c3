"""DeepSpeed's checkpoint beside its tensors: counters, options, loss scale, the script's own values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.formats.megatron.zero_states import Scale

# Keys of a file of the model that are DeepSpeed's own; the script's stand among them.
_OWN = frozenset(
    {
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
        *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps"),
        *("global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version"),
        *("checkpoint_parallel_dimensions", "universal_checkpoint_info", "sparse_tensor_module_names"),
        *("csr_tensor_module_names", "num_experts", "autoep_layers", "ds_autoep_layers"),
    }
)


@dataclass(frozen=True)
class ForeignCounts:
    """How far a training with DeepSpeed had come.

    Attributes:
        steps: optimizer steps, skipped ones included.
        samples: samples over all ranks.
        skipped: steps without an update.
        updates: how many updates the moments saw; None without an optimizer.
    """

    steps: int = 0
    samples: int = 0
    skipped: int = 0
    updates: int | None = None


@dataclass(frozen=True)
class ForeignFacts:
    """The content of a checkpoint beside tensors.

    Attributes:
        counts: how far the training had come.
        options: the options of each parameter group.
        schedule: the state of the learning rate schedule; None if there was none.
        scale: the dynamic loss scale; None if there was none.
        client: the script's own values.
    """

    counts: ForeignCounts = ForeignCounts()
    options: Sequence[Mapping[str, Any]] = ()
    schedule: Mapping[str, Any] | None = None
    scale: Scale | None = None
    client: Mapping[str, Any] = field(default_factory=dict)


def read_facts(
    model: Mapping[str, Any], updates: int | None, groups: Sequence[Mapping[str, Any]], scale: Scale | None
) -> ForeignFacts:
    """The facts in the first file of the model, with those of the optimizer.

    Args:
        model: the content of the file.
        updates: how many of them the optimizer counted; None without one.
        groups: the parameter groups of the optimizer.
        scale: see `ForeignFacts`.
    """
    steps, samples, skipped = (
        int(model.get(name) or 0) for name in ("global_steps", "global_samples", "skipped_steps")
    )
    # Copies: tensors of a mapped file must not outlive its content.
    return ForeignFacts(
        # Some optimizers do not count.
        ForeignCounts(steps, samples, skipped, None if updates is None else updates or steps - skipped),
        options=[{k: v for k, v in group.items() if k not in ("params", "step")} for group in groups],
        schedule=clone_tensors_for_torch_save(model.get("lr_scheduler")),
        scale=scale,
        client={k: clone_tensors_for_torch_save(v) for k, v in model.items() if k not in _OWN},
    )


def count_updates(states: Mapping[Any, Any] | Sequence[Any], groups: Sequence[Mapping[str, Any]]) -> int:
    """The updates that an optimizer's states counted: the most of any parameter."""
    steps = [0]
    entry = states.values() if isinstance(states, Mapping) else states
    for holder in [*entry, *groups]:
        step = holder.get("step") if isinstance(holder, Mapping) else None
        if step is not None:
            steps.append(int(step))
    return max(steps)


MODEL_FILE_PREFIX = "mp_rank_"
ZERO_FILE_PREFIX = "zero_pp_rank_"
OPTIM_FILE_SUFFIX = "_optim_states.pt"
MODEL_FILE_SUFFIX = "_model_states.pt"
UNIVERSAL_CHECKPOINT_VERSION_VALUE = 0.4


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """A copy of nested lists, tuples and dictionaries whose tensors are copies on `device`.

    `torch.save` writes the whole memory that a tensor is a view of; a copy has only its own.
    """
    if isinstance(item, Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, (list, tuple)):
        cloned = [clone_tensors_for_torch_save(entry, device) for entry in item]
        if hasattr(item, "_fields"):  # a named tuple
            return type(item)(*cloned)
        return type(item)(cloned)
    if isinstance(item, dict):
        pairs = ((key, clone_tensors_for_torch_save(value, device)) for key, value in item.items())
        return type(item)(pairs) if type(item) is not dict else dict(pairs)
    return item


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """The path of DeepSpeed's file of the model for a model-parallel rank."""
    return str(Path(base_folder) / f"{MODEL_FILE_PREFIX}{mp_rank_str}{MODEL_FILE_SUFFIX}")


def get_zero_ckpt_name_for_rank(base_folder: str, dp_rank: int, mp_rank: int) -> str:
    """The path of DeepSpeed's file of an optimizer's shard."""
    name = f"{ZERO_FILE_PREFIX}{dp_rank}_{MODEL_FILE_PREFIX}{mp_rank:02d}{OPTIM_FILE_SUFFIX}"
    return str(Path(base_folder) / name)


def get_layer_ckpt_name_for_rank(base_folder: str, layer_id: str, tp_rank: int) -> str:
    """The path of DeepSpeed's file of a pipeline's layer for a tensor-parallel rank."""
    return str(Path(base_folder) / f"{layer_id}-model_{tp_rank:02d}{MODEL_FILE_SUFFIX}")
