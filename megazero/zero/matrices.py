"""Whole matrices of parameters whose parts lie on several ranks, for rules that need them."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.mpu.context import ParallelContext
from megazero.mpu.param_spec import matrix_spec
from megazero.optim.rule import MatrixRule
from megazero.zero.bucket import Bucket, whole_state


class WholeMatrices:
    """Lets a rule change whole matrices, whichever ranks hold parts of them.

    A bucket's tensor is gathered over its replicas where they shard state, then each matrix over the ranks
    that its rows and columns are cut over. A rank computes the matrices of which it holds a part: at stage 0
    all of them, otherwise about a replica's share. A matrix that lies on several ranks is computed by each of
    them, with the same result, so that nothing travels back.

    Args:
        rule: computes the update of a matrix.
        context: this rank's groups and place.
    """

    def __init__(self, rule: MatrixRule, context: ParallelContext):
        self.rule = rule
        self.context = context

    def updates(self, bucket: Bucket, prepared: Tensor) -> Tensor:
        """Let the rule compute the updates of a bucket's matrices; replicas and slices do so together.

        Args:
            bucket: holds parameters made of matrices.
            prepared: the rule's prepared tensors, fp32, flat over the layout's `state_range`.

        Returns:
            The updates, flat over the same range; zero where there is only padding.
        """
        layout, place = bucket.layout, self.context.place
        whole, result = whole_state(bucket, prepared), torch.zeros_like(prepared)
        for spec, span, slices in zip(layout.specs, layout.spans, layout.views(whole), strict=True):
            where = layout.overlap(*span)
            if where.start == where.stop:
                continue
            spec = matrix_spec(spec, place)
            assert spec.matrices is not None, f"{spec.name} is not made of matrices"
            matrices = spec.unshard(slices, self.context.groups)
            changed = spec.matrices.change(matrices, self.rule.change, split=self.rule.split_joined)
            first = max(0, layout.state_range.start - span[0])
            mine = spec.shard(changed, place).reshape(-1)
            result[where] = mine[first : first + where.stop - where.start]
        return result
