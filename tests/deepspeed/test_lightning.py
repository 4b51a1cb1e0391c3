"""The calls of Lightning's DeepSpeed strategy fit our signatures; `test_programs.py` runs it, slowly."""

from __future__ import annotations

import inspect
from argparse import Namespace
from datetime import timedelta
from typing import Any

from megazero.deepspeed.surface import Surface, read_names
from tests.tables import over_table

deepspeed = Surface(read_names()).as_module("deepspeed")
TIMEOUT = timedelta(minutes=30)
CALLS: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "init_distributed": [(("gloo",), {"distributed_port": 29500, "timeout": TIMEOUT})],
    "initialize": [
        (
            (),
            {
                "args": Namespace(device_rank=0),
                "config": {},
                "model": None,
                "model_parameters": filter(None, []),
                "optimizer": None,
                "lr_scheduler": None,
                "dist_init_required": False,
            },
        )
    ],
    "checkpointing.configure": [
        (
            (),
            {
                "mpu_": None,
                "partition_activations": False,
                "contiguous_checkpointing": False,
                "checkpoint_in_cpu": False,
                "profile": False,
            },
        )
    ],
    "zero.Init": [((), {"enabled": True, "remote_device": "cpu", "config_dict_or_path": {}})],
    "zero.GatheredParameters": [(([],), {"modifier_rank": 0})],
    "DeepSpeedEngine.save_checkpoint": [
        (
            (None, "out"),
            {"client_state": {}, "tag": "checkpoint", "exclude_frozen_parameters": True},
        )
    ],
    "DeepSpeedEngine.load_checkpoint": [
        (
            (None, "out"),
            {
                "tag": "checkpoint",
                "load_optimizer_states": True,
                "load_lr_scheduler_states": False,
                "load_module_strict": True,
            },
        )
    ],
    "DeepSpeedEngine.backward": [((None, "loss"), {})],
    "DeepSpeedEngine.step": [((None,), {})],
    "utils.logging.logger.setLevel": [((30,), {})],
    "utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint": [(("out",), {})],
}


@over_table("name", CALLS)
def test_a_call_of_lightning_fits(name: str):
    found = deepspeed
    for part in name.split("."):
        found = getattr(found, part)
    for positional, named in CALLS[name]:
        inspect.signature(found).bind(*positional, **named)


def test_the_optimizer_is_known_by_its_class():
    from megazero.deepspeed.optimizers.optimizer import DeepSpeedOptimizer

    assert issubclass(DeepSpeedOptimizer, deepspeed.runtime.base_optimizer.DeepSpeedOptimizer)
