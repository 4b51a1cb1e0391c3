"""`Layout`: the settings that a search varies, and the configuration that they give."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

from megazero.config.derive import PipelineShape
from megazero.config.tree.config import Config
from megazero.config.tree.offload import OffloadConfig
from megazero.config.tree.recompute import RecomputeConfig

RECOMPUTES = ("none", "selective", "full")
"""The granularities of recomputation, by falling memory of activations."""


@dataclass(frozen=True, order=True)
class LayerSharding:
    """How ranks share a layer.

    Attributes:
        tensor: tensor-parallel ranks.
        sequence: whether sequence parallelism is on.
        expert: expert-parallel ranks; 1 without experts.
        context: context-parallel ranks.
    """

    tensor: int = 1
    sequence: bool = False
    expert: int = 1
    context: int = 1


@dataclass(frozen=True, order=True)
class PipelineSplit:
    """How the pipeline divides the model.

    Attributes:
        count: the number of stages.
        virtual: the number of chunks on each stage.
        schedule: the schedule's name, or ``auto``.
    """

    count: int = 1
    virtual: int = 1
    schedule: str = "auto"


@dataclass(frozen=True, order=True)
class Savings:
    """How memory is saved.

    Attributes:
        zero: the ZeRO stage.
        recompute: one of `RECOMPUTES`.
        offload: whether masters and moments are in the host's memory.
    """

    zero: int = 1
    recompute: str = "none"
    offload: bool = False


@dataclass(frozen=True, order=True)
class Layout:
    """How a job is distributed over its ranks; `slices`, `stages` and `savings` are keys of plans.jsonl.

    Attributes:
        slices: how ranks share a layer.
        stages: how the pipeline divides the model.
        savings: how memory is saved.
        micro_batch: samples of a micro-batch.
    """

    slices: LayerSharding
    stages: PipelineSplit
    savings: Savings
    micro_batch: int

    @classmethod
    def of(cls, config: Config) -> Layout:
        """The layout of a configuration."""
        parallel = config.parallel
        slices = LayerSharding(
            parallel.tensor_model_parallel_size,
            parallel.sequence_parallel,
            parallel.expert_model_parallel_size,
            parallel.context_parallel_size,
        )
        usual = parallel.pipeline_schedule in ("1f1b", "interleaved")
        schedule = "auto" if usual else parallel.pipeline_schedule
        shape = PipelineShape.of(config)
        stages = PipelineSplit(shape.stages, shape.chunks_per_stage, schedule)
        savings = Savings(config.zero.stage, config.recompute.granularity, config.offload.optimizer != "none")
        return cls(slices, stages, savings, config.batch.micro_batch_size)

    def applied(self, config: Config) -> Config:
        """The configuration with this layout."""
        slices, stages, savings = self.slices, self.stages, self.savings
        chunk = config.model.num_layers // stages.count // stages.virtual if stages.virtual > 1 else None
        parallel: dict[str, object] = {
            "tensor_model_parallel_size": slices.tensor,
            "pipeline_model_parallel_size": stages.count,
            "num_layers_per_virtual_pipeline_stage": chunk if stages.schedule == "auto" else None,
            "num_virtual_stages_per_pipeline_rank": None,
            "pipeline_schedule": stages.schedule,
            "pipeline_partition": "uniform",
            "expert_model_parallel_size": slices.expert,
            "sequence_parallel": slices.sequence,
        }
        if slices.context != config.parallel.context_parallel_size:
            flat = tuple("p2p" if kind == "a2a+p2p" else kind for kind in config.parallel.cp_comm_type)
            parallel |= {
                "context_parallel_size": slices.context,
                "hierarchical_context_parallel_sizes": None,
                "cp_comm_type": flat,
            }
        fresh, kept = RecomputeConfig(), ("method", "num_layers", "partition_activations")
        recompute = {"granularity": savings.recompute, **{name: getattr(fresh, name) for name in kept}}
        offload: dict[str, object] = {}
        if savings.offload != (config.offload.optimizer != "none"):
            offload = OffloadConfig(optimizer="cpu" if savings.offload else "none").model_dump()
        changes = {
            "parallel": parallel,
            "recompute": recompute,
            "zero": {"stage": savings.zero},
            "offload": offload,
            "batch": {"micro_batch_size": self.micro_batch},
        }
        sections = {name: getattr(config, name).model_copy(update=own) for name, own in changes.items()}
        return config.model_copy(update=sections)

    def distance(self, other: Layout) -> int:
        """The number of settings in which two layouts differ."""
        return sum(one != another for one, another in zip(_settings(self), _settings(other), strict=True))

    def holds_more_than(self, other: Layout) -> bool:
        """Whether this is `other` with larger micro-batches or less recomputation, and so more memory."""
        own, others = self.savings.recompute, other.savings.recompute
        savings = replace(self.savings, recompute=others)
        if replace(self, savings=savings, micro_batch=other.micro_batch) != other or self == other:
            return False
        return self.micro_batch >= other.micro_batch and RECOMPUTES.index(own) <= RECOMPUTES.index(others)

    def document(self) -> dict[str, object]:
        """The layout as JSON; `read` is the inverse."""
        return asdict(self)

    @classmethod
    def read(cls, document: dict[str, Any]) -> Layout:
        """Parse the JSON that `document` returned."""
        kinds = {"slices": LayerSharding, "stages": PipelineSplit, "savings": Savings}
        return cls(**{n: kinds[n](**d) if n in kinds else d for n, d in document.items()})

    def __str__(self) -> str:
        slices, stages, savings = self.slices, self.stages, self.savings
        sizes = {"T": slices.tensor, "C": slices.context, "P": stages.count, "V": stages.virtual}
        sizes["E"] = slices.expert
        words = " x ".join(f"{letter}{size}" for letter, size in sizes.items() if size > 1)
        parts = [words or "D alone"]
        parts += [stages.schedule] if stages.schedule != "auto" else []
        parts += [f"ZeRO {savings.zero}"]
        parts += ["SP"] if slices.sequence else []
        parts += [f"recompute {savings.recompute}"] if savings.recompute != "none" else []
        parts += ["optimizer on the host"] if savings.offload else []
        return ", ".join([*parts, f"b {self.micro_batch}"])


def _settings(layout: Layout) -> tuple[object, ...]:
    slices, stages, savings, micro_batch = astuple(layout)
    return (*slices, *stages, *savings, micro_batch)
