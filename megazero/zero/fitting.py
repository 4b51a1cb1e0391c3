"""Checks whether a rule and the buckets fit together, which the rules of a configuration make sure of."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megazero.errors import ConfigError
from megazero.optim.rule import UpdateRule
from megazero.zero.bucket import Bucket
from megazero.zero.store.store import WEIGHT, Store, offloaded_bytes


def check_reduction(rule: UpdateRule, store: Store, buckets: Sequence[Bucket]) -> None:
    """Refuse a rule that sums gradients itself where they are summed already or cannot be used."""
    if not rule.needs.reduces:
        return
    name = type(rule).__name__
    if offloaded_bytes(store):
        raise ConfigError(
            f"`offload` must keep state on the device with {name}, whose messages leave from there, but "
            "keeps it elsewhere; leave it out"
        )
    for bucket in buckets:
        if bucket.comm_hook.reduces:
            raise ConfigError(
                f"`needs.reduces` of the ZeRO policy must be true for {name}, which sums gradients itself, "
                "but is false; build the policy from the rule"
            )
        if bucket.layout.row.shard_state:
            raise ConfigError(
                f"`stage` must be 0 for {name}, which sums whole gradients itself, but state is sharded; "
                "choose stage 0"
            )
        dtypes = {
            "accumulation_dtype": store.sums(bucket).dtype,
            "main_dtype": store.at_rest(bucket)[WEIGHT].dtype,
        }
        if rule.needs.in_use and store.at_rest(bucket)[WEIGHT] is bucket.full:
            raise ConfigError(
                f"`needs.in_use` of the ZeRO policy must be true for {name}, whose masters are not always "
                "the weights in use, but is false; build the policy from the rule"
            )
        for setting, dtype in dtypes.items():
            if dtype != torch.float32:
                raise ConfigError(
                    f"`{setting}` must be fp32 for {name}, which sums gradients itself, but is {dtype}; "
                    "choose fp32"
                )


def check_matrices(rule: UpdateRule, buckets: Sequence[Bucket]) -> None:
    """Refuse a rule for whole matrices where these share buckets with other parameters."""
    mixed = [s.name for b in buckets if not b.key.matrices for s in b.layout.specs if s.matrices is not None]
    if rule.needs.matrices and mixed:
        raise ConfigError(
            f"`needs.matrices` of the ZeRO policy must be true for {type(rule).__name__}, which updates "
            f"whole matrices such as {mixed[0]}, but is false; build the policy from the rule"
        )
