"""models: each legible on one screen. `gpt.py` is GPT in all its shapes."""

from megazero.models.gpt import GPT, Batch

__all__ = ["GPT", "Batch"]
