"""`ForeignFolder`: DeepSpeed's checkpoint of one tag, seen as whole logical tensors.

Files are memory-mapped, and a tensor is joined from the ranks' slices when it is read, so memory is needed
for one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from megazero.checkpoint.part import Key, Part, Source
from megazero.errors import CheckpointError
from megazero.formats.deepspeed.facts import ForeignFacts, read_facts
from megazero.formats.deepspeed.files import UNIVERSAL, TagFiles
from megazero.formats.deepspeed.pickles import load_states
from megazero.formats.deepspeed.states import OptimizerStates, read_sharded, read_unsharded
from megazero.formats.deepspeed.universal import read_universal
from megazero.formats.deepspeed.vectors import Joined, Shapes, cut_parameters
from megazero.formats.pickles import Saved

Groups = Sequence[Shapes]
"""The parameters of each group of an optimizer, in its order."""


class ForeignFolder:
    """The tensors and facts of one tag; a `Source`.

    Weights are the optimizer's fp32 masters if these are read, else the model's own, in its dtype.

    Args:
        files: the tag's files.
        groups: the optimizer's groups in the present run, to name the parameters of stage 0, whose files do
            not; without them, the masters of stage 0 are not read.
        optimizer: whether to read the optimizer files. At stage 3 they are read anyway, as the model files
            have no weights.

    Attributes:
        facts: everything but tensors.
        shapes: logical tensor -> its shape.
        frozen: names of the parameters that were not trained.
        buffers: names of the buffers.
        shared: another name of a parameter -> the name of its tensors.

    Raises:
        CheckpointError: files name a class that is not known, belong to several tensor-parallel ranks, or
            hold something that is not supported.
        DamagedCheckpointError: a file is missing or cannot be read.
    """

    def __init__(self, files: TagFiles, groups: Groups = (), *, optimizer: bool = True):
        self.files = files
        self._tensors: dict[Key, Joined] = {}
        self._from_optimizer: set[Key] = set()
        self.buffers: set[str] = set()
        self.frozen: set[str] = set()
        self.shared: dict[str, str] = {}
        if files.experts:
            raise CheckpointError(
                f"`{files.folder}` must hold no experts in files of their own, but has "
                f"{files.experts[0].name}; load them into a model of DeepSpeed's and save their weights"
            )
        result: list[OptimizerStates] = []
        ranks = files.model_ranks()
        for rank in ranks:
            model = load_states(files.model[min(key for key in files.model if key[0] == rank)])
            self._add_module(model)
            wanted = optimizer or any(_is_empty(value) for value in (model.get("module") or {}).values())
            states = self._optimizer(rank, model, groups) if wanted else None
            if states is not None:
                result.append(states)
                self._add(states)
        for number, path in files.layers.items():
            for name, value in load_states(path).items():
                self._put(Key(f"{number}.{name}"), value)
        first = load_states(files.model[ranks[0], min(data for m, data in files.model if m == ranks[0])])
        states = result[0] if result else OptimizerStates()
        self.facts: ForeignFacts = read_facts(
            first, max((entry.updates for entry in result), default=None), states.groups, states.scale
        )
        self.dp_world_size = first.get("dp_world_size")

    @property
    def shapes(self) -> Mapping[Key, tuple[int, ...]]:
        """The shapes of all tensors, once under each of a parameter's names."""
        own = {key: joined.shape for key, joined in self._tensors.items()}
        return own | {Key(alias, key.kind): own[key] for alias, key in self._aliases()}

    def _aliases(self) -> Iterable[tuple[str, Key]]:
        kinds = {key.kind for key in self._tensors}
        for alias, name in self.shared.items():
            for kind in kinds:
                if (key := Key(name, kind)) in self._tensors and Key(alias, kind) not in self._tensors:
                    yield alias, key

    def tensor(self, key: Key) -> Tensor:
        """Join a whole logical tensor."""
        if key not in self._tensors:
            key = Key(self.shared[key.name], key.kind)
        return self._tensors[key].whole()

    def read(self, parts: Iterable[Part]) -> None:
        """Fill the memory of parts; see `Source`."""
        for part in parts:
            part.tensor.copy_(self.tensor(part.key)[part.box.slices])

    def _optimizer(self, rank: int, model: Saved, groups: Groups) -> OptimizerStates | None:
        """Masters and moments of a model-parallel rank; None if the run had no optimizer."""
        if self.files.universal:
            known = {
                name: tuple(shape)
                for group in model.get("param_shapes") or ()
                for name, shape in group.items()
            }
            return read_universal(self.files.folder / UNIVERSAL, known)
        if not any(of == rank for of, _ in self.files.optimizer):
            # Stages 1 to 3 write `param_shapes`; only without these does the model file have the optimizer.
            if model.get("param_shapes") is None:
                return read_unsharded(model.get("optimizer"), groups, self.files.folder)
            if not model.get("dp_world_size"):
                return None
            self.files.of_optimizer(rank, int(model["dp_world_size"]))
        return read_sharded(self.files, rank, model)

    def _add_module(self, model: Saved) -> None:
        module = model.get("module") or {}
        self.buffers |= set(model.get("buffer_names") or ())
        self.shared |= model.get("shared_params") or {}
        self.frozen |= set(model.get("frozen_param_shapes") or ())
        owners: dict[object, str] = {}
        for name, value in module.items():
            if not isinstance(value, Tensor):
                continue
            # Tied parameters are pickled with one storage. At stage 3 it is empty, but still the same one.
            place = value.untyped_storage()._cdata, value.storage_offset(), value.shape, value.stride()
            kept = owners.setdefault(place, name)
            if kept != name:
                self.shared.setdefault(name, kept)
            elif not _is_empty(value):
                self._put(Key(name), value)
        if any(Key(name) not in self._tensors for name in model.get("frozen_param_shapes") or ()):
            self._add_frozen(model)

    def _add_frozen(self, model: Saved) -> None:
        """Add frozen parameters, which lie beside the module; at stage 3 each rank's file has its slices."""
        every = [model["frozen_param_fragments"]]
        if any(
            every[0][name].numel() < shape.numel() for name, shape in model["frozen_param_shapes"].items()
        ):
            paths = self.files.of_model(self.files.model_ranks()[0], int(model["dp_world_size"]))
            every = [load_states(path)["frozen_param_fragments"] for path in paths]
        for name, shape in model["frozen_param_shapes"].items():
            slices = [fragments[name].reshape(-1) for fragments in every]
            for _, joined in cut_parameters(slices, {name: tuple(shape)}):
                self._tensors[Key(name)] = joined

    def _put(self, key: Key, value: Tensor) -> None:
        before, joined = self._tensors.get(key), Joined(tuple(value.shape), (value,))
        self._check_same(key, before, joined)
        if before is None:
            self._tensors[key] = joined

    def _add(self, states: OptimizerStates) -> None:
        """Add masters and moments; masters replace the model's rounded weights."""
        for (name, kind), joined in states.tensors.items():
            key = Key(name, kind)
            if key in self._from_optimizer:
                self._check_same(key, self._tensors[key], joined)
            self._tensors[key] = joined
            self._from_optimizer.add(key)

    def _check_same(self, key: Key, before: Joined | None, joined: Joined) -> None:
        """Refuse tensor-parallel slices. Pipeline stages pass: two may have the same tied tensor."""
        if before is not None and (
            before.shape != joined.shape or not torch.equal(before.whole(), joined.whole())
        ):
            raise CheckpointError(
                f"`{self.files.folder}` must be of one tensor-parallel rank, but `{key}` differs between its "
                "model-parallel ranks; merge their slices with the tools of the model's own library"
            )


def _is_empty(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1 and value.numel() == 0


_: type[Source] = ForeignFolder
