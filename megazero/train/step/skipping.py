"""The tokens and layers that each step skips, as a function of the training's progress."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megazero.config.steps import Progress
from megazero.config.training_plan import TrainingPlan
from megazero.config.tree.skipping import SkippingConfig
from megazero.layers.inputs import NOTHING_SKIPPED, Skipping
from megazero.mpu.rng import derive_key


@dataclass(frozen=True)
class LayerDrop:
    """Progressive layer dropping (Zhang & He 2020): which layers a step runs.

    In step t (from 0), layer l of L (from 0) runs with probability p = 1 - l / L (1 - keep), where
    keep = (1 - theta) exp(-gamma t) + theta, and its branches are divided by p. All samples of a step
    on all ranks share the draw, so a skipped layer costs no time.

    Attributes:
        layers: L.
        theta: the limit that `keep` falls to.
        gamma: the rate at which it falls.
        seed: seed of the draws.
    """

    layers: int
    theta: float
    gamma: float
    seed: int

    def keep(self, iteration: int) -> float:
        """The probability that layer L, one past the last, would run at this step."""
        return (1.0 - self.theta) * math.exp(-self.gamma * iteration) + self.theta

    def scales(self, iteration: int) -> tuple[float, ...]:
        """The scale of each layer's branches: 1 / p if the step runs the layer, else 0."""
        drop = (1.0 - self.keep(iteration)) / self.layers
        probabilities = [1.0 - layer * drop for layer in range(self.layers)]
        # Uniform in [0, 1).
        draws = (derive_key(self.seed, "layer drop", iteration, i) / 2.0**63 for i in range(self.layers))
        return tuple(1.0 / p if drawn < p else 0.0 for p, drawn in zip(probabilities, draws, strict=True))


@dataclass(frozen=True)
class SkippingPlan:
    """The tokens and layers that the steps of a training skip.

    Attributes:
        training_plan: says how many tokens layers with random-LTD compute.
        dropping: the layers with random-LTD.
        drop: progressive layer dropping, or None.
    """

    training_plan: TrainingPlan
    dropping: tuple[int, ...] | range
    drop: LayerDrop | None

    @classmethod
    def of(
        cls, settings: SkippingConfig, layers: int, seed: int, training_plan: TrainingPlan
    ) -> SkippingPlan:
        """Make the plan of a run with these settings and `layers` layers."""
        drop = None
        if settings.progressive_layer_drop:
            drop = LayerDrop(layers, settings.pld_theta, settings.pld_gamma, seed)
        return cls(training_plan, settings.dropping_layers(layers), drop)

    def at(self, progress: Progress) -> Skipping:
        """The tokens and layers that the step after `progress` skips."""
        kept = self.training_plan.at(progress).kept_tokens
        if kept is None and self.drop is None:
            return NOTHING_SKIPPED
        scales = None if self.drop is None else self.drop.scales(progress.iteration)
        return Skipping(kept, self.dropping, scales)
