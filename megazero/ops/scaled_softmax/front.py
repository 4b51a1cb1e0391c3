"""The public scaled softmax and its table of implementations."""

from __future__ import annotations

from torch import Tensor

from megazero.ops.dispatch import Implementation, Operator, choose
from megazero.ops.scaled_softmax.fused import scaled_softmax_fused
from megazero.ops.scaled_softmax.reference import scaled_softmax_reference

SCALED_SOFTMAX = Operator(
    "scaled_softmax",
    (
        Implementation("fused", scaled_softmax_fused),
        Implementation("reference", scaled_softmax_reference),
    ),
)


def scaled_softmax(scores: Tensor, scale: float, causal: bool, mask: Tensor | None) -> Tensor:
    """softmax(scale * scores) over keys for scores [b, n, q, k]; fp32 inside, the input's dtype out.

    mask: bool, broadcastable to the scores, True = may attend. causal: with q != k (a KV cache) the
    last query sees the last key. A row that may attend to nothing gives zeros.
    """
    return choose(SCALED_SOFTMAX.implementations, scores).fn(scores, scale, causal, mask)
