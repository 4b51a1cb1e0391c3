"""Scaled dot-product attention, grouped-query, causal, masked, with counter-based dropout."""

from megazero.ops.attention.front import ATTENTION, ATTENTION_DROPOUT, attention

__all__ = ["ATTENTION", "ATTENTION_DROPOUT", "attention"]
