"""The policy says what the configuration says."""

from __future__ import annotations

import torch

from megazero.config.tree import ZeroConfig
from megazero.optim import Needs
from megazero.zero.policy import ZeroPolicy


def test_every_setting_arrives():
    config = ZeroConfig(
        stage=3,
        bucket_size=101,
        overlap_param_gather=False,
        prefetch_size=102,
        param_persistence_threshold=103,
        max_live_parameters=104,
        grad_reduce_dtype="bf16",
        grad_accumulation_dtype="bf16",
        main_params_dtype="fp16",
        hpz_partition_size=2,
    )
    assert ZeroPolicy.of(config, Needs(reduces=True, in_use=True)) == ZeroPolicy(
        stage=3,
        bucket_size=101,
        overlap_gather=False,
        prefetch=102,
        persistence_threshold=103,
        max_live=104,
        reduce_dtype=torch.bfloat16,
        accumulation_dtype=torch.bfloat16,
        main_dtype=torch.float16,
        hpz=2,
        rule_reduces=True,
        own_masters=True,
    )
    assert not ZeroPolicy.of(config).rule_reduces
    assert not ZeroPolicy.of(config).own_masters
