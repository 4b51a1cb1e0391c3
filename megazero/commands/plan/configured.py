"""The pipeline of a configuration: its schedule, and each chunk's share of the FLOPs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, islice

from megazero.config.derive import PipelineShape, data_parallel_size
from megazero.config.steps import Steps
from megazero.config.tree.config import Config
from megazero.config.tree.tokenizer import TokenizerConfig
from megazero.errors import ConfigError
from megazero.models.chunk import Part
from megazero.mpu.context import solo_context
from megazero.pipeline.actions import Schedule
from megazero.pipeline.simulate import Costs
from megazero.train.parts.chunks import assign_parts, estimated_costs, schedule_of
from megazero.train.parts.vocabulary import Vocabulary, build_vocabulary


@dataclass(frozen=True)
class PlannedPipeline:
    """The pipeline of a configured training.

    Attributes:
        schedule: the schedule of a step at the final batch size.
        parts: the parts of the model in each chunk, in order.
        loads: FLOPs of each chunk as multiples of the mean stage's; of a layer's experts, those that a token
            goes to count.
    """

    schedule: Schedule
    parts: tuple[tuple[Part, ...], ...]
    loads: tuple[float, ...]

    @classmethod
    def of(cls, config: Config, ranks: int) -> PlannedPipeline:
        """Plan the pipeline of a configuration on `ranks` ranks.

        Raises:
            ConfigError: the layers cannot be assigned without running anything, or the vocabulary is unknown.
        """
        if config.parallel.pipeline_partition == "measured":
            raise ConfigError(
                "`pipeline_partition` must not be measured here, as nothing runs that could be measured; "
                "choose cost"
            )
        vocabulary, context = _vocabulary(config), solo_context()
        steps = Steps.of(config, data_parallel_size(config, ranks))
        assigned = assign_parts(config, vocabulary, context)
        block_costs = iter(estimated_costs(config, vocabulary, context))
        costs = [sum(islice(block_costs, len(parts))) for parts in assigned]
        schedule = schedule_of(PipelineShape.of(config), steps.ramp.final // steps.unit)
        stage = sum(costs) / schedule.stages
        return cls(schedule, tuple(assigned), tuple(cost / stage for cost in costs))

    def costs(self, of_a_stage: Costs) -> Costs:
        """Scale the times of a mean stage, which are numbers, to the times of each chunk."""
        forward, backward, input_, weight = (
            tuple(getattr(of_a_stage, name) * load for load in self.loads)
            for name in ("forward", "backward", "input", "weight")
        )
        return Costs(forward, backward, input_, weight, of_a_stage.transfer)

    def report(self) -> str:
        """A line per chunk: its stage, its layers, and its load."""
        lines = []
        for chunk, (stage, parts, load) in enumerate(
            zip(self.schedule.stage_of, self.parts, self.loads, strict=True)
        ):
            names = ", ".join(_names(parts))
            lines.append(f"chunk {chunk} on stage {stage}: {names}; {load:.2f} of a mean stage")
        return "\n".join(lines)


def _names(parts: tuple[Part, ...]) -> Iterator[str]:
    """Name the parts, with neighbouring layers as ``layers 0 to 3``."""
    for layers, run in groupby(parts, lambda part: isinstance(part, int)):
        first, *rest = run
        if not layers:
            yield from (str(part) for part in (first, *rest))
        else:
            yield f"layers {first} to {rest[-1]}" if rest else f"layer {first}"


def _vocabulary(config: Config) -> Vocabulary:
    """The vocabulary of `--vocab-size`, which needs no tokenizer's files, or else the tokenizer's."""
    if config.model.vocab_size is not None:
        config = config.model_copy(update={"tokenizer": TokenizerConfig()})
    return build_vocabulary(config)
