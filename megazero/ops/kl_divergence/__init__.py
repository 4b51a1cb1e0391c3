"""KL divergence of two predictions whose vocabulary is sliced over tensor-parallel ranks."""

from megazero.ops.kl_divergence.front import KL_DIVERGENCE, vocab_parallel_kl_divergence

__all__ = ["KL_DIVERGENCE", "vocab_parallel_kl_divergence"]
