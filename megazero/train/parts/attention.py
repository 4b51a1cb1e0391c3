"""The run's attention: whether its shapes stay the same, and which implementation computes it."""

from __future__ import annotations

import torch

from megazero.config.tree.config import Config
from megazero.ops.attention import ATTENTION, AttentionFacts, MaskKind, holds_all_pairs
from megazero.ops.attention.cuda import MOST_SIZE
from megazero.train.parts.chunks import DTYPES
from megazero.train.parts.families import family_of


def shapes_vary(config: Config) -> bool:
    """Whether micro-batches, or what layers see of them, have other shapes from step to step."""
    cut = config.curriculum.seqlen_schedule != "none" or config.skipping.random_ltd
    return cut or family_of(config.model).shapes_vary


def attention_facts(config: Config, device: torch.device) -> AttentionFacts:
    """The facts of a layer's call in training, as they usually are."""
    model, family = config.model, family_of(config.model)
    mask = MaskKind.CAUSAL if family.causal else MaskKind.NONE
    if config.data.reset_attention_mask or not family.causal:
        # On a CPU each document is a call of its own.
        mask = mask if device.type == "cpu" else MaskKind.RUNS
    return AttentionFacts(
        device.type,
        DTYPES[config.precision.dtype],
        mask,
        dropout=model.attention_dropout > 0,
        lse=False,
        grouped=model.kv_heads != model.num_attention_heads,
        wide=model.head_dim > MOST_SIZE,
    )


def attention_remark(config: Config, device: torch.device) -> str:
    """A sentence that names the implementation of the run's attention."""
    facts = attention_facts(config, device)
    name = ATTENTION.choose(facts, traced=config.acceleration.compile).name
    what = [str(facts.dtype).removeprefix("torch."), facts.mask.value, *["dropout"] * facts.dropout]
    remark = f"attention: {name} on {facts.device} ({', '.join(what)})"
    return f"{remark}, which holds a tensor of all pairs" if holds_all_pairs(name, facts) else remark
