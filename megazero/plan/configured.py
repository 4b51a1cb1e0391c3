"""The pipeline of a configuration on paper: its schedule, and the share of the FLOPs of each chunk."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.config.derive import data_parallel_size
from megazero.config.steps import Steps
from megazero.config.tree import Config, TokenizerConfig
from megazero.errors import ConfigError
from megazero.mpu import solo_context
from megazero.pipeline import Costs, Schedule
from megazero.train.parts.chunks import assign_layers, estimated_costs, schedule_of
from megazero.train.parts.vocabulary import Vocabulary, build_vocabulary


@dataclass(frozen=True)
class PlannedPipeline:
    """The work of the pipeline stages of a configured training.

    Attributes:
        schedule: the schedule of a step at the end of a batch ramp.
        layers: the layers of each chunk, in model order.
        loads: FLOPs of each chunk as multiples of the mean stage's. Layers with experts count the
            experts that a token goes to.
    """

    schedule: Schedule
    layers: tuple[range, ...]
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
        assigned = assign_layers(config, vocabulary, context)
        embedding, *layers, head = estimated_costs(config, vocabulary, context)
        costs = [sum(layers[number] for number in numbers) for numbers in assigned]
        costs[0] += embedding
        costs[-1] += head
        schedule = schedule_of(config, steps.ramp.final // steps.unit)
        stage = sum(costs) / schedule.stages
        return cls(schedule, tuple(assigned), tuple(cost / stage for cost in costs))

    def costs(self, of_a_stage: Costs) -> Costs:
        """The times of each chunk, where `of_a_stage` has the times of a mean stage, each a number."""
        forward, backward, input_, weight = (
            tuple(getattr(of_a_stage, name) * load for load in self.loads)
            for name in ("forward", "backward", "input", "weight")
        )
        return Costs(forward, backward, input_, weight, of_a_stage.transfer)

    def report(self) -> str:
        """A line per chunk: its stage, its layers, and its load."""
        last = len(self.layers) - 1
        lines = []
        for chunk, (stage, layers, load) in enumerate(
            zip(self.schedule.stage_of, self.layers, self.loads, strict=True)
        ):
            held = ["embedding"] * (chunk == 0) + _names(layers) + ["head"] * (chunk == last)
            lines.append(f"chunk {chunk} on stage {stage}: {', '.join(held)}; {load:.2f} of a mean stage")
        return "\n".join(lines)


def _names(layers: range) -> list[str]:
    if len(layers) < 2:
        return [f"layer {number}" for number in layers]
    return [f"layers {layers[0]} to {layers[-1]}"]


def _vocabulary(config: Config) -> Vocabulary:
    """The vocabulary of `--vocab-size`, which needs no files, or else the tokenizer's."""
    if config.model.vocab_size is not None:
        config = config.model_copy(update={"tokenizer": TokenizerConfig()})
    return build_vocabulary(config)
