"""Universal checkpoints of Megatron-DeepSpeed, seen as one stage on one rank.

Beside the folder of parameters are the ranks' files ``mp_rank_MM_model_states.pt`` of the original
checkpoint.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from megazero.errors import CheckpointError
from megazero.formats.deepspeed.files import UNIVERSAL
from megazero.formats.deepspeed.universal import (
    MASTER,
    STEP,
    Open,
    ParameterFile,
    optimizer_facts,
    parameter_file,
    parameter_files,
)
from megazero.formats.megatron.dialects import core_name, prefix_of_layer_file
from megazero.formats.megatron.folder import MegatronFiles
from megazero.formats.megatron.inventory import IN_USE, Inventory, SavedTensor, TensorRecord
from megazero.formats.megatron.stages import Header, Opened, numbers_in, read_header
from megazero.formats.megatron.weights import Lazy, Load, Weights
from megazero.formats.megatron.zero_files import counts_of
from megazero.formats.pickles import KEPT, load_pickle

_JOINED_BY_HALVES = "param_n_sub_params"
_FIRST_LAYER = ".layers.0."


class UniversalStages(Opened):
    """The tensors of a universal checkpoint, each read on access.

    Args:
        files: the files.
        inert: classes whose objects are not needed, by full name.

    Attributes:
        headers: the headers of the ranks' files; the first has the counts of updates.
        inventories: kind -> the tensors of this kind, by Core's names.

    Raises:
        CheckpointError: DeepSpeed's converter joined a tensor in the wrong order.
        DamagedCheckpointError: a file cannot be read.
    """

    def __init__(self, files: MegatronFiles, inert: Iterable[str] = ()):
        self.files = files
        self.headers: dict[Path, Header] = {path: read_header(path, inert) for path in files.ranks}
        folder = files.folder / UNIVERSAL
        load = partial(load_pickle, inert=tuple(inert), known=KEPT)
        self._tensors: dict[str, Load] = {}
        header = self.headers[files.ranks[0]]
        inventories: dict[str, dict[str, TensorRecord]] = defaultdict(dict)
        whole = _whole_names(path.name for path in folder.iterdir() if path.is_dir())
        steps = []
        for file in parameter_files(folder, load):
            called = core_name(whole[file.parameter])
            if file.kind == STEP:
                steps.append({STEP: file.value})
            elif isinstance(file.value, Tensor) and called is not None:
                _check_joined(folder, called, file, header)
                kind = IN_USE if file.kind == MASTER else file.kind
                place = f"{kind}/{called}"
                path = folder / file.parameter / f"{file.kind}.pt"
                self._tensors[place] = partial(_tensor, path, load)
                saved = SavedTensor(0, "model", place)
                record = TensorRecord(saved, (tuple(file.value.shape),), (file.value.dtype,))
                inventories[kind][called] = record
        self.inventories: Mapping[str, Inventory] = inventories
        beside = optimizer_facts(folder, load)
        counted = {"steps": steps, "param_groups": beside.get("param_groups")}
        numbers = numbers_in(counts_of({**beside, "base_optimizer_state": counted}))
        self.headers[files.ranks[0]] = replace(header, numbers=numbers)

    def close(self) -> None:
        """Keep no file open."""

    def chunks(self, stage: int) -> Mapping[str, tuple[Weights, ...]]:
        """The only model chunk, of the only rank."""
        return {"model": (Lazy(self._tensors),)}


def _tensor(path: Path, load: Open) -> Tensor:
    value = parameter_file(path, load).value
    assert isinstance(value, Tensor), "it was one when the file was first opened"
    return value


def _whole_names(names: Iterable[str]) -> dict[str, str]:
    """Name of a parameter -> its name in a whole model; a pipeline's names begin with the module's number."""
    whole: dict[str, str] = {}
    modules: dict[int, dict[str, str]] = defaultdict(dict)
    for name in names:
        head, _, rest = name.removeprefix("module.").partition(".")
        if head == "tied_modules":
            whole[name] = f"{prefix_of_layer_file(['word_embeddings.weight'])}{rest.partition('.')[2]}"
        elif head.isdecimal():
            modules[int(head)][rest] = name
        else:
            whole[name] = name
    layer = 0
    for _, inner in sorted(modules.items()):
        prefix = prefix_of_layer_file(inner)
        if _FIRST_LAYER in prefix:
            prefix, layer = prefix.replace(_FIRST_LAYER, f".layers.{layer}."), layer + 1
        whole |= {name: prefix + rest for rest, name in inner.items()}
    return whole


def _check_joined(folder: Path, name: str, file: ParameterFile, header: Header) -> None:
    """Refuse fused tensors (gate and value; q, k and v) whose ranks' slices were simply concatenated."""
    arguments = header.arguments or {}
    if arguments.get("tensor_model_parallel_size", 1) in (None, 1):
        return
    gated = ".mlp.linear_fc1." in name and arguments.get("swiglu")
    halves = gated and file.facts.get(_JOINED_BY_HALVES) != 2
    if halves or (".linear_qkv." in name and header.version < 2):
        raise CheckpointError(
            f"`{folder}` must hold {file.parameter} as it is in a whole model, but has the ranks' one behind "
            f"the other, each of several parts; name the checkpoint that it was made from"
        )
