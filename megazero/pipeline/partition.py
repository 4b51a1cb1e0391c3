"""The layers of each chunk of the pipeline: contiguous ranges, as even as the method's weights allow."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import accumulate, pairwise

from megazero.errors import ConfigError


def partition(weights: Sequence[float], parts: int) -> list[range]:
    """Cut a row of non-negative weights into contiguous parts so that the heaviest is as light as possible.

    Exact, by dynamic programming in O(parts x weights^2). Every part has at least one weight. Among the cuts
    with the lightest heaviest part it takes one with the least sum of squares, so that the other parts are
    even too; among these, one that gives more to earlier parts.

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

    # heaviest[stop]: the heaviest part of the best cut of the first `stop` weights, in 1, 2, ... parts.
    heaviest = [0, *[math.inf] * count]
    for part in range(1, parts + 1):
        heaviest = [
            min((max(heaviest[i], load(i, stop)) for i in range(part - 1, stop)), default=math.inf)
            for stop in range(count + 1)
        ]
    limit = heaviest[count]

    # In the same way: the least sum of squares with no part above the limit, and the start of its last part.
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


def partition_layers(
    method: str,
    num_layers: int,
    chunks: int,
    *,
    embedding: float,
    layers: Sequence[float],
    head: float,
    types: Sequence[str],
) -> list[range]:
    """The layers of each chunk. Every chunk has at least one.

    Args:
        method: one of

            - ``uniform``: the same number of layers each; any left over go to the first chunks, one each.
            - ``parameters``, ``cost``, ``measured``: the heaviest chunk is as light as possible by the given
              weights.
            - ``type:REGEX``: the same, by the number of layers whose type name matches (ignoring case).
            - ``5,6,6,5``: these numbers of layers.
        num_layers: number of layers in the model, without embedding and head.
        chunks: number of chunks in the whole pipeline.
        embedding: weight of what precedes the first layer, in the first chunk.
        layers: weight of each layer.
        head: weight of what follows the last layer, in the last chunk.
        types: type name of each layer.

    Raises:
        ConfigError: there are fewer layers than chunks, the method is unknown, the regular expression is
            invalid or matches nothing, or the numbers do not fit.
    """
    assert len(layers) == len(types) == num_layers
    if method == "uniform":
        return partition([1] * num_layers, chunks)
    if method in ("parameters", "cost", "measured"):
        # Every chunk has a layer, so the embedding always goes with the first one and the head with the last.
        ends = [embedding, *[0] * (num_layers - 2), head] if num_layers > 1 else [embedding + head]
        return partition([own + end for own, end in zip(layers, ends, strict=True)], chunks)
    if method.startswith("type:"):
        return partition(_matches(method.removeprefix("type:"), types), chunks)
    return _explicit(method, num_layers, chunks)


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
