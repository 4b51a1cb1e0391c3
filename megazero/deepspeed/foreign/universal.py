"""DeepSpeed's universal checkpoints, as a run of DeepSpeed's users goes on from them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megazero.checkpoint.part import WEIGHT
from megazero.deepspeed.foreign.flat import OptimizerStates
from megazero.deepspeed.foreign.pickles import load_states
from megazero.deepspeed.foreign.progress import count_updates
from megazero.formats.megatron.universal import optimizer_facts, parameter_files
from megazero.formats.megatron.zero_states import Joined, Scale, Shapes


def read_universal(folder: Path, shapes: Shapes) -> OptimizerStates:
    """Masters and moments in a checkpoint's folder ``zero``.

    Args:
        folder: the folder.
        shapes: those of parameters whose tensors may be stored flat, as of stage 3.

    Raises:
        DamagedCheckpointError: a parameter has no fp32 weights.
        CheckpointError: a file names a class that is not known.
    """
    tensors: dict[tuple[str, str], Joined] = {}
    steps: list[Mapping[str, Any]] = []
    for file in parameter_files(folder, load_states):
        name, value = file.parameter, file.value
        if file.kind == "step":
            steps.append({"step": value})
        elif isinstance(value, Tensor):
            kind = WEIGHT if file.kind == "fp32" else file.kind
            tensors[name, kind] = Joined(shapes.get(name, tuple(value.shape)), (value.reshape(-1),))
    saved = optimizer_facts(folder, load_states)
    groups = saved.get("param_groups", ())
    # Stage 3 has no step.pt, but the optimizer's own state, which counts.
    updates = count_updates(steps or saved.get("optimizer_state_dict", {}).get("state", {}), groups)
    return OptimizerStates(tensors, groups, updates, Scale.of(saved))
