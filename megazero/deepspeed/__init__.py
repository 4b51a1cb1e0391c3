"""deepspeed: DeepSpeed's interface: an engine for the user's own model, with DeepSpeed's JSON and names.

Start with `initialize.py` and `engine/`. `config/` has the JSON as an engine takes it; `optimizers/` and
`schedules/` connect torch's to ours; `zero/` has `Init` and lays a foreign module out in buckets;
`checkpoint/` reads saved states, DeepSpeed's too; `pipe/`, `moe/`, `sequence/` and `tensor_parallel/` share a
model among ranks, which `comm/` joins; `models/` has layers for scripts, `reports/` what a training says, and
`legacy/` what DeepSpeed has removed. `surface.py` makes modules of the tables in `names/`, and `path/` leads
``import deepspeed`` to them.
"""

from megazero.deepspeed.comm.adopt import init_distributed
from megazero.deepspeed.engine.data import RepeatingLoader
from megazero.deepspeed.engine.engine import DeepSpeedEngine
from megazero.deepspeed.initialize import add_config_arguments, initialize
from megazero.deepspeed.optimizers.fused import FusedLamb, FusedLion
from megazero.deepspeed.optimizers.muon import MuonWithAuxAdam
from megazero.deepspeed.optimizers.optimizer import DeepSpeedOptimizer
from megazero.deepspeed.reports.estimates import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from megazero.deepspeed.surface import install

__all__ = [
    "DeepSpeedEngine",
    "DeepSpeedOptimizer",
    "FusedLamb",
    "FusedLion",
    "MuonWithAuxAdam",
    "RepeatingLoader",
    "add_config_arguments",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "init_distributed",
    "initialize",
    "install",
]
