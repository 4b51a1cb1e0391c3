"""Gradients where ranks share sequences: their scale and their type on the way.

They are means over all ranks, at every stage of ZeRO, as if pieces of a sequence were samples. DeepSpeed
0.19.8 has means at stage 3, and at stages 0 to 2 sums over the ranks of a sequence, so that no loss is right
for all.
"""

from __future__ import annotations

from dataclasses import replace

from megazero.deepspeed.config.settings import UserSettings
from megazero.mpu.context import ParallelContext


def for_sequences(settings: UserSettings, context: ParallelContext) -> UserSettings:
    """The settings of an engine some of whose ranks share sequences; a note says what loss it is for."""
    ranks = context.groups["cp"].size
    if ranks == 1:
        return settings
    dtype, notes = settings.extras.ranks.seq_parallel_communication_data_type, settings.notes
    if settings.zero.stage < 3:
        notes = (
            *notes,
            f"gradients are means over all {context.replica.size} ranks, also over the {ranks} that share a "
            "sequence, over which DeepSpeed sums them at ZeRO 0 to 2. A loss is right that is the mean over "
            "all tokens on every rank (by `torch.distributed.nn.functional.all_gather`, as at ZeRO 3); "
            f"multiply one that adds up over these ranks by {ranks}.",
        )
    zero = settings.zero if dtype is None else settings.zero.model_copy(update={"grad_reduce_dtype": dtype})
    return replace(settings, zero=zero, notes=notes)
