"""Facts that follow from the configuration: ranks, pipeline chunks, padding, differences of two models."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType
from typing import get_args

from megazero.config.fields import FIELDS, names_with
from megazero.config.tree.config import Config
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.optimizer import OptimizerConfig
from megazero.config.tree.parallel import ParallelConfig
from megazero.config.tree.roles import Role
from megazero.config.tree.zero import ZeroConfig
from megazero.errors import ConfigError

_RESOLVED = MappingProxyType({spec.name: spec.resolved for spec in FIELDS if spec.resolved})
"""Setting whose default follows from others -> the property that has its value."""

EXPERT_FIELDS = names_with(Role.EXPERTS)
"""The model's settings that have no meaning without experts."""

_PLACEMENT = names_with(Role.PLACEMENT)

FREE_MODEL_FIELDS = frozenset(names_with(Role.FREE))
"""The model's settings that a checkpoint need not share.

Four of them determine the size of the vocabulary, which is compared by itself.
"""


def sequence_multiple(parallel: ParallelConfig) -> int:
    """Return the number that a sequence's length must be a multiple of, so that ranks have equal parts of it.

    A context-parallel rank has two runs of positions, or one if attention exchanges heads alone (a2a). With
    sequence parallelism, its tensor-parallel ranks share these positions equally.
    """
    ranks, heads_alone = parallel.context_parallel_size, set(parallel.cp_comm_type) == {"a2a"}
    rows = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    return ranks * math.lcm(1 if ranks == 1 or heads_alone else 2, rows)


def replicas_per_node(zero: ZeroConfig) -> int:
    """Data x context ranks of one node, where ZeRO's settings give them; else 1."""
    return max(zero.hpz_partition_size, zero.node_size)


DEFAULT_TOKENIZERS = MappingProxyType(
    {"gpt": "GPT2BPETokenizer", "bert": "BertWordPieceLowerCase", "t5": "BertWordPieceLowerCase"}
)
"""Family -> the tokenizer of a run that names none."""


Difference = tuple[str, object, object]
"""A field, and its values in two models."""


def model_differences(a: ModelConfig, b: ModelConfig, fields: Iterable[str]) -> list[Difference]:
    """Compare two models with defaults filled in; return (field, value in a, value in b) of each difference.

    Fields of a family that neither model belongs to are left out, as are fields about experts where a model
    has none. The numbers of experts of all layers are one difference, named `num_experts`, whichever settings
    give them; the windows of all layers are one, named `window_size`.
    """
    families = get_args(ModelConfig.model_fields["family"].annotation)
    others = tuple(f"{family}_" for family in families if family not in (a.family, b.family))
    dense = not (a.num_experts and b.num_experts)
    fields = list(fields)
    differences: list[Difference] = []
    if "num_experts" in fields and a.experts_by_layer != b.experts_by_layer:
        differences.append(("num_experts", a.experts_by_layer, b.experts_by_layer))
    if "window_size" in fields and a.windows != b.windows:
        differences.append(("window_size", a.windows, b.windows))
    for field in fields:
        if field.startswith(others) or field in _PLACEMENT or (dense and field in EXPERT_FIELDS):
            continue
        first, second = (getattr(model, _RESOLVED.get(field, field)) for model in (a, b))
        if first != second:
            differences.append((field, first, second))
    return differences


def filled_model(model: ModelConfig) -> ModelConfig:
    """Write out the settings whose default follows from others."""
    written = {
        name: getattr(model, source)
        for name, source in _RESOLVED.items()
        if model.num_experts or name not in EXPERT_FIELDS
    }
    return model.model_copy(update=written)


def balanced_by_micro_batch(model: ModelConfig) -> bool:
    """Whether a token's experts, or its loss, depend on the other sequences of its micro-batch."""
    if not model.num_experts:
        return False
    limited = model.drops_tokens and model.moe_capacity_scope == "micro_batch"
    return limited or model.assigns or "aux_loss" in model.balance_losses


def data_parallel_size(config: Config, world_size: int) -> int:
    """Replicas of the model: world size / (tensor x pipeline x context); ConfigError if that is not whole."""
    ranks = model_ranks(config)
    if world_size < 1 or world_size % ranks:
        raise ConfigError(
            f"`world_size` must be a multiple of tensor x pipeline x context parallel size ({ranks}), "
            f"but is {world_size}; start a multiple of {ranks} ranks."
        )
    return world_size // ranks


def model_ranks(config: Config) -> int:
    """Ranks in one replica."""
    sizes = config.parallel
    return sizes.tensor_model_parallel_size * sizes.pipeline_model_parallel_size * sizes.context_parallel_size


def expert_tensor_size(config: Config) -> int:
    """Ranks that share each expert's weights: the tensor-parallel size unless it is set."""
    parallel = config.parallel
    return parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size


@dataclass(frozen=True)
class PipelineShape:
    """The stages of a pipeline.

    Attributes:
        stages: the number of stages.
        chunks_per_stage: model chunks (virtual stages) that each of them holds.
        kind: the schedule by name, never auto.
        group: micro-batches that pass through one chunk of the interleaved schedule before the next chunk's
            turn; None for as many as there are stages.
    """

    stages: int
    chunks_per_stage: int
    kind: str
    group: int | None = None

    @classmethod
    def of(cls, config: Config) -> PipelineShape:
        """The pipeline of a run: one chunk per stage unless set, and two with zb-v.

        The schedule auto is interleaved with several chunks per stage, else 1f1b.
        """
        parallel, chunks = config.parallel, 1
        stages, kind = parallel.pipeline_model_parallel_size, parallel.pipeline_schedule
        if kind == "zb-v":
            chunks = 2
        elif parallel.num_virtual_stages_per_pipeline_rank is not None:
            chunks = parallel.num_virtual_stages_per_pipeline_rank
        elif (layers := parallel.num_layers_per_virtual_pipeline_stage) is not None:
            chunks = max(1, config.model.num_layers // (stages * layers))
        if kind == "auto":
            kind = "interleaved" if chunks > 1 else "1f1b"
        return cls(stages, chunks, kind, parallel.microbatch_group_size_per_virtual_pipeline_stage)

    @property
    def chunks(self) -> int:
        """Model chunks of the whole pipeline."""
        return self.stages * self.chunks_per_stage


def fills_groups(stages: int, micro_batches: int, group: int) -> bool:
    """Whether a step's micro-batches can be interleaved in groups of this size; the last may be smaller.

    Every group needs at least as many micro-batches as there are stages, so that its first one has come back
    from the last stage at the next chunk's turn.
    """
    return stages <= group <= micro_batches and not 0 < micro_batches % group < stages


def decoupled(optimizer: OptimizerConfig) -> tuple[float, float]:
    """Peak and floor of the learning rate of the word embedding and the output head."""
    peak, floor = optimizer.decoupled_lr, optimizer.decoupled_min_lr
    return optimizer.lr if peak is None else peak, optimizer.min_lr if floor is None else floor


def padded_vocab_size(vocab_size: int, model: ModelConfig, tensor_parallel_size: int) -> int:
    """Rows of the embedding table: `pad_vocab_size_to`, or the vocabulary rounded up to a multiple.

    The multiple is `make_vocab_size_divisible_by` x tensor-parallel size.

    Raises:
        ConfigError: `pad_vocab_size_to` is less than the vocabulary.
    """
    rows, multiple = model.pad_vocab_size_to, model.make_vocab_size_divisible_by * tensor_parallel_size
    if rows is None:
        return -(-vocab_size // multiple) * multiple
    if rows < vocab_size:
        raise ConfigError(
            f"`pad_vocab_size_to` must be at least the size of the vocabulary ({vocab_size}), but is {rows}; "
            "raise it or leave it out"
        )
    return rows
