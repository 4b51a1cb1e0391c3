"""models: each legible on one screen. `gpt.py` is GPT in all its shapes."""

from megazero.models.gpt import GPT, Batch, Part

__all__ = ["GPT", "Batch", "Part"]
