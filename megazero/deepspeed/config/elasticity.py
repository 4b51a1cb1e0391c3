"""`deepspeed.elasticity`: one batch size that many numbers of ranks can train with.

A batch of this size is a whole number of micro-batches on each of them, so that a job may go on with another
number of ranks and see the same batches. Releases of DeepSpeed before 0.19 read it from the JSON.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megazero.errors import ConfigError

CHOSEN = "DEEPSPEED_ELASTICITY_CONFIG"
"""The variable in which a scheduler of jobs says the JSON that it has chosen the number of ranks by."""
_BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_OLDEST = (0, 3, 8)
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23)


class ElasticityError(ConfigError):
    """A section ``elasticity`` cannot be used."""


class ElasticityConfigError(ElasticityError):
    """A section ``elasticity`` lacks a key, or has a wrong value."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """A job has a number of ranks that its section ``elasticity`` does not allow."""


@dataclass(frozen=True)
class _Section:
    """A section's request: a batch of at most so many samples; `node_ranks` is 0 if nodes do not matter."""

    largest: int
    micro_batches: tuple[int, ...]
    least_ranks: int
    most_ranks: int
    prefers_larger: bool
    node_ranks: int
    model_ranks: int

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> _Section:
        """Read it. Raises ElasticityConfigError, which names what is wrong."""
        for key in ("max_train_batch_size", "micro_batch_sizes"):
            if key not in given:
                raise ElasticityConfigError(f"`elasticity.{key}` must be given, but is missing; add it")
        micro = given["micro_batch_sizes"]
        counts = {key: given.get(key, 1) for key in ("min_gpus", "num_gpus_per_node", "model_parallel_size")}
        counts |= {"max_train_batch_size": given["max_train_batch_size"]}
        counts |= {"max_gpus": given.get("max_gpus", 10_000)}
        if not isinstance(micro, list) or not micro:
            raise ElasticityConfigError(
                f"`elasticity.micro_batch_sizes` must be a list of numbers, but is {micro!r}; write one"
            )
        for key, value in [*counts.items(), *(("micro_batch_sizes", size) for size in micro)]:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ElasticityConfigError(
                    f"`elasticity.{key}` must hold whole numbers of at least 1, but has {value!r}; change it"
                )
        version, model = str(given.get("version", 0.2)), counts["model_parallel_size"]
        if version not in ("0.1", "0.2"):
            raise ElasticityConfigError(f"`elasticity.version` must be 0.1 or 0.2, but is {version}")
        if model > 1 and version == "0.1":
            raise ElasticityConfigError(
                f"`elasticity.version` must be 0.2 for a `model_parallel_size` of {model}, but is 0.1"
            )
        if counts["num_gpus_per_node"] % model and version == "0.2":
            raise ElasticityConfigError(
                f"`elasticity.num_gpus_per_node` must be a multiple of `model_parallel_size` ({model}), but "
                f"is {counts['num_gpus_per_node']}; change one of them"
            )
        return cls(
            counts["max_train_batch_size"],
            tuple(micro),
            counts["min_gpus"],
            counts["max_gpus"],
            bool(given.get("prefer_larger_batch", True)),
            counts["num_gpus_per_node"] if version == "0.2" else 0,
            model,
        )

    def solve(self, ranks: int) -> tuple[int, list[int]]:
        """The batch size, and the numbers of data-parallel ranks that fit it; `ranks` is 0 if unknown."""
        if not self.node_ranks:
            return self._best(self.largest, self.least_ranks, self.most_ranks)
        nodes, per_node = self.node_ranks, self.node_ranks // self.model_ranks
        batch, fitting = self._best(
            self.largest // per_node, self.least_ranks // nodes, self.most_ranks // nodes
        )
        batch, replicas = batch * per_node, [fit * per_node for fit in fitting]
        here = ranks // nodes * per_node
        if here in replicas or not here:
            return batch, replicas
        sizes = [self.largest // (size * here) * size * here for size in self.micro_batches]
        if not any(sizes):
            raise self._too_small(self.largest // here)
        return (max if self.prefers_larger else min)(sizes), [here]

    def _best(self, largest: int, least: int, most: int) -> tuple[int, list[int]]:
        """The size of at most `largest` that fits the most numbers of ranks, and these."""
        bases = {size for size in {*self.micro_batches, math.lcm(*self.micro_batches)} if size <= largest}
        if not bases:
            raise self._too_small(largest)
        sign = 1 if self.prefers_larger else -1
        sizes = {base * _most_divisible(largest // base) for base in bases}
        fitting = {size: self._fitting(size, least, most) for size in sizes}
        best = max(fitting, key=lambda size: (len(fitting[size]), sign * size))
        return best, fitting[best]

    def _fitting(self, size: int, least: int, most: int) -> list[int]:
        """The numbers of ranks that can share a batch of this size evenly in micro-batches."""
        shares = {size // micro for micro in self.micro_batches if size % micro == 0}
        last = min(max(shares, default=0), most)
        return [n for n in range(max(least, 1), last + 1) if any(share % n == 0 for share in shares)]

    def _too_small(self, share: int) -> ElasticityConfigError:
        return ElasticityConfigError(
            "`elasticity.max_train_batch_size` must hold a micro-batch of each rank, one of "
            f"{list(self.micro_batches)}, but leaves it {share} samples; raise it"
        )

    def micro_batch(self, batch: int, replicas: int) -> int | None:
        """The micro-batch of each of so many replicas; None if none divides its samples."""
        sizes = [size for size in self.micro_batches if batch // replicas % size == 0]
        return (max if self.prefers_larger else min)(sizes, default=None)


def _most_divisible(limit: int) -> int:
    """The greatest number up to `limit` with more divisors than any smaller one."""
    best = (1, -1)
    # A number, its divisors, the primes after its own, and the greatest exponent of the next of them.
    begun: list[tuple[int, int, tuple[int, ...], int]] = [(1, 1, _PRIMES, limit)]
    while begun:
        number, divisors, primes, most = begun.pop()
        best = max(best, (divisors, -number))
        for power in range(1, most + 1 if primes else 1):
            number *= primes[0]
            if number > limit:
                break
            begun.append((number, divisors * (power + 1), primes[1:], power))
    return -best[1]


def compute_elastic_config(
    ds_config: Mapping[str, Any],
    target_deepspeed_version: str,
    world_size: int = 0,
    return_microbatch: bool = False,
) -> Any:
    """The batch size of a JSON's section ``elasticity``.

    Args:
        ds_config: the JSON's content.
        target_deepspeed_version: the release that is to train; at least 0.3.8.
        world_size: the number of ranks, which must fit; 0 if it is not known.
        return_microbatch: return the micro-batch; the number of ranks may be in `WORLD_SIZE` then.

    Returns:
        The batch size and the numbers of ranks that fit it; with `world_size` or `return_microbatch` also the
        micro-batch of that number.

    Raises:
        ElasticityError: the section is missing, off or wrong.
        ElasticityIncompatibleWorldSize: so many ranks do not fit.
    """
    given = ds_config.get("elasticity")
    if not isinstance(given, Mapping) or not given.get("enabled", False):
        raise ElasticityError("`elasticity.enabled` must be true, but is not; enable the section")
    if _release(target_deepspeed_version) < _OLDEST:
        raise ElasticityError(
            f"`target_deepspeed_version` must be 0.3.8 or later, but is {target_deepspeed_version}"
        )
    section = _Section.of(given)
    ranks = world_size or int(os.environ.get("WORLD_SIZE") or 0) * bool(
        section.node_ranks or return_microbatch
    )
    if return_microbatch and not ranks:
        raise ElasticityConfigError(
            "`world_size` must be given for a micro-batch, here or as WORLD_SIZE, but is not; pass it"
        )
    batch, fitting = section.solve(ranks)
    if not (world_size or return_microbatch):
        return batch, fitting
    replicas = ranks // section.model_ranks
    if replicas not in fitting:
        raise ElasticityIncompatibleWorldSize(
            f"`world_size` must give a number of replicas that fits a batch of {batch}, one of {fitting}, "
            f"but gives {replicas}; start another number of ranks"
        )
    return batch, fitting, section.micro_batch(batch, replicas)


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Whether a JSON has the section, and it is on."""
    section = ds_config.get("elasticity")
    return isinstance(section, Mapping) and bool(section.get("enabled", False))


def ensure_immutable_elastic_config(runtime_elastic_config_dict: Mapping[str, Any]) -> None:
    """Check a section against the one that the job's scheduler saw, if `DEEPSPEED_ELASTICITY_CONFIG` is set.

    Raises:
        ElasticityConfigError: they disagree on the batch size.
    """
    if CHOSEN not in os.environ:
        return
    try:
        chosen = json.loads(os.environ[CHOSEN])
        chosen = chosen.get("elasticity", chosen)
    except (ValueError, AttributeError) as error:
        raise ElasticityConfigError(f"{CHOSEN} must hold a JSON's section, but does not: {error}") from error
    for key in ("max_train_batch_size", "micro_batch_sizes", "version"):
        if runtime_elastic_config_dict.get(key) != chosen.get(key):
            raise ElasticityConfigError(
                f"`elasticity.{key}` must be what {CHOSEN} says ({chosen.get(key)}), but is "
                f"{runtime_elastic_config_dict.get(key)}; start the job with one JSON"
            )


def with_elastic_batches(content: Mapping[str, Any], ranks: int, version: str) -> dict[str, Any]:
    """A JSON's content with the batch sizes of its section ``elasticity``, which is taken out.

    Args:
        content: the JSON's content; without the section, or where it is off, it is returned as it is.
        ranks: the data-parallel ranks.
        version: the release of DeepSpeed whose rules hold.

    Raises:
        ElasticityError: the section is wrong, or the JSON has batch sizes of its own.
    """
    if not elasticity_enabled(content):
        return dict(content)
    section: Mapping[str, Any] = content["elasticity"]
    ensure_immutable_elastic_config(section)
    own = [key for key in _BATCHES if key in content]
    if own and not section.get("ignore_non_elastic_batch_info", False):
        raise ElasticityConfigError(
            f"`{own[0]}` must be left out with `elasticity`, which decides it, but is {content[own[0]]}; "
            "leave it out, or set `elasticity.ignore_non_elastic_batch_info`"
        )
    world = ranks * int(section.get("model_parallel_size", 1))
    batch, _, micro = compute_elastic_config(content, version, world, return_microbatch=True)
    sizes = {"train_batch_size": batch, "train_micro_batch_size_per_gpu": micro}
    return {k: v for k, v in content.items() if k not in (*_BATCHES, "elasticity")} | sizes
