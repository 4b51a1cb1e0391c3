"""The public vocab-parallel KL divergence and its table of implementations."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from megazero.ops.dispatch import CallFacts, Implementation, Operator
from megazero.ops.kl_divergence.reference import vocab_parallel_kl_divergence_reference
from megazero.ops.kl_divergence.sliced import vocab_parallel_kl_divergence_chunked
from megazero.ops.reduce_group import ReduceGroup

KL_DIVERGENCE: Operator[Callable[[Tensor, Tensor, ReduceGroup, int, int, float], Tensor]] = Operator(
    "kl_divergence",
    (
        Implementation("chunked", vocab_parallel_kl_divergence_chunked),
        Implementation("reference", vocab_parallel_kl_divergence_reference),
    ),
)


def vocab_parallel_kl_divergence(
    student: Tensor,
    teacher: Tensor,
    group: ReduceGroup,
    vocab_start: int,
    vocab_size: int,
    temperature: float = 1.0,
) -> Tensor:
    """KL(teacher || student) of each token in nats, fp32 [s, b] (fp64 for fp64 logits), as distillation uses
    it (Hinton et al. 2015).

    Both predictions are softmaxes of logits divided by `temperature`, over the whole vocabulary and not over
    this rank's slice of it. Two all-reduces of two and three numbers per token forward, none backward.

    Args:
        student: this rank's logits [s, b, v/tp].
        teacher: the teacher's, of the same shape; no gradient goes there.
        group: the ranks that share the vocabulary.
        vocab_start: the first vocabulary id of this slice.
        vocab_size: entries of the vocabulary; columns at or beyond it are padding, which takes no part and
            gets a zero gradient.
        temperature: positive; above 1 it evens both predictions out.
    """
    implementation = KL_DIVERGENCE.choose(CallFacts.of(student)).fn
    return implementation(student, teacher, group, vocab_start, vocab_size, temperature)
