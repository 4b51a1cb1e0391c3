"""DeepSpeed's universal checkpoints: a folder for each parameter, a file for each of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megazero.checkpoint.megatron.zero_states import Joined, Scale, Shapes
from megazero.checkpoint.part import WEIGHT
from megazero.deepspeed.foreign.flat import OptimizerStates
from megazero.deepspeed.foreign.pickles import load_states
from megazero.deepspeed.foreign.progress import count_updates
from megazero.errors import DamagedCheckpointError

_STATE = "optimizer_state.pt"
_STEP = "step.pt"


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
    for place in sorted(path for path in folder.iterdir() if path.is_dir()):
        name = place.name
        if not (place / "fp32.pt").exists():
            raise DamagedCheckpointError(f"`{place}` must hold fp32.pt, but does not; convert it again")
        for path in sorted(place.glob("*.pt")):
            content = load_states(path)
            # Stage 3 writes tensors alone, the others a dictionary around them.
            value = content["param"] if isinstance(content, Mapping) and "param" in content else content
            if path.name == _STEP:
                steps.append({"step": value})
            elif isinstance(value, Tensor):
                kind = WEIGHT if path.name == "fp32.pt" else path.stem
                tensors[name, kind] = Joined(shapes.get(name, tuple(value.shape)), (value.reshape(-1),))
    saved = load_states(folder / _STATE) if (folder / _STATE).exists() else {}
    groups = saved.get("param_groups", ())
    # Stage 3 has no step.pt, but the optimizer's own state, which counts.
    updates = count_updates(steps or saved.get("optimizer_state_dict", {}).get("state", {}), groups)
    return OptimizerStates(tensors, groups, updates, Scale.of(saved))
