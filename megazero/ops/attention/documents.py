"""Attention within documents, one at a time: what lies outside the diagonal blocks is never computed.

A dense mask costs the same however short the documents are. On CPU it pays to call the kernel once per
document, for packed rows as for padded ones, whose padding is a document too. (On an accelerator, reading the
ids would wait for the device.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from megazero.ops.dropout import AttentionDropout
from megazero.ops.positions import Positions

_WORTH = 1 << 14  # pairs of tokens: a call of the kernel takes about as long as this many under a mask

Attend = Callable[[Tensor, Tensor, Tensor, AttentionDropout | None], Tensor]


def document_runs(document_ids: Tensor) -> list[list[int]] | None:
    """The lengths of the runs of equal ids in each row of int [b, s].

    None if the ids are not on the host, a document comes back after another one, or so few pairs of tokens
    would be left out that the calls would cost more than a mask.
    """
    b, s = document_ids.shape
    if document_ids.device.type != "cpu" or b * s == 0:
        return None
    runs = [torch.unique_consecutive(row, return_counts=True) for row in document_ids]
    lengths: list[list[int]] = [counts.tolist() for _, counts in runs]
    left_out = b * s * s - sum(length**2 for row in lengths for length in row)
    if left_out < _WORTH * sum(map(len, lengths)):
        return None
    return None if any(len(ids) != len(ids.unique()) for ids, _ in runs) else lengths


def attention_by_document(
    q: Tensor, k: Tensor, v: Tensor, runs: list[list[int]], dropout: AttentionDropout | None, attend: Attend
) -> Tensor:
    """[s, b, n d]: the results of `attend` for each run of each row.

    q [s, b, n, d], k and v [s, b, g, d]. `attend` gets one run of one row, [l, 1, ...], and its dropout.
    """
    rows = []
    # By splits, because a slice's backward would fill a tensor of the whole size.
    samples = zip(q.split(1, 1), k.split(1, 1), v.split(1, 1), runs, strict=True)
    for i, (queries, keys, values, lengths) in enumerate(samples):
        start, parts = 0, []
        split = (queries.split(lengths), keys.split(lengths), values.split(lengths))
        for run_q, run_k, run_v in zip(*split, strict=True):
            stop = start + len(run_q)
            parts.append(attend(run_q, run_k, run_v, _of_run(dropout, i, start, stop)))
            start = stop
        rows.append(parts[0] if len(parts) == 1 else torch.cat(parts))
    return torch.cat(rows, 1)


def _of_run(dropout: AttentionDropout | None, row: int, start: int, stop: int) -> AttentionDropout | None:
    """The dropout of a row's positions from `start` to `stop`."""
    if dropout is None:
        return None

    def own(positions: Positions) -> Positions:
        positions = positions[start:stop]
        if isinstance(positions, range) or positions.dim() == 1:  # of all rows
            return positions
        return positions[:, row : row + 1]

    keys = dropout.keys
    return replace(
        dropout,
        keys=keys[row : row + 1] if keys.dim() == 1 else keys[start:stop, row : row + 1],
        query_positions=own(dropout.query_positions),
        key_positions=own(dropout.key_positions),
    )
