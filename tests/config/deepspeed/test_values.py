"""Values of a DeepSpeed JSON to which DeepSpeed gives a meaning of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megazero.config.resolve import Resolved, parse_config
from megazero.errors import ConfigError
from tests.config.samples import BASE_FLAGS
from tests.tables import over_table


def launched(folder: Path, **document: Any) -> Resolved:
    file = folder / "ds.json"
    file.write_text(json.dumps(document))
    return parse_config([*BASE_FLAGS, "--deepspeed", "--deepspeed_config", str(file)], world_size=4)


@over_table("stage", [0, 1, 2])
def test_zero_plus_plus_counts_at_stage_3_alone(tmp_path: Path, stage: int) -> None:
    keys = {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": 2}
    resolved = launched(tmp_path, bf16={"enabled": True}, zero_optimization={"stage": stage, **keys})
    zero = resolved.config.zero
    wires = (zero.quantized_weights, zero.quantized_gradients, zero.hpz_partition_size)
    assert wires == ("none", "none", 1)
    said = " ".join(resolved.warnings)
    assert f"DeepSpeed reads it at stage 3 alone, and `zero_optimization.stage` is {stage}" in said
    assert all(f"zero_optimization.{key}" in said for key in keys)


def test_zero_plus_plus_counts_at_stage_3(tmp_path: Path) -> None:
    keys = {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": 2}
    zero = launched(tmp_path, bf16={"enabled": True}, zero_optimization={"stage": 3, **keys}).config.zero
    wires = (zero.quantized_weights, zero.quantized_gradients, zero.hpz_partition_size)
    assert wires == ("int8", "int4", 2)


def test_the_optimizers_state_may_not_be_missing(tmp_path: Path) -> None:
    launched(tmp_path, zero_optimization={"stage": 1, "ignore_missing_optim_state": False})
    with pytest.raises(ConfigError) as caught:
        launched(tmp_path, zero_optimization={"stage": 1, "ignore_missing_optim_state": True})
    assert caught.value.violations == [
        f"{tmp_path}/ds.json: `zero_optimization.ignore_missing_optim_state` is not accepted as true: use "
        "`--finetune`, for weights alone."
    ]


@over_table(("step", "profiled"), [(5, 5), (0, 1), (-1, 2**62)])
def test_a_step_below_0_is_never_profiled(tmp_path: Path, step: int, profiled: int) -> None:
    config = launched(tmp_path, flops_profiler={"enabled": True, "profile_step": step}).config
    assert config.profiling.flops_profiler_step == profiled
