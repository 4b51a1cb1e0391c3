"""Opens the files of a checkpoint of Megatron's ranks, one pipeline stage at a time."""

from __future__ import annotations

import argparse
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megazero.errors import CheckpointError
from megazero.formats.megatron.dialects import Arguments, prefix_of_layer_file
from megazero.formats.megatron.folder import CheckpointForm, MegatronFiles
from megazero.formats.megatron.hybrid import kind_by_kind
from megazero.formats.megatron.rank_optimizer import DISTRIBUTED, parameters_of, read_states
from megazero.formats.megatron.weights import Lazy, Load, Weights, experts_moved, one_by_one
from megazero.formats.megatron.zero_files import check_masters, read_zero
from megazero.formats.pickles import Inert, PositionEmbedding, Saved, load_pickle

_MODEL = re.compile(r"model\d*")
_DEEPEST = 16
_DEEPEST_NUMBER = 8
_NUMBERS = frozenset({"step", "common_step", "scale", "growth_tracker", "hysteresis_tracker"})


@dataclass(frozen=True)
class Header:
    """The contents of a rank's file besides its weights.

    Attributes:
        arguments: Megatron's arguments, or None.
        iteration: the iteration after which it was saved, or None.
        version: the checkpoint's version; the oldest files have none, which is version 0.
        original_vocab_size: entries before padding, or None.
        numbers: numbers in the optimizer's groups, loss scaler and schedule, by name.
    """

    arguments: Arguments | None
    iteration: int | None
    version: float
    original_vocab_size: int | None
    numbers: Mapping[str, Sequence[float]] = field(default_factory=dict)


class Opened(Protocol):
    """An open checkpoint: its files, the headers of its rank files, and its tensors by pipeline stage."""

    files: MegatronFiles
    headers: dict[Path, Header]

    def close(self) -> None: ...

    def chunks(self, stage: int) -> Mapping[str, tuple[Weights, ...]]:
        """The model chunks of a stage, by their names in its files, each with the weights of every rank."""


class RankStages(Opened):
    """A checkpoint with a file for each rank or layer; the files of the stage that was read last stay open.

    Args:
        files: the files.
        inert: classes whose objects are not needed, by full name.
        with_optimizer: whether to open masters and moments too, in chunks with names like ``exp_avg/model``.

    Attributes:
        headers: the headers of the rank files that have been opened.

    Raises:
        CheckpointError: in all methods: a file names a class or function that is not allowed, or has another
            structure; DamagedCheckpointError if it cannot be read.
    """

    def __init__(self, files: MegatronFiles, inert: Iterable[str] = (), *, with_optimizer: bool = False):
        self.files = files
        self.headers: dict[Path, Header] = {}
        self._inert = tuple(inert)
        self._with_optimizer = with_optimizer
        self._zero: dict[Path, Mapping[str, Lazy]] = {}
        self._opened: tuple[int, Mapping[str, tuple[Weights, ...]]] | None = None
        if files.form is CheckpointForm.LAYERS:
            for path in files.ranks:
                self._load(path)
        if files.form is CheckpointForm.MEGATRON and len(files.stages) > 1 and not files.experts:
            self._load(files.ranks[0])
            arguments = self.headers[files.ranks[0]].arguments or {}
            stages = arguments.get("pipeline_model_parallel_size")
            # Without a pipeline, the second number in a folder's name is the expert-parallel rank.
            if stages == 1 and arguments.get("expert_model_parallel_size") == len(files.stages):
                self.files = files.by_experts

    def close(self) -> None:
        """Close the files."""
        self._opened = None
        self._zero.clear()

    def chunks(self, stage: int) -> Mapping[str, tuple[Weights, ...]]:
        """See `Opened`."""
        if self._opened is None or self._opened[0] != stage:
            self._opened = None  # close the files of one stage before opening the next
            ranks = [self._weights(path) for path in self.files.stages[stage]]
            if any(rank.keys() != ranks[0].keys() for rank in ranks):
                raise CheckpointError(
                    f"`{self.files.stages[stage][0]}` and its other ranks must hold the same model "
                    f"chunks, but hold {'; '.join(', '.join(rank) for rank in ranks)}; copy all files"
                )
            self._opened = stage, {chunk: tuple(rank[chunk] for rank in ranks) for chunk in ranks[0]}
        return self._opened[1]

    def _weights(self, path: Path) -> dict[str, Weights]:
        """The chunks of a rank's model and optimizer, with the experts of all expert-parallel ranks."""
        chunks = self._chunks(path)
        for number, other in enumerate(self.files.experts.get(path, ()), 1):
            for chunk, weights in self._chunks(other).items():
                chunks[chunk] = {**chunks[chunk], **dict(experts_moved(weights, number))}
        return chunks

    def _chunks(self, path: Path) -> dict[str, Weights]:
        loaded = self._load(path)
        if self.files.form is CheckpointForm.LAYERS:
            names = dict(flatten(path, loaded))
            prefix = prefix_of_layer_file(names)
            weights = {prefix + name: tensor for name, tensor in names.items()}
            zero = self._of_layer(path, prefix, names) if self._with_optimizer else {}
            return {"model": weights, **{f"{kind}/model": tensors for kind, tensors in zero.items()}}
        if self.files.form is CheckpointForm.DEEPSPEED:
            named: Saved = {"model": loaded["module"]} if loaded.get("module") is not None else {}
        else:
            named = loaded
        whole = {name: content for name, content in named.items() if _MODEL.fullmatch(str(name))}
        if not whole or whole.keys() not in (
            {"model"},
            {f"model{number}" for number in range(len(whole))},
        ):
            raise CheckpointError(
                f"`{path}` must hold `module`, `model`, or `model0`, `model1` and so on, but holds "
                f"{', '.join(sorted(map(str, named)))[:200] or 'nothing'}; copy all files of the checkpoint"
            )
        arguments = self.headers[path].arguments or {}
        chunks: dict[str, Weights] = {name: dict(flatten(path, part)) for name, part in whole.items()}
        if self._with_optimizer:
            chunks |= self._states(path, loaded, chunks)
        return {
            name: part if isinstance(part, Lazy) else kind_by_kind(one_by_one(part, arguments))
            for name, part in chunks.items()
        }

    def _states(self, path: Path, loaded: Saved, chunks: Mapping[str, Weights]) -> Mapping[str, Weights]:
        """The state of a rank's optimizer, by ``kind/chunk``."""
        if self.files.form is CheckpointForm.DEEPSPEED:
            zero = self._zero_of(path, loaded)
            check_masters(path, zero, chunks["model"])
            return {f"{kind}/model": tensors for kind, tensors in zero.items()}
        beside = path.with_name(DISTRIBUTED)
        buffers = load_pickle(beside, self._inert) if beside.is_file() else None
        arguments = self.headers[path].arguments or {}
        states = read_states(
            path, loaded.get("optimizer"), parameters_of(chunks, arguments), buffers, arguments
        )
        return {f"{kind}/{chunk}": named for kind, of in states.items() for chunk, named in of.items()}

    def _zero_of(self, path: Path, loaded: Saved) -> Mapping[str, Lazy]:
        """The state of a model-parallel rank under ZeRO; adds the counts of updates to its header."""
        shapes = loaded.get("param_shapes")
        zero = read_zero(path.parent, self.files.ranks.index(path), shapes, self._inert)
        self.headers[path] = replace(self.headers[path], numbers=numbers_in(zero.numbers))
        return zero.tensors

    def _of_layer(self, path: Path, prefix: str, weights: Weights) -> Mapping[str, Weights]:
        """The state of a layer; ZeRO's names begin with the layer's number, or with ``tied_modules``."""
        (stage,) = (s for s in self.files.stages if path in s)
        rank, ranks = stage.index(path), self.files.tensor_ranks
        number = re.search(r"layer_0*(\d+)", path.name)
        states: dict[str, dict[str, Load]] = {}
        for file in self.files.ranks[rank::ranks]:
            if file not in self._zero:
                self._zero[file] = self._zero_of(file, self._load(file))
            for kind, tensors in self._zero[file].items():
                for name, load in tensors.loads.items():
                    module, _, plain = name.removeprefix("module.").partition(".")
                    if module == "tied_modules":
                        in_layer = "word_embeddings.weight" in weights
                        plain = plain.partition(".")[2]
                    else:
                        in_layer = number is not None and module == number[1]
                    if in_layer and plain in weights:
                        states.setdefault(kind, {}).setdefault(prefix + plain, load)
        joined = {kind: Lazy(of) for kind, of in states.items()}
        check_masters(path, joined, {prefix + name: tensor for name, tensor in weights.items()})
        return joined

    def _load(self, path: Path) -> Saved:
        loaded = load_pickle(path, self._inert)
        if not isinstance(loaded, Mapping):
            raise CheckpointError(f"`{path}` must hold a mapping, but holds a {type(loaded).__name__}")
        if path in self.files.ranks:
            self.headers[path] = _header(loaded)
        return loaded


def read_header(path: Path, inert: Iterable[str] = ()) -> Header:
    """Read the header of a rank's file.

    Raises:
        CheckpointError: the file names a class or function that is not allowed; DamagedCheckpointError if it
            cannot be read.
    """
    loaded = load_pickle(path, inert)
    return _header(loaded if isinstance(loaded, Mapping) else {})


def _header(loaded: Saved) -> Header:
    arguments = loaded.get("args")
    if isinstance(arguments, argparse.Namespace):
        arguments = vars(arguments)
    iteration, version = loaded.get("iteration"), loaded.get("checkpoint_version")
    universal = loaded.get("universal_checkpoint_info")
    size = universal.get("original_vocab_size") if isinstance(universal, Mapping) else None
    return Header(
        {str(name): _plain(value) for name, value in arguments.items()}
        if isinstance(arguments, Mapping)
        else None,
        iteration if isinstance(iteration, int) else None,
        float(version) if isinstance(version, (int, float)) else 0.0,
        size if isinstance(size, int) else None,
        numbers_in([loaded.get("optimizer"), loaded.get("opt_param_scheduler")]),
    )


def numbers_in(tree: object) -> Mapping[str, Sequence[float]]:
    """Collect the values of `_NUMBERS` in nested mappings and lists, by name, as plain numbers."""
    numbers: dict[str, list[float]] = defaultdict(list)
    for name, value in _named(tree):
        numbers[name].append(value)
    return dict(numbers)


def _named(tree: object, depth: int = 0) -> Iterator[tuple[str, float]]:
    if depth > _DEEPEST_NUMBER:
        return
    if isinstance(tree, Mapping):
        for name in _NUMBERS & tree.keys():
            if (value := _number(tree[name])) is not None:
                yield name, value
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        for inner in tree:
            yield from _named(inner, depth + 1)


def _number(value: object) -> float | None:
    """The value as a number, which may be in a tensor of one element; None for others."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def _plain(value: object) -> object:
    """Return values that can be compared and printed; replace all others by `Inert`."""
    if isinstance(value, (list, tuple)):
        return tuple(_plain(item) for item in value)
    return value if isinstance(value, (bool, int, float, str, PositionEmbedding, type(None))) else Inert()


def flatten(path: Path, tree: object, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested mappings, with names joined by dots; other values are left out.

    Raises:
        CheckpointError: a name is not a string, mappings are nested too deeply, or a tensor is not dense.
    """
    if depth > _DEEPEST:
        raise CheckpointError(
            f"`{path}` must hold a model's weights, but nests mappings more than {_DEEPEST} deep"
        )
    if not isinstance(tree, Mapping):
        raise CheckpointError(f"`{path}` must hold weights by name, but holds a {type(tree).__name__}")
    for name, value in tree.items():
        if not isinstance(name, str):
            raise CheckpointError(f"`{path}` must hold weights by name, but one is called {name!r}")
        if isinstance(value, Mapping):
            yield from flatten(path, value, f"{prefix}{name}.", depth + 1)
        elif isinstance(value, Tensor):
            if value.layout is not torch.strided or value.device.type != "cpu":
                raise CheckpointError(
                    f"`{path}` must hold dense tensors, but {prefix}{name} is {value.layout} on "
                    f"{value.device}"
                )
            yield prefix + name, value
