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
class GatherPolicy:
    """When sharded weights are gathered, and how long they stay; sizes are in elements.

    Attributes:
        overlap: whether to gather ahead of use.
        prefetch: how much may be gathered ahead of its use.
        persistence_threshold: parameters smaller than this stay whole in stage 3.
        max_live: the most gathered parameters that are kept for their next use in the step.
        hpz: number of ranks of one node that hold a second partition (ZeRO++); 1 turns it off.
    """

    overlap: bool = True
    prefetch: int = 50_000_000
    persistence_threshold: int = 100_000
    max_live: int = 1_000_000_000
    hpz: int = 1


@dataclass(frozen=True)
class StateDtypes:
    """The dtypes of gradients sent between ranks, of their sums over micro-batches, and of the masters."""

    reduce: torch.dtype = torch.float32
    accumulation: torch.dtype = torch.float32
    main: torch.dtype = torch.float32


@dataclass(frozen=True)
class Codes:
    """The codes as which weights and gradients travel (ZeRO++).

    Attributes:
        weights: those of weights that are gathered; None gathers them as they are.
        gradients: those of gradients that are sent to be summed; None sends them in their dtype.
        rounding_seed: the seed of stochastic rounding of gradients; None rounds to the nearest.
    """

    weights: Quantization | None = None
    gradients: Quantization | None = None
    rounding_seed: int | None = None


@dataclass(frozen=True)
class ZeroPolicy:
    """How parameters, gradients and optimizer state are sharded; sizes are in elements.

    Attributes:
        stage: index of the row in `table.STAGES`.
        bucket_size: size of one reduction or gather.
        gathers: when weights are gathered.
        dtypes: the types of what is summed and updated.
        codes: what weights and gradients travel as.
        shard_alone: whether a single replica shards too, its shard being the whole, so that with offloading
            only the parameters in use are on the device.
        needs: what the update rule needs. With `reduces` it sums gradients itself; with `in_use` fp32 weights
            get separate masters; with `matrices` parameters made of matrices get buckets of their own.
    """

    stage: int = 0
    bucket_size: int = 16_000_000
    gathers: GatherPolicy = GatherPolicy()
    dtypes: StateDtypes = StateDtypes()
    codes: Codes = Codes()
    shard_alone: bool = False
    needs: Needs = NOTHING

    @classmethod
    def of(
        cls, config: ZeroConfig, offload: OffloadConfig, needs: Needs = NOTHING, seed: int = 0
    ) -> ZeroPolicy:
        """The policy that follows from a configuration, an update rule's needs, and the training's seed."""
        return cls(
            stage=config.stage,
            bucket_size=config.bucket_size,
            gathers=GatherPolicy(
                overlap=config.overlap_param_gather,
                prefetch=config.prefetch_size,
                persistence_threshold=config.param_persistence_threshold,
                max_live=config.max_live_parameters,
                hpz=config.hpz_partition_size,
            ),
            dtypes=StateDtypes(
                reduce=_dtype(config.grad_reduce_dtype),
                accumulation=_dtype(config.grad_accumulation_dtype),
                main=_dtype(config.main_params_dtype),
            ),
            codes=Codes(
                weights=_codes(config.quantized_weights, config),
                gradients=_codes(config.quantized_gradients, config),
                rounding_seed=seed if config.quantization_rounding == "stochastic" else None,
            ),
            shard_alone=set(offload.places) != {"none"},
            needs=needs,
        )


def _dtype(name: str) -> torch.dtype:
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def _codes(kind: str, config: ZeroConfig) -> Quantization | None:
    return None if kind == "none" else Quantization(kind, config.quantization_block_size)
