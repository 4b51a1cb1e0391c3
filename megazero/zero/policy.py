"""`ZeroPolicy`: the settings of ZeRO as plain values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megazero.config.tree import ZeroConfig


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
        rule_reduces: whether the update rule sums gradients over the replicas itself, see `optim.Needs`.
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
    rule_reduces: bool = False
    matrices_apart: bool = False

    @classmethod
    def of(
        cls, config: ZeroConfig, *, rule_reduces: bool = False, matrices_apart: bool = False
    ) -> ZeroPolicy:
        """The policy of a configuration and of an update rule's `Needs`."""
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
            rule_reduces=rule_reduces,
            matrices_apart=matrices_apart,
        )


def _dtype(name: str) -> torch.dtype:
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
