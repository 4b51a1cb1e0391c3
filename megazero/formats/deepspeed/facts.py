"""DeepSpeed's checkpoint beside its tensors: counters, options, loss scale, the script's own values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megazero.formats.deepspeed.pickles import clone_tensors_for_torch_save
from megazero.formats.deepspeed.vectors import Scale

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
