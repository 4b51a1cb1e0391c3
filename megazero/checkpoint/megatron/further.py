"""Multi-token prediction: Megatron's names of the tensors of blocks that predict further tokens.

The block of depth 1 is ``mtp.layers.0``; in ours its layer has the number that follows the last one's.
"""

from __future__ import annotations

from collections.abc import Iterator

from megazero.checkpoint.megatron.dialects import BLOCK, renumbered


def further_rows() -> Iterator[tuple[str, str, str, str, str | None]]:
    """A block's tensors beside its layer: ours, its dims, theirs, its dims, the dim that ranks split."""
    yield "join.weight", "e j", "eh_proj.weight", "e j", "e"


def further_norms() -> Iterator[tuple[str, str]]:
    """A block's norms beside its layer: ours, theirs."""
    yield "word_norm", "enorm"
    yield "hidden_norm", "hnorm"
    yield "final_norm", "final_layernorm"


def further_name(name: str, layers: int, inside: str = "") -> str:
    """The name of a tensor of a further layer, numbered as ours is behind `layers`, where Megatron has it."""
    return renumbered(name, lambda number: f"{BLOCK}{number - layers}.{inside}")
