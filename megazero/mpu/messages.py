"""Exchanging small values (names, reports) between ranks as JSON: nothing received is ever executed.

`gather_values` takes memory for every member on every member, so it is for groups that do not grow with the
job. For all ranks, use the other functions, which ask for one member's value or fold values on the way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megazero.mpu.group import Group, Transfer

_FOLDED = 8  # members whose values are folded by one of them at a time


def same_on_all(group: Group, digest: bytes, device: torch.device | str = "cpu") -> bool:
    """Whether all members have the same 16 bytes; every member calls this."""
    mine = [int.from_bytes(digest[i : i + 4], "big") for i in range(0, 16, 4)]
    largest = torch.tensor([*mine, *(-number for number in mine)], device=device)
    group.all_reduce(largest, "max").wait()
    most, least = largest.view(2, 4).tolist()
    return bool(most == [-number for number in least])


def broadcast_value(group: Group, value: Any, device: torch.device | str = "cpu", source: int = 0) -> Any:
    """The `value` of group rank `source`, which JSON must be able to hold, on every member."""
    data = _encoded(value if group.rank == source else None, device)
    length = torch.tensor([data.numel()], device=device)
    group.broadcast(length, source).wait()
    if group.rank != source:
        data = torch.empty(int(length), dtype=torch.uint8, device=device)
    group.broadcast(data, source).wait()
    return _decoded(data)


def first_value(group: Group, value: Any, device: torch.device | str = "cpu") -> tuple[int, Any] | None:
    """The value of the first member that has one, and its group rank; None if all have None."""
    first = torch.tensor([group.size if value is None else group.rank], device=device)
    group.all_reduce(first, "min").wait()
    source = int(first)
    return None if source == group.size else (source, broadcast_value(group, value, device, source))


def fold_values(
    group: Group, value: Any, fold: Callable[[Any, Any], Any], device: torch.device | str = "cpu"
) -> Any:
    """Fold all members' values into one on the first member, None elsewhere; every member calls this.

    Values go up a tree of blocks of adjacent members, so a member receives at most 7 in each of log8(size)
    rounds. `fold(a, b)` sees values in group order: b comes from later members than a.
    """
    span = 1
    while span < group.size:
        here = group.rank % (span * _FOLDED)
        if here:
            _send(group, value, group.rank - here, device)
            return None
        for peer in range(group.rank + span, min(group.rank + span * _FOLDED, group.size), span):
            value = fold(value, _receive(group, peer, device))
        span *= _FOLDED
    return value


def _send(group: Group, value: object, peer: int, device: torch.device | str) -> None:
    data = _encoded(value, device)
    for tensor in (torch.tensor([data.numel()], device=device), data):
        for work in group.exchange([Transfer("send", tensor, peer)]):
            work.wait()


def _receive(group: Group, peer: int, device: torch.device | str) -> object:
    length = torch.zeros(1, dtype=torch.int64, device=device)
    for work in group.exchange([Transfer("recv", length, peer)]):
        work.wait()
    data = torch.empty(int(length), dtype=torch.uint8, device=device)
    for work in group.exchange([Transfer("recv", data, peer)]):
        work.wait()
    return _decoded(data)


def _encoded(value: object, device: torch.device | str) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)


def _decoded(data: Tensor) -> object:
    return json.loads(data.cpu().numpy().tobytes())


def gather_values(group: Group, value: Any, device: torch.device | str = "cpu") -> list[Any]:
    """Gather every member's `value`, which JSON must be able to hold, on every member in group order."""
    data = _encoded(value, device)
    length = torch.tensor([data.numel()], device=device)
    lengths = torch.empty(group.size, dtype=length.dtype, device=device)
    group.all_gather(lengths, length).wait()
    width = int(lengths.max())
    padded = torch.zeros(width, dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    everyone = torch.empty(group.size * width, dtype=torch.uint8, device=device)
    group.all_gather(everyone, padded).wait()
    rows = everyone.view(group.size, width).cpu()
    return [json.loads(row[:n].numpy().tobytes()) for row, n in zip(rows, lengths.tolist(), strict=True)]


def name_ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-6, 9``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    spans = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(spans)}"
