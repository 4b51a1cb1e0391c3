"""The policy says what the configuration says."""

from __future__ import annotations

import torch

from megazero.config.tree.offload import OffloadConfig
from megazero.config.tree.zero import ZeroConfig
from megazero.ops.quantize import Quantization
from megazero.optim.rule import Needs
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
    needs = Needs(reduces=True, in_use=True, matrices=True)
    assert ZeroPolicy.of(config, OffloadConfig(optimizer="cpu"), needs) == ZeroPolicy(
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
        shard_alone=True,
        rule_reduces=True,
        own_masters=True,
        matrices_apart=True,
    )
    plain = ZeroPolicy.of(config, OffloadConfig())
    assert (plain.rule_reduces, plain.own_masters, plain.shard_alone) == (False, False, False)


def test_codes_and_how_gradients_are_rounded_to_them():
    config = ZeroConfig(quantized_weights="int8", quantized_gradients="int4", quantization_block_size=64)
    found = ZeroPolicy.of(config, OffloadConfig(), seed=9)
    assert found.weight_codes == Quantization("int8", 64)
    assert found.gradient_codes == Quantization("int4", 64)
    assert found.rounding_seed is None
    by_chance = config.model_copy(update={"quantization_rounding": "stochastic"})
    assert ZeroPolicy.of(by_chance, OffloadConfig(), seed=9).rounding_seed == 9
    assert ZeroPolicy.of(ZeroConfig(), OffloadConfig()) == ZeroPolicy()
