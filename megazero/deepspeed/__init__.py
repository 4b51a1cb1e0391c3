"""deepspeed: DeepSpeed's interface: an engine for the user's own model, with DeepSpeed's JSON and names.

Start with `initialize.py` and `engine/`. `config/` reads the JSON; `optimizers/` and `schedules/` wrap
torch's; `zero/` shards a module that knows nothing of ZeRO; `checkpoint/` reads saved states, DeepSpeed's own
too; `pipe/`, `moe/`, `sequence/` and `tensor_parallel/` distribute a model over ranks, and `comm/` joins the
ranks; `models/` has layers for scripts, `reports/` timers, logs and profiles, and `legacy/` features that
DeepSpeed has removed. `surface.py` makes the modules of ``import deepspeed`` from the tables in `names/`.
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
