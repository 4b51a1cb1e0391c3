"""Tensors of a checkpoint by their names there, loaded or lazy; and the forms in which experts are stored."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from megazero.errors import CheckpointError
from megazero.formats.megatron.dialects import EXPERT, Arguments

Weights = Mapping[str, Tensor]
"""The tensors of one model chunk on one rank, by their names in the file."""

Load = Callable[[], Tensor]
"""Reads or joins one tensor."""

_NUMBERED = re.compile(r"(.*mlp\.experts\.)(linear_fc[12]\.(?:weight|bias))(\d+)")
_TOGETHER = re.compile(r"(.*mlp\.experts\.)weight([12])")


class Lazy(Mapping[str, Tensor]):
    """Tensors by name, each loaded anew on every access."""

    def __init__(self, loads: Mapping[str, Load]):
        self.loads = loads

    def __getitem__(self, name: str) -> Tensor:
        return self.loads[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self.loads)

    def __len__(self) -> int:
        return len(self.loads)


def one_by_one(weights: Weights, arguments: Arguments) -> Weights:
    """Bring experts into the form of Megatron-Core's `SequentialMLP`, which has tensors for each expert.

    `TEGroupedMLP` has the expert's number at the end of the name. `GroupedMLP` has all experts of a rank in
    one tensor, transposed: [hidden, experts x width] for the first matrix, [experts x width, hidden] for the
    second.

    Raises:
        CheckpointError: the arguments do not give the number of a rank's experts.
    """
    out: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if match := _NUMBERED.fullmatch(name):
            out[f"{match[1]}local_experts.{match[3]}.{match[2]}"] = tensor
        elif match := _TOGETHER.fullmatch(name):
            count, hidden = arguments.get("num_experts"), arguments.get("hidden_size")
            ranks = arguments.get("expert_model_parallel_size") or 1
            if not (isinstance(count, int) and isinstance(hidden, int) and isinstance(ranks, int)):
                raise CheckpointError(
                    f"`num_experts` and `hidden_size` must be numbers to split {name}, but are {count!r} and "
                    f"{hidden!r}; give them with --megatron-args"
                )
            shape = (count // ranks, hidden, -1) if match[2] == "1" else (count // ranks, -1, hidden)
            for number, matrix in enumerate(tensor.view(shape).transpose(1, 2)):
                out[f"{match[1]}local_experts.{number}.linear_fc{match[2]}.weight"] = matrix
        else:
            out[name] = tensor
    return out


def experts_moved(weights: Weights, rank: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an expert-parallel rank's experts, renumbered among the experts of all ranks."""
    own = [(match, tensor) for name, tensor in weights.items() if (match := EXPERT.fullmatch(name))]
    count = 1 + max((int(match[2]) for match, _ in own), default=-1)
    for match, tensor in own:
        yield f"{match[1]}{rank * count + int(match[2])}.{match[3]}", tensor
