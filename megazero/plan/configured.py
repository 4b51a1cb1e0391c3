"""The pipeline of a configuration on paper: its schedule, and what each chunk takes by its FLOPs."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.config.derive import data_parallel_size
from megazero.config.steps import Steps
from megazero.config.tree import Config, TokenizerConfig
from megazero.errors import ConfigError
from megazero.mpu import solo_context
from megazero.pipeline import Costs, Schedule
from megazero.train.programs import schedule_of
from megazero.train.stage_assignment import assign_layers, estimated_costs
from megazero.train.vocabulary import Vocabulary, build_vocabulary


@dataclass(frozen=True)
class PlannedPipeline:
    """What the stages of a configured training do.

    Attributes:
        schedule: of a step, at the end of a batch ramp.
        layers: those of each chunk, in model order.
        loads: FLOPs of each chunk as multiples of what a stage has on average. Layers with experts count the
            experts that a token goes to.
    """

    schedule: Schedule
    layers: tuple[range, ...]
    loads: tuple[float, ...]

    @classmethod
    def of(cls, config: Config, ranks: int) -> PlannedPipeline:
        """That of a configuration on so many ranks.

        Raises:
            ConfigError: its layers cannot be dealt out without the ranks, or the vocabulary is unknown.
        """
        if config.parallel.pipeline_partition == "measured":
            raise ConfigError(
                "`pipeline_partition` must not be measured here, as nothing runs that could be measured; "
                "choose cost"
            )
        vocabulary, context = _vocabulary(config), solo_context()
        steps = Steps.of(config, data_parallel_size(config, ranks))
        dealt = assign_layers(config, vocabulary, context)
        embedding, *layers, head = estimated_costs(config, vocabulary, context)
        costs = [sum(layers[number] for number in each) for each in dealt]
        costs[0] += embedding
        costs[-1] += head
        schedule = schedule_of(config, steps.ramp.final // steps.unit)
        stage = sum(costs) / schedule.stages
        return cls(schedule, tuple(dealt), tuple(cost / stage for cost in costs))

    def costs(self, of_a_stage: Costs) -> Costs:
        """The times of each chunk, where `of_a_stage` are those of an average stage."""
        found = {
            name: tuple(getattr(of_a_stage, name) * load for load in self.loads)
            for name in ("forward", "backward", "input", "weight")
        }
        return Costs(**found, transfer=of_a_stage.transfer)

    def report(self) -> str:
        """A line per chunk: where it is, what it holds, and how much that is."""
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
    """That of `--vocab-size`, for which no files are needed, or else of the tokenizer's."""
    if config.model.vocab_size is not None:
        config = config.model_copy(update={"tokenizer": TokenizerConfig()})
    return build_vocabulary(config)
