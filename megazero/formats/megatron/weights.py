"""The tensors of a checkpoint by their names there, at hand or read when asked for; forms of experts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from megazero.errors import CheckpointError
from megazero.formats.megatron.dialects import EXPERT

Weights = Mapping[str, Tensor]
"""The tensors of one model chunk on one rank, by their names there."""

Load = Callable[[], Tensor]
"""Read or join one tensor."""

_NUMBERED = re.compile(r"(.*mlp\.experts\.)(linear_fc[12]\.(?:weight|bias))(\d+)")
_TOGETHER = re.compile(r"(.*mlp\.experts\.)weight([12])")


class Lazy(Mapping[str, Tensor]):
    """Tensors by name, each loaded anew when it is asked for."""

    def __init__(self, loads: Mapping[str, Load]):
        self.loads = loads

    def __getitem__(self, name: str) -> Tensor:
        return self.loads[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self.loads)

    def __len__(self) -> int:
        return len(self.loads)


def one_by_one(weights: Weights, arguments: Mapping[str, Any]) -> Weights:
    """The same weights with a tensor for each of a rank's experts, as Megatron-Core's `SequentialMLP` has.

    Args:
        weights: the tensors; `TEGroupedMLP` has the expert's number at the end of its name, `GroupedMLP` all
            of a rank in one, [h, x m] for the first matrix and [x m, h] for the second, transposed.
        arguments: Megatron's arguments.

    Raises:
        CheckpointError: the arguments do not say how many experts a rank has.
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
    """The experts of an expert-parallel rank, by the numbers that they have among those of all ranks."""
    own = [(match, tensor) for name, tensor in weights.items() if (match := EXPERT.fullmatch(name))]
    count = 1 + max((int(match[2]) for match, _ in own), default=-1)
    for match, tensor in own:
        yield f"{match[1]}{rank * count + int(match[2])}.{match[3]}", tensor
