"""`ZeroPolicy`: the settings of ZeRO as plain values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megazero.config.tree.offload import OffloadConfig
from megazero.config.tree.zero import ZeroConfig
from megazero.ops.quantize import Quantization
from megazero.optim.rule import Needs

NOTHING = Needs()


@dataclass(frozen=True)
class ZeroPolicy:
    """How parameters, gradients and optimizer state are sharded; sizes are in elements.

    Attributes:
        stage: index of the row in `table.STAGES`.
        bucket_size: size of one reduction or gather.
        overlap_gather: whether to gather ahead of use.
        prefetch: how much may be gathered ahead of its use.
        persistence_threshold: parameters smaller than this stay whole in stage 3.
        max_live: gathered parameters are kept for their next use in the step as long as there are no more
            than this.
        reduce_dtype: dtype of gradients sent between ranks.
        accumulation_dtype: dtype of gradient sums over micro-batches.
        main_dtype: dtype of the optimizer's copy of the weights.
        hpz: number of ranks of one node that hold a second partition (ZeRO++); 1 turns it off.
        shard_alone: whether a single replica has shards too, which are all of it; where they are offloaded,
            only the parameters in use are on the device.
        weight_codes: the codes as which weights are gathered (ZeRO++); None gathers them as they are.
        gradient_codes: the codes as which gradients are sent to be summed (ZeRO++); None for `reduce_dtype`.
        rounding_seed: the seed of stochastic rounding to these codes; None rounds to the nearest.
        rule_reduces: whether the update rule sums gradients over the replicas itself, see `optim.Needs`.
        own_masters: whether fp32 weights have masters beside them, as they are not always equal.
        matrices_apart: whether parameters made of matrices have buckets of their own, see `optim.Needs`.
    """

    stage: int = 0
    bucket_size: int = 16_000_000
    overlap_gather: bool = True
    prefetch: int = 50_000_000
    persistence_threshold: int = 100_000
    max_live: int = 1_000_000_000
    reduce_dtype: torch.dtype = torch.float32
    accumulation_dtype: torch.dtype = torch.float32
    main_dtype: torch.dtype = torch.float32
    hpz: int = 1
    shard_alone: bool = False
    weight_codes: Quantization | None = None
    gradient_codes: Quantization | None = None
    rounding_seed: int | None = None
    rule_reduces: bool = False
    own_masters: bool = False
    matrices_apart: bool = False

    @classmethod
    def of(
        cls, config: ZeroConfig, offload: OffloadConfig, needs: Needs = NOTHING, seed: int = 0
    ) -> ZeroPolicy:
        """The policy that follows from a configuration, an update rule's needs, and the training's seed."""
        return cls(
            stage=config.stage,
            bucket_size=config.bucket_size,
            overlap_gather=config.overlap_param_gather,
            prefetch=config.prefetch_size,
            persistence_threshold=config.param_persistence_threshold,
            max_live=config.max_live_parameters,
            reduce_dtype=_dtype(config.grad_reduce_dtype),
            accumulation_dtype=_dtype(config.grad_accumulation_dtype),
            main_dtype=_dtype(config.main_params_dtype),
            hpz=config.hpz_partition_size,
            shard_alone=set(offload.places) != {"none"},
            weight_codes=_codes(config.quantized_weights, config),
            gradient_codes=_codes(config.quantized_gradients, config),
            rounding_seed=seed if config.quantization_rounding == "stochastic" else None,
            rule_reduces=needs.reduces,
            own_masters=needs.in_use,
            matrices_apart=needs.matrices,
        )


def _dtype(name: str) -> torch.dtype:
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def _codes(kind: str, config: ZeroConfig) -> Quantization | None:
    return None if kind == "none" else Quantization(kind, config.quantization_block_size)
