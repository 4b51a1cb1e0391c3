"""Megatron's BERT where it differs from its GPT: settings, and conditions of tensors.

Megatron's arguments do not say whether they are a BERT's or a GPT's; the names of the tensors do.
"""

from __future__ import annotations

from collections.abc import Collection

from megazero.formats.megatron.dialects import Arguments, ModelFields
from megazero.spec.model import ModelSpec

_FAMILY = "bert"
_MASKED_HEAD = "lm_head.dense.weight"
_BINARY_HEAD = "binary_head.weight"
_TYPES = "embedding.tokentype_embeddings.weight"


def family_settings(names: Collection[str], arguments: Arguments) -> ModelFields:
    """The settings of a BERT that a GPT lacks; empty for a GPT.

    Args:
        names: Core's names of the tensors.
        arguments: Megatron's arguments.
    """
    if _MASKED_HEAD not in names:
        return {}
    return {
        "family": _FAMILY,
        "bert_binary_head": _BINARY_HEAD in names,
        "bert_token_types": _BINARY_HEAD not in names and _TYPES in names,
        # The head's GELU is the erf form, whatever the MLPs' is, unless this flag is set.
        "bert_head_activation": "gelu" if arguments.get("openai_gelu") else "gelu_exact",
    }


def with_masked_head(spec: ModelSpec) -> bool:
    """Whether a tensor is present: in a BERT."""
    return spec.family == _FAMILY


def with_binary_head(spec: ModelSpec) -> bool:
    """Whether a tensor is present: in a BERT with the head for next-sentence prediction."""
    return with_masked_head(spec) and spec.head.binary


def with_types(spec: ModelSpec) -> bool:
    """Whether a tensor is present: in a BERT with token types."""
    return spec.embedding.token_types > 0
