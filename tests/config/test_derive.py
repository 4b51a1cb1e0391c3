"""What follows from the configuration about the model and its layout."""

from __future__ import annotations

from typing import Any

import pytest

from megazero.config.derive import (
    PipelineShape,
    data_parallel_size,
    padded_vocab_size,
)
from megazero.errors import ConfigError
from tests.config.samples import make_config
from tests.tables import over_table


@over_table(
    ("vocab", "divisible", "tensor", "padded"),
    [
        (50257, 128, 1, 50304),
        (50257, 128, 8, 51200),
        (128, 128, 1, 128),
        (1, 1, 3, 3),
        (30522, 128, 2, 30720),
    ],
)
def test_padded_vocab_size(vocab: int, divisible: int, tensor: int, padded: int) -> None:
    model = make_config({"model.make_vocab_size_divisible_by": divisible}).model
    assert padded_vocab_size(vocab, model, tensor) == padded


def test_data_parallel_size() -> None:
    config = make_config({"parallel.tensor_model_parallel_size": 2})
    assert data_parallel_size(config, 8) == 4
    for world in (7, 0, -2):
        with pytest.raises(ConfigError, match="must be a multiple of"):
            data_parallel_size(config, world)


@over_table(
    ("stages", "changes", "per_stage", "kind"),
    [
        (1, {}, 1, "1f1b"),
        (4, {}, 1, "1f1b"),
        (4, {"pipeline_schedule": "gpipe"}, 1, "gpipe"),
        (1, {"pipeline_schedule": "zb-v"}, 2, "zb-v"),
        (4, {"pipeline_schedule": "zb-v"}, 2, "zb-v"),
        (4, {"num_layers_per_virtual_pipeline_stage": 1}, 3, "interleaved"),
        (4, {"num_layers_per_virtual_pipeline_stage": 3}, 1, "1f1b"),
        (2, {"num_layers_per_virtual_pipeline_stage": 3}, 2, "interleaved"),
        (3, {"num_virtual_stages_per_pipeline_rank": 2}, 2, "interleaved"),
        (3, {"num_virtual_stages_per_pipeline_rank": 1}, 1, "1f1b"),
        (2, {"pipeline_schedule": "interleaved"}, 1, "interleaved"),
    ],
)
def test_chunks_and_schedule_of_twelve_layers(
    stages: int, changes: dict[str, Any], per_stage: int, kind: str
) -> None:
    parallel = {"pipeline_model_parallel_size": stages, **changes}
    config = make_config({"model.num_layers": 12, **{f"parallel.{k}": v for k, v in parallel.items()}})
    shape = PipelineShape.of(config)
    assert (shape.stages, shape.chunks_per_stage, shape.kind) == (stages, per_stage, kind)
    assert shape.chunks == stages * per_stage
