"""Tied weights of layers on several stages: each stage holds a copy, and their gradients are summed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from megazero.deepspeed.zero.parallel import UserParallel
from megazero.mpu.context import ParallelContext
from megazero.mpu.group import Group, Transfer
from megazero.mpu.host import on_device
from megazero.mpu.param_spec import spec_of
from megazero.mpu.solo_group import SoloGroup
from megazero.zero.store.store import GRADIENT


class TieGroup:
    """The stages of a pipeline that hold the same tied weights; all of them make the same calls.

    They exchange messages over the pipeline's group, so no further communicator is opened. For two stages, as
    most ties have, no collective is faster.

    Args:
        pp: the group of the pipeline's stages.
        stages: the stages with the weights; this stage is one of them.
    """

    def __init__(self, pp: Group, stages: Sequence[int]):
        self.pp, self.stages = pp, sorted(stages)
        self.ranks = tuple(pp.ranks[stage] for stage in self.stages)
        self.rank = self.stages.index(pp.rank)

    @property
    def size(self) -> int:
        """The number of stages."""
        return len(self.stages)

    def sum(self, tensor: Tensor) -> None:
        """Sum `tensor` over the stages in place, in the order of stages, so that all get the same bits."""
        others = {stage: torch.empty_like(tensor) for stage in self.stages if stage != self.pp.rank}
        sends = [Transfer("send", tensor, stage) for stage in others]
        receives = [Transfer("recv", other, stage) for stage, other in others.items()]
        for work in self.pp.exchange([*sends, *receives]):
            work.wait()
        total = torch.zeros_like(tensor)
        for stage in self.stages:
            total += others.get(stage, tensor)
        tensor.copy_(total)

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite `tensor` with the first stage's."""
        first, *others = self.stages
        if self.pp.rank == first:
            transfers = [Transfer("send", tensor, stage) for stage in others]
        else:
            transfers = [Transfer("recv", tensor, first)]
        for work in self.pp.exchange(transfers):
            work.wait()


def without_ends(context: ParallelContext) -> ParallelContext:
    """The context without the group that sums tied weights of our own models; `TieGroup` does it here."""
    return replace(context, groups={**context.groups, "tied": SoloGroup("tied", context.rank)})


def mark_tied(modules: Mapping[str, nn.Module], groups: Mapping[str, TieGroup]) -> None:
    """Mark the specs of tied parameters as shared; all but the first stage's are copies.

    Args:
        modules: key -> this stage's module.
        groups: key -> the stages, for each key that several stages hold.
    """
    for key, group in groups.items():
        for param in modules[key].parameters():
            spec = replace(spec_of(param), shared=True)
            param.__dict__["spec"] = replace(spec, tied_with=spec.name if group.rank else None)


class PipelineParallel(UserParallel):
    """`UserParallel` of one stage, which sums the gradients of tied weights over their stages."""

    ties: Sequence[tuple[TieGroup, frozenset[str]]] = ()
    _complete = False

    def tie(self, groups: Mapping[str, TieGroup]) -> None:
        """Sum the gradients of tied modules, given by key, from now on."""
        names = [spec.name for bucket in self.store.buckets for spec in bucket.layout.specs]
        self.ties = [
            (group, frozenset(name for name in names if name.startswith(f"tied_modules.{key}.")))
            for key, group in sorted(groups.items())
        ]

    def start(self, step: int = 0) -> None:
        """Begin a step, see `DataParallel.start`."""
        super().start(step)
        self._complete = False

    def finish(self) -> None:
        """Wait until the step's gradient sums are complete; further calls have no effect."""
        if not self._complete:
            super().finish()
            self._sum_over_stages()
        self._complete = True

    @torch.no_grad()
    def _sum_over_stages(self) -> None:
        for group, names in self.ties:
            # A tied parameter has a bucket of its own, so all its stages shard it alike.
            buckets = [b for b in self.store.buckets if b.key.trainable and b.layout.specs[0].name in names]
            buckets.sort(key=lambda bucket: bucket.layout.specs[0].name)
            for loaded_buckets in self.store.stream((GRADIENT,), buckets, changes=(GRADIENT,)):
                for loaded in loaded_buckets:
                    sums = on_device(loaded.flats[GRADIENT], self.context.device)
                    group.sum(sums)
                    if sums is not loaded.flats[GRADIENT]:
                        loaded.flats[GRADIENT].copy_(sums)
