"""The policy says what the configuration says."""

from __future__ import annotations

import torch

from megazero.config.tree.offload import OffloadConfig
from megazero.config.tree.zero import ZeroConfig
from megazero.ops.quantize import Quantization
from megazero.optim.rule import Needs
from megazero.zero.policy import GatherPolicy, StateDtypes, ZeroPolicy


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
    needs = Needs(reduces=True, in_use=True, matrices=True)
    assert ZeroPolicy.of(config, OffloadConfig(optimizer="cpu"), needs) == ZeroPolicy(
        stage=3,
        bucket_size=101,
        gathers=GatherPolicy(overlap=False, prefetch=102, persistence_threshold=103, max_live=104, hpz=2),
        dtypes=StateDtypes(reduce=torch.bfloat16, accumulation=torch.bfloat16, main=torch.float16),
        shard_alone=True,
        needs=needs,
    )
    plain = ZeroPolicy.of(config, OffloadConfig())
    assert (plain.needs, plain.shard_alone) == (Needs(), False)


def test_codes_and_how_gradients_are_rounded_to_them():
    config = ZeroConfig(quantized_weights="int8", quantized_gradients="int4", quantization_block_size=64)
    found = ZeroPolicy.of(config, OffloadConfig(), seed=9)
    assert found.codes.weights == Quantization("int8", 64)
    assert found.codes.gradients == Quantization("int4", 64)
    assert found.codes.rounding_seed is None
    by_chance = config.model_copy(update={"quantization_rounding": "stochastic"})
    assert ZeroPolicy.of(by_chance, OffloadConfig(), seed=9).codes.rounding_seed == 9
    assert ZeroPolicy.of(ZeroConfig(), OffloadConfig()) == ZeroPolicy()
