"""Megatron's BERT, as far as it differs from its GPT: how to tell it, its settings and conditions of tensors.

Megatron's arguments do not say which kind of model they are of; the names of the tensors do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megazero.spec.model import ModelSpec

_FAMILY = "bert"
_MASKED_HEAD = "lm_head.dense.weight"
_BINARY_HEAD = "binary_head.weight"
_TYPES = "embedding.tokentype_embeddings.weight"


def family_settings(names: Collection[str], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that tell a BERT from a GPT; none for a GPT.

    Args:
        names: Core's names of the tensors.
        arguments: Megatron's arguments. Its masked-LM head has the erf form of GELU, whatever the MLPs have,
            unless ``openai_gelu`` is set.
    """
    if _MASKED_HEAD not in names:
        return {}
    return {
        "family": _FAMILY,
        "bert_binary_head": _BINARY_HEAD in names,
        "bert_token_types": _BINARY_HEAD not in names and _TYPES in names,
        "bert_head_activation": "gelu" if arguments.get("openai_gelu") else "gelu_exact",
    }


def with_masked_head(spec: ModelSpec) -> bool:
    """Whether a tensor is present: in a BERT."""
    return spec.family == _FAMILY


def with_binary_head(spec: ModelSpec) -> bool:
    """Whether a tensor is present: in a BERT that tells whether two segments are in order."""
    return with_masked_head(spec) and spec.head.binary


def with_types(spec: ModelSpec) -> bool:
    """Whether a tensor is present: in a BERT with token types."""
    return spec.embedding.token_types > 0
