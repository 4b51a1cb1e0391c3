"""Splits the model's blocks into contiguous chunks for the pipeline, balanced by a weight of each block."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import accumulate, pairwise

from megazero.errors import ConfigError


def partition(weights: Sequence[float], parts: int) -> list[range]:
    """Split non-negative weights into contiguous parts so that the heaviest part is as light as possible.

    Exact, by dynamic programming in O(parts x weights^2). Every part has at least one weight. Of the optimal
    splits it takes the one with the least sum of squares, so that the other parts are even too; of equal
    ones, the one whose earlier parts have more weights.

    Raises:
        ConfigError: there are fewer weights than parts.
    """
    count = len(weights)
    if not 1 <= parts <= count:
        raise ConfigError(
            f"The number of pipeline chunks must be from 1 to the number of layers ({count}), but is "
            f"{parts}; use fewer stages or chunks per stage, or more layers"
        )
    total = [0, *accumulate(weights)]

    def load(start: int, stop: int) -> float:
        return total[stop] - total[start]

    # heaviest[stop]: the heaviest part of the best split of the first `stop` weights into `part` parts.
    heaviest = [0, *[math.inf] * count]
    for part in range(1, parts + 1):
        heaviest = [
            min((max(heaviest[i], load(i, stop)) for i in range(part - 1, stop)), default=math.inf)
            for stop in range(count + 1)
        ]
    limit = heaviest[count]

    # The same for the least sum of squares with no part above the limit; `starts` has where last parts begin.
    squares = [0, *[math.inf] * count]
    starts: list[list[int]] = []
    for part in range(1, parts + 1):
        best = [
            min(
                (
                    (squares[i] + load(i, stop) ** 2, -i)
                    for i in range(part - 1, stop)
                    if load(i, stop) <= limit
                ),
                default=(math.inf, 0),
            )
            for stop in range(count + 1)
        ]
        squares = [square for square, _ in best]
        starts.append([-start for _, start in best])

    cuts = [count]
    for row in reversed(starts):
        cuts.append(row[cuts[-1]])
    return [range(start, stop) for start, stop in pairwise(reversed(cuts))]


def partition_blocks(
    method: str, chunks: int, *, costs: Sequence[float], types: Sequence[str | None]
) -> list[range]:
    """Return the range of blocks of each chunk. Every chunk has at least one layer.

    A block that is not a layer, such as an embedding, stays with the next layer, or with the last layer if
    none follows.

    Args:
        method: one of

            - ``uniform``: the same number of layers each; the first chunks get one more if some are left.
            - ``parameters``, ``cost``, ``measured``: balance `costs`.
            - ``type:REGEX``: balance the number of layers whose type name matches (ignoring case).
            - ``5,6,6,5``: these numbers of layers.
        chunks: number of chunks in the whole pipeline.
        costs: weight of each block.
        types: type name of each block that is a layer; None for other blocks.

    Raises:
        ConfigError: there are fewer layers than chunks, the method is unknown, the regular expression is
            invalid or matches nothing, or the numbers do not fit.
    """
    layers = [number for number, name in enumerate(types) if name is not None]
    # One group for each layer: the blocks that must share its chunk.
    stops = [*(number + 1 for number in layers[:-1]), len(types)]
    groups = [range(start, stop) for start, stop in pairwise([0, *stops])]
    if method == "uniform":
        parts = partition([1] * len(layers), chunks)
    elif method in ("parameters", "cost", "measured"):
        parts = partition([sum(costs[number] for number in group) for group in groups], chunks)
    elif method.startswith("type:"):
        names = [name for name in types if name is not None]
        parts = partition(_matches(method.removeprefix("type:"), names), chunks)
    else:
        parts = _explicit(method, len(layers), chunks)
    return [range(groups[part[0]].start, groups[part[-1]].stop) for part in parts]


def _matches(regex: str, types: Sequence[str]) -> list[int]:
    try:
        pattern = re.compile(regex, re.IGNORECASE)
    except re.error as error:
        raise ConfigError(
            f"`pipeline_partition` must have a regular expression after `type:`, but `{regex}` is not one "
            f"({error}); correct it"
        ) from error
    matches = [int(bool(pattern.search(name))) for name in types]
    if not any(matches):
        names = ", ".join(sorted(set(types)))
        raise ConfigError(
            f"`pipeline_partition` must match the type of some layer, but `{regex}` matches none of: "
            f"{names}; correct it"
        )
    return matches


def _explicit(method: str, num_layers: int, chunks: int) -> list[range]:
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", method):
        raise ConfigError(
            "`pipeline_partition` must be uniform, parameters, cost, measured, type:REGEX or numbers of "
            f"layers such as 5,6,6,5, but is `{method}`; choose one of them"
        )
    counts = [int(number) for number in method.split(",")]
    if len(counts) != chunks or sum(counts) != num_layers or min(counts) < 1:
        raise ConfigError(
            f"`pipeline_partition` must be {chunks} numbers of at least 1 that add up to {num_layers} "
            f"layers, but is `{method}` ({len(counts)} numbers, sum {sum(counts)}); correct it"
        )
    stops = list(accumulate(counts))
    return [range(stop - count, stop) for count, stop in zip(counts, stops, strict=True)]
