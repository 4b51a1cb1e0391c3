"""Exchanging small values (names, reports) between ranks as JSON: nothing received is ever executed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from megazero.mpu.group import Group


def gather_values(group: Group, value: Any, device: torch.device | str = "cpu") -> list[Any]:
    """Gather every member's `value`, which JSON must be able to hold, on every member in group order."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
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
