"""The concern that lets a training go on with another blend, when the file with its blend has changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megazero.data.blended import SampleDataset
from megazero.data.changing.blend import ChangingBlend
from megazero.data.changing.file import BlendFile, Written
from megazero.data.changing.history import Origin
from megazero.errors import DataError
from megazero.models.batch import MicroBatch
from megazero.mpu.context import ParallelContext
from megazero.mpu.messages import first_value
from megazero.train.observe.monitors.base import Monitor
from megazero.train.resume.fit import data_record
from megazero.train.step.concern import CONTINUE, SharedConcern, StepContext, Verdict
from megazero.train.step.feed import Feed


def blend_facts(dataset: SampleDataset | None) -> dict[str, object]:
    """The history of a blend for checkpoints, as JSON; nothing for one that cannot change."""
    return {"blend": dataset.history.model_dump(mode="json")} if isinstance(dataset, ChangingBlend) else {}


class BlendEdits(SharedConcern):
    """Looks at the file with the blend after each step, and lets all ranks go on with a new blend in it.

    The first rank reads it. A blend that a rank cannot open is used by none, which each log line says.
    file: None if there is none; note: adds facts to later checkpoints.
    """

    def __init__(
        self,
        feed: Feed[MicroBatch] | None,
        file: Path | None,
        context: ParallelContext,
        monitor: Monitor,
        interval: int,
        note: Callable[[Mapping[str, object]], None],
    ):
        self.feed, self.context, self.note = feed, context, note
        self.monitor, self.interval = monitor, interval
        dataset = None if feed is None else feed.dataset
        self.blend = dataset if isinstance(dataset, ChangingBlend) else None
        self.file = None if file is None or self.blend is None else BlendFile(file, self.blend.words)
        if file is not None and self.blend is None and feed is not None:
            monitor.message(f"{file} is read once: only weighted blends in the order `single` can change")
        self._new: Written | None = None

    def sees(self, now: StepContext) -> Sequence[float]:
        watches = self.file is not None and self.context.rank == 0 and not now.ends
        self._new = self.file.look() if self.file is not None and watches else None
        return [float(self._new is not None)]

    def agreed(self, now: StepContext, most: Sequence[float]) -> Verdict:
        if self.file is None or self.blend is None:
            return CONTINUE
        if most[0]:
            self._take(now, self.file, self.blend)
        if self.file.problem is not None and now.due(self.interval):
            why = f"{self.file.path} cannot be used: {self.file.problem}"
            self.monitor.message(f"warning: training keeps the blend that it has: {why}")
            self.file.again()
        return CONTINUE

    def _take(self, now: StepContext, file: BlendFile, blend: ChangingBlend) -> None:
        """Go on with a new blend, if every rank can open it; every rank calls this."""
        world, device = self.context.world, self.context.device
        new = None if self._new is None else [self._new.words, self._new.origin.model_dump()]
        first, problem, history = first_value(world, new, device), None, blend.history
        assert first is not None, "the first rank has read a blend"
        words, origin = tuple(first[1][0]), Origin(**first[1][1])
        try:
            shares = blend.library.shares(words, history.sources)
            if not history.segments[-1].mixes(shares):
                history = blend.edited(shares, now.state.consumed_samples, origin)
        except (DataError, OSError) as error:
            problem = str(error)
        failed = first_value(world, problem, device)
        file.problem = None if failed is None else f"rank {failed[0]}: {failed[1]}"
        if failed is not None:
            return
        file.words = words
        if history is blend.history:
            return
        blend.use(history, words)
        if self.feed is not None and self.feed.reader is not None:
            self.feed.reader.forget()
        record = data_record(blend, self.context)
        self.note({**blend_facts(blend), "data": [facts.model_dump() for facts in record or ()]})
        iteration = now.state.iteration + 1
        self.monitor.message(f"iteration {iteration} is the first of another blend: {history.change}")
