"""`PipelineModule`: a model as a row of layers, cut into the stages of a pipeline."""

from __future__ import annotations

from typing import Any

from megazero.deepspeed.config.settings import JsonSource
from megazero.deepspeed.engine.state import Given
from megazero.deepspeed.optimizers.optimizer import DeepSpeedOptimizer
from megazero.deepspeed.pipe.build import make_engine
from megazero.deepspeed.pipe.engine import PipelineEngine
from megazero.deepspeed.pipe.module import PipelineStage


class PipelineModule(PipelineStage):
    """See `PipelineStage`; `megazero.initialize` makes a `PipelineEngine` of it."""

    def make_engine(
        self, source: JsonSource, given: Given, model_parameters: Any
    ) -> tuple[PipelineEngine, DeepSpeedOptimizer | None, Any, Any]:
        """The results of `megazero.initialize`; see `build.make_engine`."""
        return make_engine(self, source, given, model_parameters)
