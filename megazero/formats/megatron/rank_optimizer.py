"""The optimizer's state in the files of Megatron-LM's ranks: numbered tensors, or one flat buffer.

Neither form names parameters. Numbers run through the optimizer's groups, each of which has some of the
model's parameters in the model's order; a buffer has all parameters, the last first, with gaps for alignment.
Masters prove that parameters were identified correctly: rounded, they must equal the model's weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.checkpoint.part import WEIGHT
from megazero.errors import CheckpointError
from megazero.formats.megatron.dialects import HEAD, HEAD_COPY, WORD, Arguments, core_name
from megazero.formats.pickles import Saved, parsed

DISTRIBUTED = "distrib_optim.pt"
"""The file, beside the model's, of an optimizer that is sharded over data-parallel ranks."""

MOMENTS = ("exp_avg", "exp_avg_sq")
"""The kinds of Adam's moments, in Megatron and in megazero."""

# Megatron's default bucket size: the larger of these, the second one times the data-parallel ranks.
_BUCKET, _BUCKET_OF_RANK = 40_000_000, 1_000_000
_REMEDY = (
    "import without --with-optimizer, or first save it as torch_dist, with Megatron-LM's "
    "--ckpt-convert-format torch_dist"
)
_SMALL_NORMS = (".q_layernorm.", ".k_layernorm.")
_VOCABULARY = (WORD, HEAD, HEAD_COPY)


@dataclass(frozen=True)
class Parameter:
    """A parameter of a rank: its model chunk, its name there, its weight, and whether it has weight decay."""

    chunk: str
    name: str
    weight: Tensor
    decays: bool

    @property
    def core(self) -> str:
        """Core's name."""
        return core_name(self.name) or ""

    @property
    def is_expert(self) -> bool:
        """Whether it belongs to a routed expert."""
        return ".mlp.experts." in self.name


States = Mapping[str, Mapping[str, Mapping[str, Tensor]]]
"""Kind -> model chunk -> name -> tensor."""


def parameters_of(chunks: Mapping[str, Mapping[str, Tensor]], arguments: Arguments) -> list[Parameter]:
    """The parameters among the tensors of a rank's model chunks, in the model's order.

    Norms and biases have no weight decay; with `apply_wd_to_qk_layernorm`, norms of queries and keys have.
    """
    decayed = _SMALL_NORMS if arguments.get("apply_wd_to_qk_layernorm") else ()
    return [
        Parameter(chunk, name, tensor, plain or any(norm in name for norm in decayed))
        for chunk, weights in chunks.items()
        for name, tensor in weights.items()
        if core_name(name) is not None and not name.endswith(".expert_bias")
        for plain in (tensor.dim() > 1 and not name.endswith(".bias"),)
    ]


def read_states(
    path: Path, optimizer: object, parameters: Sequence[Parameter], buffers: object, arguments: Arguments
) -> States:
    """The masters and moments of a rank.

    Args:
        path: the rank's file, for messages.
        optimizer: the optimizer's entry in that file.
        parameters: the rank's parameters.
        buffers: the contents of `DISTRIBUTED`; None if there is no such file.
        arguments: Megatron's arguments.

    Raises:
        CheckpointError: there is no state, it is not Adam's, or its tensors cannot be identified for certain;
            DamagedCheckpointError if it has another structure.
    """
    states: dict[str, dict[str, dict[str, Tensor]]] = {}
    tensors = (
        _numbered(path, optimizer, parameters)
        if buffers is None
        else _buffered(path, buffers, parameters, arguments)
    )
    seen: set[tuple[str, str, str]] = set()
    file = path if buffers is None else path.with_name(DISTRIBUTED)
    with parsed(file, "an optimizer's state as Megatron-LM saves it"):
        for parameter, kind, tensor in tensors:
            place = kind, parameter.chunk, parameter.name
            if place in seen or tensor.shape != parameter.weight.shape:
                wrong = f"the {kind} of {parameter.name} is there twice or has {list(tensor.shape)}"
                raise _unidentified(path, wrong)
            seen.add(place)
            if kind == WEIGHT and not torch.equal(tensor.to(parameter.weight.dtype), parameter.weight):
                raise _unidentified(path, f"the master of {parameter.name} is not its weight, more exactly")
            states.setdefault(kind, {}).setdefault(parameter.chunk, {})[parameter.name] = tensor
    lacking = [p.name for p in parameters for kind in MOMENTS if (kind, p.chunk, p.name) not in seen]
    if lacking:
        raise CheckpointError(
            f"`{path}` must hold Adam's two moments of each parameter to go on from, but lacks those of "
            f"{lacking[0]}; import without --with-optimizer"
        )
    return states


def _unidentified(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"`{path}` must hold the optimizer's state in an order that is known, but {why}; {_REMEDY}"
    )


def _numbered(
    path: Path, optimizer: object, parameters: Sequence[Parameter]
) -> Iterator[tuple[Parameter, str, Tensor]]:
    """Tensors of optimizers that have their whole state on each rank, and number parameters."""
    chained = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    inner = [_inner(path, one) for one in chained]
    every = [group for torch_state in inner for group in torch_state["param_groups"]]
    apart = [flag for flag in ("is_expert_parallel", "is_decoupled_lr") if any(g.get(flag) for g in every)]
    left = list(parameters)
    for one, torch_state in zip(chained, inner, strict=True):
        masters = one.get("fp32_from_fp16_params", one.get("fp32_from_fp16"))
        if masters is not None and len(masters) != len(torch_state["param_groups"]):
            groups = len(torch_state["param_groups"])
            raise _unidentified(path, f"it has masters of {len(masters)} of {groups} groups")
        for at, group in enumerate(torch_state["param_groups"]):
            numbers = group["params"]
            saved = [torch_state["state"].get(number, {}) for number in numbers]
            own = _members(path, group, saved, left, apart)
            left = [p for p in left if all(p is not other for other in own)]
            halves = [p for p in own if p.weight.dtype in (torch.float16, torch.bfloat16)]
            own_masters = [] if masters is None else masters[at]
            if masters is not None and len(own_masters) != len(halves):
                raise _unidentified(path, f"a group has {len(own_masters)} masters of {len(halves)} weights")
            for parameter, master in zip(halves, own_masters, strict=masters is not None):
                yield parameter, WEIGHT, master.detach()
            for parameter, state in zip(own, saved, strict=True):
                for kind in MOMENTS:
                    if isinstance(state.get(kind), Tensor):
                        yield parameter, kind, state[kind]


def _inner(path: Path, optimizer: Any) -> Saved:
    """The state of torch's optimizer within that of Megatron's wrapper."""
    if isinstance(optimizer, Mapping):
        for name in ("optimizer", "optimizer_state_dict"):
            if isinstance(optimizer.get(name), Mapping):
                optimizer = optimizer[name]
                break
        state, groups = optimizer.get("state"), optimizer.get("param_groups")
        if isinstance(state, Mapping) and isinstance(groups, (list, tuple)):
            return dict(optimizer)
        if groups is not None:
            raise CheckpointError(
                f"`{path.with_name(DISTRIBUTED)}` must lie beside {path.name}, whose optimizer has its state "
                f"there, but does not; copy all files, or import without --with-optimizer"
            )
    raise CheckpointError(
        f"`{path}` must hold the optimizer's state to go on from, but holds none; import without "
        f"--with-optimizer"
    )


def _members(
    path: Path,
    group: Saved,
    saved: Sequence[Saved],
    left: Sequence[Parameter],
    apart: Sequence[str],
) -> list[Parameter]:
    """A group's parameters among those `left`, by its weight decay, its flags in `apart`, and shapes."""
    if not saved:
        return []
    shapes = [tuple(state[MOMENTS[0]].shape) if MOMENTS[0] in state else None for state in saved]
    fitting = []
    decays = [bool(group["wd_mult"])] if "wd_mult" in group else [True, False]
    for decayed in decays:
        own = [p for p in left if p.decays == decayed]
        if "is_expert_parallel" in apart:
            own = [p for p in own if p.is_expert == bool(group.get("is_expert_parallel"))]
        if "is_decoupled_lr" in apart:
            own = [p for p in own if (p.core in _VOCABULARY) == bool(group.get("is_decoupled_lr"))]
        if [tuple(p.weight.shape) for p in own] == shapes:
            fitting.append(own)
    if len(fitting) != 1:
        raise _unidentified(path, f"a group of {len(saved)} parameters is none of the model's")
    return fitting[0]


def _buffered(
    path: Path, buffers: object, parameters: Sequence[Parameter], arguments: Arguments
) -> Iterator[tuple[Parameter, str, Tensor]]:
    """Tensors in the buffers of an optimizer that is sharded over data-parallel ranks."""
    chained = buffers if isinstance(buffers, (list, tuple)) else [buffers]
    parts = [list(parameters)]
    if len(chained) == 2:
        parts = [[p for p in parameters if p.is_expert == expert] for expert in (False, True)]
    if len(chained) > 2 or not all(isinstance(one, Mapping) for one in chained):
        raise _unidentified(path, f"its optimizer consists of {len(chained)}")
    for one, own in zip(chained, parts, strict=True):
        if one.get("buckets_coalesced") is not True:
            raise _unidentified(path, f"{DISTRIBUTED} has its buckets one by one, as older releases had")
        numbers = sorted(number for number in one if isinstance(number, int))
        runs = [
            [p for p in own if (p.chunk, p.weight.dtype) == run]
            for run in dict.fromkeys((p.chunk, p.weight.dtype) for p in own)
        ]
        if len(numbers) != len(runs):
            wrong = f"{DISTRIBUTED} has {len(numbers)} buffers of {len(runs)} kinds of weights"
            raise _unidentified(path, wrong)
        for number, run in zip(numbers, runs, strict=True):
            kinds = list(one[number].values()) if isinstance(one[number], Mapping) else []
            buffer = kinds[0] if len(kinds) == 1 and isinstance(kinds[0], Mapping) else {}
            if not isinstance(buffer.get("param"), Tensor):
                raise _unidentified(path, f"{DISTRIBUTED} has no masters of one kind of weights at {number}")
            yield from _of_buffer(path, buffer, run[::-1], arguments)


def _of_buffer(
    path: Path, buffer: Saved, parameters: Sequence[Parameter], arguments: Arguments
) -> Iterator[tuple[Parameter, str, Tensor]]:
    """Tensors in one buffer, given the parameters in its order."""
    # A checkpoint says little of bucket size, alignment, and whether the embedding has a bucket of its own:
    # all layouts are tried, and the right one gives the weights.
    sizes = [parameter.weight.numel() for parameter in parameters]
    vocabulary = [parameter.core in _VOCABULARY for parameter in parameters]
    total = buffer["param"].numel()
    layouts = {
        tuple(offsets): None
        for offsets, end in (
            _layout(sizes, alone, bucket, align)
            for bucket in (None, *_buckets(arguments))
            for alone in ([False] * len(sizes), vocabulary)
            for align in (64, 1)
        )
        if end == total
    }
    fitting = [
        offsets
        for offsets in layouts
        if all(
            torch.equal(_cut(buffer["param"], at, p).to(p.weight.dtype), p.weight)
            for at, p in zip(offsets, parameters, strict=True)
        )
    ]
    if len(fitting) != 1:
        wrong = f"{len(fitting)} ways to lay parameters out in {DISTRIBUTED} give the weights"
        raise _unidentified(path, wrong)
    for at, parameter in zip(fitting[0], parameters, strict=True):
        for kind, name in ((WEIGHT, "param"), *((kind, kind) for kind in MOMENTS)):
            if isinstance(buffer.get(name), Tensor) and buffer[name].numel() == total:
                yield parameter, kind, _cut(buffer[name], at, parameter)


def _cut(flat: Tensor, at: int, parameter: Parameter) -> Tensor:
    return flat[at : at + parameter.weight.numel()].view(parameter.weight.shape)


def _buckets(arguments: Arguments) -> Iterable[int]:
    """The bucket sizes, in elements, that a buffer may have been made with."""
    size, ranks = arguments.get("ddp_bucket_size"), arguments.get("data_parallel_size")
    if isinstance(size, int):
        yield size
    copies = arguments.get("context_parallel_size") or 1
    if isinstance(ranks, int) and isinstance(copies, int):
        yield from (max(_BUCKET, _BUCKET_OF_RANK * count) for count in (ranks, ranks * copies))


def _layout(
    sizes: Sequence[int], alone: Sequence[bool], bucket: int | None, align: int
) -> tuple[list[int], int]:
    """The offsets of parameters in a buffer without gaps between its buckets, and the end of the last one.

    Args:
        sizes: the parameters' elements, in the buffer's order.
        alone: whether each has a bucket of its own.
        bucket: the number of elements at which another bucket is begun; None for one bucket.
        align: the alignment of offsets within a bucket, in elements.
    """
    offsets: list[int] = []
    base = inside = count = 0
    for size, own in zip(sizes, alone, strict=True):
        inside = math.ceil(inside / align) * align
        if own and count:
            base, inside, count = base + inside, 0, 0
        offsets.append(base + inside)
        inside, count = inside + size, count + 1
        if own or (bucket is not None and inside >= bucket):
            base, inside, count = base + inside, 0, 0
    return offsets, base + inside
