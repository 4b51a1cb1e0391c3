"""A DeepSpeed checkpoint's content besides tensors: counters, options, loss scale, the script's values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megazero.formats.deepspeed.pickles import clone_tensors_for_torch_save
from megazero.formats.deepspeed.vectors import Scale
from megazero.formats.pickles import Saved

# DeepSpeed's own keys in a model file; every other key is a value that the script gave (`client_state`).
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
    """The progress of a training with DeepSpeed.

    Attributes:
        steps: optimizer steps, skipped ones included.
        samples: samples over all ranks.
        skipped: steps without an update.
        updates: the optimizer's updates, for its bias correction; None without an optimizer.
    """

    steps: int = 0
    samples: int = 0
    skipped: int = 0
    updates: int | None = None


@dataclass(frozen=True)
class ForeignFacts:
    """A checkpoint's content besides tensors.

    Attributes:
        counts: the progress.
        options: the options of each parameter group.
        schedule: the state of the learning rate schedule, or None.
        scale: the dynamic loss scale, or None.
        client: the script's own values.
    """

    counts: ForeignCounts = ForeignCounts()
    options: Sequence[Saved] = ()
    schedule: Saved | None = None
    scale: Scale | None = None
    client: Saved = field(default_factory=dict)


def read_facts(
    model: Saved, updates: int | None, groups: Sequence[Saved], scale: Scale | None
) -> ForeignFacts:
    """Join the facts in the first model file with those of the optimizer, if there is one."""
    steps, samples, skipped = (
        int(model.get(name) or 0) for name in ("global_steps", "global_samples", "skipped_steps")
    )
    # Copies, because tensors of a memory-mapped file change if the file is written over.
    return ForeignFacts(
        # Some optimizers do not count their updates.
        ForeignCounts(steps, samples, skipped, None if updates is None else updates or steps - skipped),
        options=[{k: v for k, v in group.items() if k not in ("params", "step")} for group in groups],
        schedule=clone_tensors_for_torch_save(model.get("lr_scheduler")),
        scale=scale,
        client={k: clone_tensors_for_torch_save(v) for k, v in model.items() if k not in _OWN},
    )


def count_updates(states: Mapping[object, object] | Sequence[object], groups: Sequence[Saved]) -> int:
    """The largest count of updates in an optimizer's states or groups."""
    steps = [0]
    # Adam counts in each parameter's state, apex's FusedAdam in the groups.
    for counter in [*(states.values() if isinstance(states, Mapping) else states), *groups]:
        step = counter.get("step") if isinstance(counter, Mapping) else None
        if step is not None:
            steps.append(int(step))
    return max(steps)
