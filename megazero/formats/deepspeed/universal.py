"""DeepSpeed's universal checkpoints: a folder for each parameter, a file for each of its tensors::

    global_step100_universal/zero/3.mlp.dense_h_to_4h.weight/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt
    global_step100_universal/zero/optimizer_state.pt                     options of groups, the loss scale

Tensors are whole: DeepSpeed's converter joined them over all ranks, by patterns that the model had given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megazero.checkpoint.part import WEIGHT
from megazero.errors import DamagedCheckpointError
from megazero.formats.deepspeed.facts import count_updates
from megazero.formats.deepspeed.pickles import load_states
from megazero.formats.deepspeed.states import OptimizerStates
from megazero.formats.deepspeed.vectors import Joined, Scale, Shapes
from megazero.formats.pickles import Saved

MASTER, STEP = "fp32", "step"
"""Names, without ``.pt``, of the files of masters and of counts of updates."""

Open = Callable[[Path], Any]
"""Reads one file of `torch.save`."""


@dataclass(frozen=True)
class ParameterFile:
    """A file of a parameter; `kind` is its name without ``.pt``, and `facts` say how `value` was joined."""

    parameter: str
    kind: str
    facts: Saved
    value: object


def parameter_files(folder: Path, load: Open) -> Iterator[ParameterFile]:
    """Read the files of all parameters in a checkpoint's folder ``zero``.

    Raises:
        DamagedCheckpointError: a parameter has no fp32 weights.
    """
    for place in sorted(path for path in folder.iterdir() if path.is_dir()):
        if not (place / f"{MASTER}.pt").exists():
            raise DamagedCheckpointError(f"`{place}` must hold fp32.pt, but does not; convert it again")
        for path in sorted(place.glob("*.pt")):
            yield parameter_file(path, load)


def parameter_file(path: Path, load: Open) -> ParameterFile:
    """Read one file of a parameter."""
    content = load(path)
    # From stage 3 the file holds the tensor itself, from other stages a dictionary with it and facts.
    facts = content if isinstance(content, Mapping) and "param" in content else {"param": content}
    return ParameterFile(path.parent.name, path.stem, facts, facts["param"])


def optimizer_facts(folder: Path, load: Open) -> Saved:
    """The optimizer's state besides tensors; empty if the checkpoint has none."""
    path = folder / "optimizer_state.pt"
    return load(path) if path.exists() else {}


def read_universal(folder: Path, shapes: Shapes) -> OptimizerStates:
    """Read masters and moments from a checkpoint's folder ``zero``.

    Args:
        folder: the folder.
        shapes: shapes of parameters, because tensors from stage 3 are stored flat.

    Raises:
        DamagedCheckpointError: a parameter has no fp32 weights.
        CheckpointError: a file names a class that is not known.
    """
    tensors: dict[tuple[str, str], Joined] = {}
    steps: list[Saved] = []
    for file in parameter_files(folder, load_states):
        name, value = file.parameter, file.value
        if file.kind == STEP:
            steps.append({"step": value})
        elif isinstance(value, Tensor):
            kind = WEIGHT if file.kind == MASTER else file.kind
            tensors[name, kind] = Joined(shapes.get(name, tuple(value.shape)), (value.reshape(-1),))
    saved = optimizer_facts(folder, load_states)
    groups = saved.get("param_groups", ())
    # From stage 3 there is no step.pt, but the optimizer's own state has the count.
    updates = count_updates(steps or saved.get("optimizer_state_dict", {}).get("state", {}), groups)
    return OptimizerStates(tensors, groups, updates, Scale.of(saved))
