"""The run's attention: whether its shapes stay the same, and which implementation computes it."""

from __future__ import annotations

from types import MappingProxyType

import torch

from megazero.config.tree.curriculum import CurriculumConfig
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.skipping import SkippingConfig
from megazero.ops.attention import ATTENTION, AttentionFacts, BiasKind, MaskKind, head_kind, holds_all_pairs
from megazero.ops.attention.varlen import varlen_knows
from megazero.train.parts.families import family_of

_BIASES = MappingProxyType({"alibi": BiasKind.SLOPES, "relative": BiasKind.TENSOR})


def shapes_vary(curriculum: CurriculumConfig, skipping: SkippingConfig, model: ModelConfig) -> bool:
    """Whether micro-batches, or what layers see of them, have other shapes from step to step."""
    return curriculum.seqlen_schedule != "none" or skipping.random_ltd or _padded(model)


def _padded(model: ModelConfig) -> bool:
    """Whether samples are shorter than their rows, of which collating leaves out columns of padding."""
    return model.num_classes is not None or not family_of(model).models.causal


def attention_facts(
    model: ModelConfig, dtype: torch.dtype, device: torch.device, *, documents: bool
) -> AttentionFacts:
    """The facts of a layer's call in training, as they usually are.

    Args:
        model: the model's shape.
        dtype: the type of activations.
        device: the device of the layers.
        documents: whether a row has several documents that do not see each other.
    """
    mask = MaskKind.CAUSAL if family_of(model).models.causal else MaskKind.NONE
    if model.has_windows:
        mask = MaskKind.WINDOW
    # On a CPU each document is a call of its own.
    if device.type != "cpu" and (documents or _padded(model)):
        takes_runs = varlen_knows(model.grouped) and not model.has_windows
        mask = MaskKind.RUNS if takes_runs else MaskKind.DOCUMENTS
    if family_of(model).models.masks_keys:
        mask = MaskKind.DENSE
    if model.is_sparse or (model.has_windows and model.window_sink_tokens):
        mask = MaskKind.PATTERN
    return AttentionFacts(
        device.type,
        dtype,
        mask,
        dropout=model.attention_dropout > 0,
        lse=model.softmax_type != "vanilla",
        bias=_bias(model),
        heads=head_kind(model.head_dim, model.value_dim),
    )


def _bias(model: ModelConfig) -> BiasKind:
    if model.attn_logit_softcapping is not None:
        return BiasKind.SOFTCAP
    return _BIASES.get(model.position_embedding_type, BiasKind.NONE)


def attention_remark(facts: AttentionFacts, *, compiled: bool) -> str:
    """A sentence that names the implementation of attention for a layer's call."""
    name = ATTENTION.choose(facts, traced=compiled).name
    what = [str(facts.dtype).removeprefix("torch."), facts.mask.value, *["dropout"] * facts.dropout]
    remark = f"attention: {name} on {facts.device} ({', '.join(what)})"
    return f"{remark}, which holds a tensor of all pairs" if holds_all_pairs(name, facts) else remark
