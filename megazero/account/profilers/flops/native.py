"""Profile the FLOPs of one step of a run by module, with the times of the next step, over all stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path

import torch
from torch import nn

from megazero.account.profiler import ProfiledRun, Profiler, TokenCount
from megazero.account.profilers.breakdown import Ledger, add_up, phase_of
from megazero.account.profilers.clock import clock_of
from megazero.account.profilers.files import Folder
from megazero.account.profilers.flops.attention import TOLERANCE, AttentionShapes
from megazero.account.profilers.flops.counter import (
    ModuleCounter,
    ModuleProfile,
    fill_containers,
    profiles_of,
)
from megazero.account.profilers.flops.table import ModuleRow, largest_types, module_tree
from megazero.account.profilers.flops.units import duration_to_string as seconds_text
from megazero.account.profilers.flops.units import (
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
)
from megazero.config.tree.config import Config
from megazero.layers.inputs import NOTHING_SKIPPED
from megazero.mpu.context import ParallelContext
from megazero.mpu.messages import gather_values
from megazero.mpu.param_spec import spec_of
from megazero.pipeline.actions import Action, Op

_DROPPED = 0.3  # the tolerance of counts with experts, which may drop tokens


class FlopsProfile(Profiler):
    """Counts the FLOPs of one step, and times the next step, because counting slows a step down.

    Args:
        config: the run's configuration.
        context: the ranks' groups, without observers.
    """

    def __init__(self, config: Config, context: ParallelContext):
        self.config = config
        self.settings = config.profiling
        self.context = context
        self.clock = clock_of(context.device)
        self.step = config.profiling.flops_profiler_step
        self._ledger = Ledger(self.clock)
        self._models: Mapping[int, nn.Module] = {}
        self._profiles: dict[nn.Module, ModuleProfile] = {}
        self._shapes = AttentionShapes(context.groups["cp"].size)
        self._counter: ModuleCounter | None = None
        self._forwards = 0
        self._times: Mapping[str | tuple[str, str], float] = {}
        self._say: Callable[[str], None] = print
        self._by_formula: TokenCount | None = None

    def begin(self, run: ProfiledRun) -> None:
        self._say, self._by_formula, self._models = run.say, run.flops_per_token, run.models
        for model in self._models.values():
            self._profiles |= profiles_of(model, numel=self._elements)
        self._counter = ModuleCounter(self._profiles, self.clock, self._shapes.see)

    @contextmanager
    def over_step(self, iteration: int) -> Iterator[None]:
        if self._counter is None or iteration not in (self.step, self.step + 1):
            yield
            return
        counts = iteration == self.step
        if not counts:  # forget the times of the counted step, which were slow
            for profile in self._profiles.values():
                profile.duration = 0.0
        self._counter.start(counts=counts)
        self._ledger.start()
        try:
            yield
        finally:
            pieces = self._ledger.stop()
            self._counter.stop()
        if self.context.device.type == "cuda":
            torch.cuda.synchronize(self.context.device)
        self._counter.settle()
        self._times = add_up(pieces, self.clock)
        self._shapes.stop()
        if not counts:
            self._report()

    def acted(self, action: Action, seconds: float) -> None:
        self._ledger.mark(phase_of(action))
        self._forwards += action.op is Op.FORWARD and self._shapes.counts

    def phase_ends(self, name: str) -> None:
        if name == "optimizer":
            self._ledger.mark("optimizer")

    def conclude(self) -> None:
        """Report now if the training ended with the counted step."""
        if self._times:
            self._report(counted_slowly=True)

    def _elements(self, param: nn.Parameter) -> int:
        return prod(spec_of(param).local_shape(self.context.place))

    def _report(self, *, counted_slowly: bool = False) -> None:
        """Print the profiles of all stages of rank 0's pipeline; every rank calls this."""
        own = self._rows()
        stages = gather_values(self.context.pp, [row.as_json() for row in own], self.context.device)
        model = self._of_model(own)
        if self.context.rank == 0:
            lines = self._lines([[ModuleRow.from_json(row) for row in rows] for rows in stages], model)
            if counted_slowly:
                lines.append("the training ended with the step that was counted, which counting made slower")
            self._print(lines)
        self._counter, self._times, self._profiles, self._models = None, {}, {}, {}

    def _rows(self) -> list[ModuleRow]:
        """A row for this rank's part of the model, and one for each module by its global name."""
        rows = []
        for number, model in self._models.items():
            prefix = f"chunk{number}." if len(self._models) > 1 else ""
            marked = self._shapes.complete(model, self._profiles)
            fill_containers(model, self._profiles)
            for name, module in model.named_modules():
                if module is not model:
                    shown = prefix + _global_name(name, model)
                    kind, figures = type(module).__name__, self._profiles[module]
                    rows.append(ModuleRow(shown, kind, figures, marked=module in marked))
        total = ModuleProfile()
        for figures in (self._profiles[model] for model in self._models.values()):
            total.flops += figures.flops
            total.macs += figures.macs
            total.params += figures.params
            total.duration += figures.duration
        kinds = {type(model).__name__ for model in self._models.values()}
        return [ModuleRow("", "/".join(sorted(kinds)), total, any(row.marked for row in rows)), *rows]

    def _of_model(self, own: Sequence[ModuleRow]) -> tuple[float, float]:
        """(FLOPs of all ranks in the step, parameters of the model); every rank calls this."""
        params = 0.0
        for model in self._models.values():
            for param in model.parameters():
                spec = spec_of(param)
                if spec.counts_on(self.context.place):
                    present = prod(spec.present(self.context.place))
                    params += present / self.context.groups[spec.replicas].size
        sums = torch.tensor([own[0].profile.flops, params], dtype=torch.float64, device=self.context.device)
        self.context.world.all_reduce(sums).wait()
        flops, whole = sums.tolist()
        return flops, whole

    def _lines(self, stages: Sequence[Sequence[ModuleRow]], model: tuple[float, float]) -> list[str]:
        settings = self.settings
        lines = [
            f"flops profile at step {self.step}, of all its micro-batches",
            *self._summary(stages[0][0], model),
        ]
        for stage, rows in enumerate(stages):
            if len(stages) > 1:
                lines.append(f"stage {stage} of the pipeline")
            depth = settings.flops_profiler_module_depth
            lines += largest_types(rows, depth, settings.flops_profiler_top_modules)
            if settings.flops_profiler_detailed:
                lines += module_tree(rows, rows[0].profile, depth)
        if any(row.marked for rows in stages for row in rows):
            lines.append("* attention counted from its shapes, in full: the counter does not see its kernel")
        return lines + self._shapes.warnings + self._against_formula(model[0])

    def _summary(self, own: ModuleRow, model: tuple[float, float]) -> list[str]:
        context, times, profile = self.context, self._times, own.profile
        more = self.settings.flops_profiler_recompute_fwd_factor
        forward, backward = times.get("forward", 0.0), times.get("backward", 0.0)
        whole = sum(times.values()) or 1e-9
        micro_batch = self.config.batch.micro_batch_size
        batches = self._forwards // max(1, len(self._models))

        def rate(share: float, seconds: float) -> str:
            return flops_to_string(share * profile.flops / max(seconds, 1e-9))

        rows: dict[str, object] = {
            "world size": context.world_size,
            "data parallel size": context.data.size,
            "model parallel size": context.world_size // context.data.size,
            "batch size per GPU": f"{micro_batch}, {batches} times",
            "params per GPU": params_to_string(profile.params),
            "params of model": params_to_string(model[1]),
            "fwd MACs per GPU": macs_to_string(profile.macs),
            "fwd flops per GPU": number_to_string(profile.flops),
            "fwd flops of model": number_to_string(model[0]),
            "fwd latency": seconds_text(forward),
            "fwd FLOPS per GPU": rate(1.0, forward),
            "bwd latency": seconds_text(backward),
            "bwd FLOPS per GPU": rate(2.0 + more, backward),
            "fwd+bwd FLOPS per GPU": rate(3.0 + more, forward + backward),
            "step latency": seconds_text(times.get("optimizer", 0.0)),
            "iter latency": seconds_text(whole),
            "FLOPS per GPU": rate(3.0 + more, whole),
            "samples/second": f"{micro_batch * batches * context.data.size / whole:.2f}",
        }
        return [f"  {name + ':':<32}{value}" for name, value in rows.items()]

    def _against_formula(self, counted: float) -> list[str]:
        """A line that compares with the formulas of `account/flops.py`; none if steps differ in shape."""
        config, formula = self.config, self._by_formula
        varies = config.curriculum.seqlen_schedule != "none" or config.skipping != type(config.skipping)()
        if formula is None or varies:
            return []
        length = config.model.seq_length
        batches = self._forwards / max(1, len(self._models))
        tokens = config.batch.micro_batch_size * length * batches * self.context.data.size
        expected = formula(length, NOTHING_SKIPPED) / 3.0 * tokens
        line = f"by formula, without masked scores: {number_to_string(expected)} fwd flops of model"
        # The formula counts dropped tokens too.
        tolerance = _DROPPED if config.model.num_experts else TOLERANCE
        if counted < (1.0 - tolerance) * expected:
            line += (
                f"; warning: only {100 * counted / expected:.1f}% of them were counted, so the counter does "
                "not see a kernel, and the figures of its modules are too low"
            )
        return [line]

    def _print(self, lines: Sequence[str]) -> None:
        output = self.settings.flops_profiler_output_file
        if output is None:
            for line in lines:
                self._say(line)
            return
        path = Path(output)
        if Folder(path.parent, writes=True).write(path.name, ("\n".join(lines) + "\n").encode()) is not None:
            self._say(f"flops profile: wrote {path}")


def _global_name(name: str, model: nn.Module) -> str:
    """A module's name with its layer's number in the whole model."""
    parts = name.split(".")
    if parts[0] == "layers" and len(parts) > 1:
        parts[1] = str(model.get_submodule(".".join(parts[:2])).layer)
    return ".".join(parts)
