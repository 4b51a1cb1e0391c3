"""What follows from the configuration about the model and its layout: ranks, pipeline chunks, padding."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType
from typing import Any, get_args

from megazero.config.tree import Config, ModelConfig
from megazero.errors import ConfigError

# Settings whose default follows from others, and the values they take.
_RESOLVED = MappingProxyType(
    {
        "ffn_hidden_size": "ffn_size",
        "num_query_groups": "kv_heads",
        "kv_channels": "head_dim",
        "max_position_embeddings": "positions",
        "bert_token_types": "has_token_types",
        "add_qkv_bias": "qkv_bias",
    }
)

DEFAULT_TOKENIZERS = MappingProxyType({"gpt": "GPT2BPETokenizer", "bert": "BertWordPieceLowerCase"})
"""Family -> the kind of tokenizer that a launch takes if it names none."""


def model_differences(a: ModelConfig, b: ModelConfig, fields: Iterable[str]) -> list[tuple[str, Any, Any]]:
    """(field, value in a, value in b) for each of these fields that differs once defaults are filled in.

    Fields that begin with the name of another family than theirs say nothing about them.
    """
    families = get_args(ModelConfig.model_fields["family"].annotation)
    others = tuple(f"{family}_" for family in families if family not in (a.family, b.family))
    found = []
    for field in fields:
        if field.startswith(others):
            continue
        ours, theirs = (getattr(model, _RESOLVED.get(field, field)) for model in (a, b))
        if ours != theirs:
            found.append((field, ours, theirs))
    return found


def filled_model(model: ModelConfig) -> ModelConfig:
    """The same model with the settings whose default follows from others written out."""
    return model.model_copy(update={name: getattr(model, source) for name, source in _RESOLVED.items()})


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


def chunks_per_stage(config: Config) -> int:
    """Model chunks (virtual stages) that each pipeline stage holds: one unless set; two with zb-v."""
    parallel = config.parallel
    if parallel.pipeline_schedule == "zb-v":
        return 2
    if parallel.num_virtual_stages_per_pipeline_rank is not None:
        return parallel.num_virtual_stages_per_pipeline_rank
    if parallel.num_layers_per_virtual_pipeline_stage is None:
        return 1
    layers_of_a_round = parallel.pipeline_model_parallel_size * parallel.num_layers_per_virtual_pipeline_stage
    return max(1, config.model.num_layers // layers_of_a_round)


def num_chunks(config: Config) -> int:
    """Model chunks of the whole pipeline."""
    return config.parallel.pipeline_model_parallel_size * chunks_per_stage(config)


def schedule_kind(config: Config) -> str:
    """The pipeline schedule by name; auto is interleaved with several chunks per stage, else 1f1b."""
    kind = config.parallel.pipeline_schedule
    if kind != "auto":
        return kind
    return "interleaved" if chunks_per_stage(config) > 1 else "1f1b"


def padded_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel_size: int) -> int:
    """Rows of the embedding table: the least multiple of `divisible_by` x tensor-parallel size that fits."""
    multiple = divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple
