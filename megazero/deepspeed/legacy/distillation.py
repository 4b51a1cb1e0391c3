"""On-policy distillation: a student's loss on its own texts against a teacher (Agarwal et al. 2024)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.deepspeed.legacy.rollout import RolloutBatch
from megazero.errors import DataError


@dataclass(frozen=True)
class ResponseTokenBatch:
    """Prompts with responses as next-token targets: the logits at position i predict ``target_ids[:, i]``.

    Attributes:
        input_ids: int64 [b, s].
        attention_mask: int64 [b, s].
        target_ids: int64 [b, s - 1].
        response_mask: bool [b, s - 1], True where the target belongs to a response.
    """

    input_ids: Tensor
    attention_mask: Tensor
    target_ids: Tensor
    response_mask: Tensor

    @classmethod
    def from_rollout(cls, rollout: RolloutBatch) -> ResponseTokenBatch:
        """Return the targets of a rollout.

        Raises:
            DataError: a response begins at the first token or past the end.
        """
        ids, start = rollout.input_ids, rollout.response_start_idx
        if not bool(((start >= 1) & (start <= ids.shape[1])).all()):
            raise DataError(f"`response_start_idx` must be from 1 to {ids.shape[1]}, but is {start.tolist()}")
        within = torch.arange(1, ids.shape[1], device=ids.device) >= start[:, None]
        mask = rollout.attention_mask[:, 1:].bool() & within
        return cls(ids, rollout.attention_mask, ids[:, 1:], mask)

    def select_causal_logits(self, logits: Tensor) -> Tensor:
        """Return the logits [b, s - 1, v] that predict the targets, from a model's [b, s, v].

        Raises:
            DataError: `logits` have another shape.
        """
        if logits.dim() != 3 or logits.shape[:2] != self.input_ids.shape:
            raise DataError(
                f"`logits` must be of {list(self.input_ids.shape)} tokens, but are {list(logits.shape)}"
            )
        return logits[:, :-1]


@dataclass(frozen=True)
class JSDLossOutput:
    """The mean loss over the tokens of responses, and the sum and the count to add up over ranks."""

    loss: Tensor
    loss_sum: Tensor
    valid_token_count: Tensor


def generalized_jsd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    response_mask: Tensor,
    beta: float = 0.5,
    temperature: float = 1.0,
    teacher_top_k: int | None = None,
    pointwise_clip: float | None = None,
) -> JSDLossOutput:
    """Return the generalized Jensen-Shannon divergence of teacher t and student s.

    With m = beta t + (1 - beta) s it is beta KL(t, m) + (1 - beta) KL(s, m). It is KL(t, s) for `beta` 0 and
    KL(s, t) for `beta` 1.

    Args:
        student_logits: [b, s, v].
        teacher_logits: [b, s, v].
        response_mask: [b, s], True for the tokens that count.
        beta: the teacher's weight in m.
        temperature: divides the logits.
        teacher_top_k: compare only this many tokens, the most probable ones of the teacher; None for all.
        pointwise_clip: the largest contribution of one vocabulary entry; None for no limit.

    Raises:
        DataError: shapes differ, or a number is out of its range.
    """
    vocabulary = student_logits.shape[-1]
    if student_logits.shape != teacher_logits.shape or student_logits.dim() != 3:
        raise DataError("`teacher_logits` must have the three dims of `student_logits`, but differ")
    if response_mask.shape != student_logits.shape[:2]:
        raise DataError("`response_mask` must have the first two dims of the logits, but differs")
    if not (0.0 <= beta <= 1.0 and temperature > 0.0 and (pointwise_clip is None or pointwise_clip >= 0.0)):
        raise DataError("`beta` must be from 0 to 1, `temperature` above 0 and `pointwise_clip` at least 0")
    if teacher_top_k is not None and not 1 <= teacher_top_k <= vocabulary:
        raise DataError(f"`teacher_top_k` must be from 1 to {vocabulary}, but is {teacher_top_k}")
    student, teacher = student_logits / temperature, teacher_logits / temperature
    if teacher_top_k is not None:
        top = teacher.topk(teacher_top_k, -1).indices
        student, teacher = student.gather(-1, top), teacher.gather(-1, top)
    student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
    if beta == 0.0:
        parts = teacher.exp() * (teacher - student)
    elif beta == 1.0:
        parts = student.exp() * (student - teacher)
    else:
        mixed = torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
        parts = beta * teacher.exp() * (teacher - mixed) + (1 - beta) * student.exp() * (student - mixed)
    if pointwise_clip is not None:
        parts = parts.clamp(max=pointwise_clip)
    total = (parts.sum(-1) * response_mask.to(parts.dtype)).sum()
    count = response_mask.sum().long()
    return JSDLossOutput(total / count.clamp_min(1), total, count)
