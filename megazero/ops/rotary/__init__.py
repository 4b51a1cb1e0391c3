"""Rotary position embedding (Su et al. 2021), halves convention (GPT-NeoX, Hugging Face's Llama)."""

from megazero.ops.rotary.front import ROTARY, apply_rotary, rotary_table

__all__ = ["ROTARY", "apply_rotary", "rotary_table"]
