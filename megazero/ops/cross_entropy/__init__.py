"""Cross-entropy of logits whose vocabulary is sliced over tensor-parallel ranks (Shoeybi et al. 2019)."""

from megazero.ops.cross_entropy.front import CROSS_ENTROPY, vocab_parallel_cross_entropy

__all__ = ["CROSS_ENTROPY", "vocab_parallel_cross_entropy"]
