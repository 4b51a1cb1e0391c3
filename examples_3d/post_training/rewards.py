"""The recipe's reward: an answer that is right and terse."""

from __future__ import annotations

from collections.abc import Sequence


def right(
    prompts: Sequence[object], completions: Sequence[object], answer: Sequence[str], **_: object
) -> list[float]:
    """1 for the right answer alone, 0.2 if the right answer is in it, else 0."""
    rewards = []
    for completion, wanted in zip(completions, answer, strict=True):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        text = text.strip()
        rewards.append(1.0 if text == wanted else 0.2 if wanted in text.split() else 0.0)
    return rewards
