"""deepspeed: DeepSpeed's interface: an engine for the user's own model, with DeepSpeed's JSON and names.

Start with `initialize.py` and `engine.py` (`stepping.py` holds its training step, `answers.py` what a script
may query). `settings.py` reads the JSON; `optimizer.py`, `torch_rule.py`, `fused.py`, `muon.py` and
`schedules.py` connect torch's optimizers to ours; `sharding.py` lays a foreign module out in buckets;
`checkpoint.py` and `data.py` save and feed it; `report.py` reports progress; `estimates.py` says how much
memory states take. `surface.py` makes modules of the table of names, and `path/` leads ``import deepspeed``
to them. `adopt.py` finds a rank's place, `zero.py` has `Init`, and `moe` the layer of experts.
"""

from megazero.deepspeed.adopt import init_distributed
from megazero.deepspeed.data import RepeatingLoader
from megazero.deepspeed.engine.engine import DeepSpeedEngine
from megazero.deepspeed.estimates import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from megazero.deepspeed.fused import FusedLamb, FusedLion
from megazero.deepspeed.initialize import add_config_arguments, initialize
from megazero.deepspeed.muon import MuonWithAuxAdam
from megazero.deepspeed.optimizer import DeepSpeedOptimizer
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
