"""The planned memory of devices over a step as a picture: a panel for the first, a middle and the last stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megazero.account.profilers.memory_picture import Scale, draw_held, kind_patches, name_room
from megazero.account.profilers.timeline import MemoryHistory
from megazero.commands.plan.timeline import NAMES
from megazero.pictures.style import Theme, new_figure
from megazero.plan.report import PlanReport
from megazero.plan.stage import UPDATE, StagePlan
from megazero.plan.times import StepTimes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def memory_figure(report: PlanReport, theme: Theme) -> Figure:
    """Draw the memory of a plan's devices over a step; it is called within `styled`."""
    stages, times = report.plan.stages, report.times
    chosen = list({stage.stage: stage for stage in (stages[0], stages[len(stages) // 2], stages[-1])}.values())
    figure = new_figure("Plan of the memory of a device over a step", report.headline(), height=1.6 + 1.8 * len(chosen))
    panels = list(figure.subplots(len(chosen), 1, sharex=True, sharey=True, squeeze=False)[:, 0])
    most = max(stage.resting + stage.peak.nbytes for stage in chosen)
    scale = Scale.of(times.seconds, most)
    kinds: dict[str, None] = {}
    for panel, stage in zip(panels, chosen, strict=True):
        held = held_over_step(stage, times)
        draw_held(panel, held, scale, theme, f"stage {stage.stage}")
        kinds |= dict.fromkeys(held.kinds)
    name_room(panels, most, report.device.allocator_bytes, scale)
    panels[-1].set_xlim(0, times.seconds / scale.seconds)
    panels[-1].set_xlabel(f"time ({scale.time})")
    figure.legend(handles=kind_patches(kinds, theme), loc="outside lower center", ncols=len(kinds))
    return figure


def held_over_step(stage: StagePlan, times: StepTimes) -> MemoryHistory:
    """The memory of a stage's device over a step: during each action the most that it takes, then what it leaves.

    What operators make counts as activations, transient buffers included.
    """
    spans = {str(span.action): span for span in times.timeline.spans[stage.stage]}
    resting = dict(stage.trace.resting["device"])
    resting["buffers"] = resting.get("buffers", 0) - stage.trace.buffers
    held = MemoryHistory()
    held.add(0.0, {**resting, "activations": 0})
    for name, most, left in stage.timeline:
        if name == UPDATE:
            start, end, words = times.timeline.makespan, times.seconds, UPDATE
        elif name in spans:
            action, start, end = spans[name]
            words = f"{NAMES[action.op]} of micro-batch {action.microbatch}"
        else:
            continue
        held.add(start, {**resting, "activations": most})
        held.add(end, {**resting, "activations": left})
        held.actions.append((start, end, words))
    return held
