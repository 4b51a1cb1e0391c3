"""Weights that layers on several stages share: each stage holds a copy, and their gradients are summed."""

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
from megazero.zero.policy import ZeroPolicy
from megazero.zero.store.store import GRADIENT, Store
from megazero.zero.unit import Unit


class TieGroup:
    """Some stages of a pipeline, which hold the same weights; all of them make the same calls.

    They send to each other over the pipeline's own group: most ties have two ends, for which nothing is
    faster, and no further communicator is opened.

    Args:
        pp: the stages of the pipeline.
        stages: those that belong to it, this one among them.
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
        """Sum `tensor` over the stages in place, in their order, so that all get the same bits."""
        theirs = {stage: torch.empty_like(tensor) for stage in self.stages if stage != self.pp.rank}
        sends = [Transfer("send", tensor, stage) for stage in theirs]
        receives = [Transfer("recv", other, stage) for stage, other in theirs.items()]
        for work in self.pp.exchange([*sends, *receives]):
            work.wait()
        total = torch.zeros_like(tensor)
        for stage in self.stages:
            total += theirs.get(stage, tensor)
        tensor.copy_(total)

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite `tensor` with the one on the first of the stages."""
        first, *others = self.stages
        if self.pp.rank == first:
            transfers = [Transfer("send", tensor, stage) for stage in others]
        else:
            transfers = [Transfer("recv", tensor, first)]
        for work in self.pp.exchange(transfers):
            work.wait()


def without_ends(context: ParallelContext) -> ParallelContext:
    """The context without the group of the first and the last stage, which `TieGroup` takes the place of."""
    return replace(context, groups={**context.groups, "tied": SoloGroup("tied", context.rank)})


def mark_tied(modules: Mapping[str, nn.Module], groups: Mapping[str, TieGroup]) -> None:
    """Let the specs of tied parameters say that other stages hold them too, and that the first one counts.

    Args:
        modules: this stage's modules by key.
        groups: the stages of each key that several stages hold.
    """
    for key, group in groups.items():
        for param in modules[key].parameters():
            spec = replace(spec_of(param), shared=True)
            param.__dict__["spec"] = replace(spec, tied_with=spec.name if group.rank else None)


class PipelineParallel(UserParallel):
    """`UserParallel` of one stage, whose gradients of tied weights are summed over their stages.

    Args:
        model: the stage's layers.
        units: the units of these.
        store: the store that `build_store` made of them.
        policy: the policy given to `build_store`.
        context: the process groups.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        store: Store,
        policy: ZeroPolicy,
        context: ParallelContext,
    ):
        super().__init__(model, units, store, policy, context)
        self.ties: list[tuple[TieGroup, frozenset[str]]] = []
        self._device = context.device
        self._complete = False

    def tie(self, groups: Mapping[str, TieGroup]) -> None:
        """Sum the gradients of the modules with these keys from now on, in the order of the keys."""
        names = [spec.name for bucket in self.store.buckets for spec in bucket.layout.specs]
        for key, group in sorted(groups.items()):
            mine = frozenset(name for name in names if name.startswith(f"tied_modules.{key}."))
            self.ties.append((group, mine))

    def start(self, step: int = 0) -> None:
        """Begin a step, see `DataParallel.start`."""
        super().start(step)
        self._complete = False

    def finish(self) -> None:
        """Wait until the step's gradient sums are complete; calling it again changes nothing."""
        if not self._complete:
            super().finish()
            self._sum_over_stages()
        self._complete = True

    @torch.no_grad()
    def _sum_over_stages(self) -> None:
        for group, names in self.ties:
            # A tied parameter has its bucket to itself, so all stages cut it into the same slices.
            buckets = [b for b in self.store.buckets if b.key.trainable and b.layout.specs[0].name in names]
            buckets.sort(key=lambda bucket: bucket.layout.specs[0].name)
            for loaded_buckets in self.store.stream((GRADIENT,), buckets, changes=(GRADIENT,)):
                for loaded in loaded_buckets:
                    sums = on_device(loaded.flats[GRADIENT], self._device)
                    group.sum(sums)
                    if sums is not loaded.flats[GRADIENT]:
                        loaded.flats[GRADIENT].copy_(sums)
