"""A softmax whose denominator has an extra term, so that a row of probabilities can sum to less than one.

(Off-by-one: Miller 2023; a learned logit for each head: gpt-oss, OpenAI 2025.)
"""

from __future__ import annotations

import torch
from torch import Tensor


def with_softmax_offset(out: Tensor, lse: Tensor, offset: Tensor) -> Tensor:
    """Add exp(offset) to the softmax's denominators of an attention result: [s, b, n e].

    With e^l the sum of a row's exponentials and a the offset, the row is to be divided by e^l + e^a instead
    of e^l, which is to multiply it by e^l / (e^l + e^a) = sigmoid(l - a). That holds for a whole row only:
    where parts of the keys are merged, this comes once, after the last one.

    Args:
        out: [s, b, n e] or [s, b, n, e], as attention gives it.
        lse: [b, n, s], the log-sum-exp of each row.
        offset: [n], the logit of each head; gradients flow to it.
    """
    s, b = out.shape[:2]
    share = torch.sigmoid(lse - offset.to(lse.dtype).view(-1, 1)).permute(2, 0, 1)
    heads = out.reshape(s, b, len(offset), -1)
    return (heads * share.unsqueeze(-1)).to(out.dtype).reshape(s, b, -1)
