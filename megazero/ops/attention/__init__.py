"""Scaled dot-product attention: grouped-query, causal or masked, with counter-based dropout."""

from megazero.ops.attention.front import ATTENTION, AttentionFacts, MaskKind, attention, attention_with_lse

__all__ = ["ATTENTION", "AttentionFacts", "MaskKind", "attention", "attention_with_lse"]
