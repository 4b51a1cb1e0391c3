"""Split layers into pipeline stages with DeepSpeed's bounds, so that scripts keep their stages."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from itertools import accumulate

from megazero.errors import ConfigError


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Split items into parts of equal size; the first parts get one more if the sizes do not divide.

    Returns:
        ``num_parts + 1`` bounds: part p has the items from bound p up to bound p + 1.
    """
    size, left = divmod(num_items, num_parts)
    sizes = [size + (part < left) for part in range(num_parts)]
    return [0, *accumulate(sizes)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Split weighted items into contiguous parts, minimizing the heaviest part minus the lightest.

    The method is DeepSpeed's since 0.12.6: dynamic programming over the first i items in j parts, each from
    the best split of fewer items into j - 1 parts. The result is not always optimal; the last of equal splits
    is taken. `megazero.pipeline.partition` minimizes the heaviest part instead.
    """
    count = len(weights)
    if count <= num_parts:
        return partition_uniform(count, num_parts)
    total = [0, *accumulate(weights)]
    # For the first i items in j parts: the heaviest part, the lightest, and where the last part begins.
    heaviest = [0.0, *[math.inf] * count]
    lightest = [math.inf, *[-math.inf] * count]
    starts: list[list[int]] = []
    for _ in range(num_parts):
        rows = [(math.inf, math.inf, -math.inf, 0)]
        for stop in range(1, count + 1):
            best = rows[0]
            for start in range(stop):
                load = total[stop] - total[start]
                high, low = max(heaviest[start], load), min(lightest[start], load)
                if high - low <= best[0]:
                    best = (high - low, high, low, start)
            rows.append(best)
        heaviest, lightest = [row[1] for row in rows], [row[2] for row in rows]
        starts.append([row[3] for row in rows])
    bounds = [count]
    for row in reversed(starts):
        bounds.append(row[bounds[-1]])
    return bounds[::-1]


def split_layers(
    method: str, stages: int, types: Sequence[str | None], count_parameters: Callable[[], Sequence[int]]
) -> list[int]:
    """The bounds of the stages.

    Args:
        method: the quantity to balance: ``uniform`` (layers), ``parameters`` (trained parameters) or
            ``type:REGEX`` (layers whose name matches). Case is ignored.
        stages: the number of stages.
        types: the name of each layer's class or function; None if it has none.
        count_parameters: counts the trained parameters of each layer.

    Raises:
        ConfigError: the method is unknown, or the regular expression is invalid or matches nothing.
    """
    kind, colon, regex = method.partition(":")
    kind = kind.lower() + colon
    if kind == "uniform":
        return partition_uniform(len(types), stages)
    if kind == "parameters":
        return partition_balanced(count_parameters(), stages)
    if kind == "type:":
        return partition_balanced(_matches(regex, types), stages)
    raise ConfigError(
        f"`partition_method` must be uniform, parameters or type:REGEX, but is {method!r}; choose one of them"
    )


def _matches(regex: str, types: Sequence[str | None]) -> list[int]:
    try:
        pattern = re.compile(regex, re.IGNORECASE)
    except re.error as error:
        raise ConfigError(
            f"`partition_method` must have a regular expression after `type:`, but `{regex}` is not one "
            f"({error}); correct it"
        ) from error
    matches = [int(name is not None and pattern.search(name) is not None) for name in types]
    if not any(matches):
        names = ", ".join(sorted({name for name in types if name is not None}))
        raise ConfigError(
            f"`partition_method` must match the class of some layer, but `{regex}` matches none of: {names}; "
            "correct it"
        )
    return matches
