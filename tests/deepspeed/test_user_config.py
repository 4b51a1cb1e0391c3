"""`DeepSpeedConfig`, the page about it, and configurations such as scripts carry."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megazero.deepspeed.config.settings import read_settings
from megazero.deepspeed.config.user import DeepSpeedConfig
from megazero.deepspeed.engine.autocast import Autocast
from megazero.deepspeed.optimizers.choose import of_json
from megazero.deepspeed.schedules.choose import of_json as schedule_of_json
from megazero.errors import ConfigError
from tests.tables import over_table

PAGE = Path(__file__).parents[2] / "docs/deepspeed/json.md"


@over_table("code", re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
def test_the_examples_of_the_page_run(code: str):
    exec(compile(code, str(PAGE), "exec"), {})


OFFLOADED = {"device": "cpu", "pin_memory": True, "buffer_count": 4, "fast_init": False}
GENERATED = {
    "stage": 3,
    "offload_optimizer": {"device": "none", "nvme_path": None},
    "offload_param": {"device": "cpu", "buffer_size": "auto", "max_in_cpu": 1e9},
    "overlap_comm": True,
    "sub_group_size": 1e12,
    "reduce_bucket_size": "auto",
    "stage3_max_live_parameters": "auto",
    "gather_16bit_weights_on_model_save": "auto",
}
ACCEPTED: dict[str, dict[str, Any]] = {
    "generated": {
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 32, "min_loss_scale": 1},
        "bf16": {"enabled": True},
        "zero_optimization": GENERATED,
        "gradient_clipping": "auto",
        "steps_per_print": 1e5,
        "zero_force_ds_cpu_optimizer": False,
    },
    "one cycle": {
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.8, 0.999], "eps": 1e-8}},
        "scheduler": {
            "type": "OneCycle",
            "params": {"cycle_min_lr": 0.004, "cycle_max_lr": 0.015, "decay_lr_rate": 0.01},
        },
    },
    "lamb": {
        "optimizer": {
            "type": "Lamb",
            "params": {"lr": 11e-3, "bias_correction": False, "max_coeff": 0.3, "min_coeff": 0.01},
        },
        "fp16": {"enabled": True, "loss_scale": 0},
        "prescale_gradients": False,
    },
    "1-bit": {
        "optimizer": {
            "type": "OneBitAdam",
            "params": {"lr": 1e-5, "freeze_step": 9, "cuda_aware": False, "comm_backend_name": "nccl"},
        },
        "bf16": {"enabled": True},
        "communication_data_type": "fp16",
    },
    "old": {
        "zero_optimization": {"stage": 2, "cpu_offload": True, "offload_optimizer": "auto"},
        "logging": {"steps_per_print": 100},
        "_comment": "monitors",
        "amp": {"enabled": False},
        "elasticity": {"enabled": False},
        "seq_parallel_communication_data_type": "bf16",
    },
    "half masters": {
        "fp16": {"enabled": True, "fp16_master_weights_and_grads": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": OFFLOADED},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 9, "warmup_min_ratio": 0}},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    },
    "leaves": {
        "zero_optimization": {"stage": 3, "leaf_module": {"classes": ["a.B"]}},
        "flops_profiler": {"enabled": False, "detailed": True},
        "tensor_parallel": {"autotp_size": 1},
        "hybrid_engine": {"enabled": True, "max_out_tokens": 64},
        "autotuning": {"enabled": True, "fast": True},
        "bf16": {
            "enabled": True,
            "loss_scale": 0,
            "loss_scale_window": 500,
            "hysteresis": 2,
            "min_loss_scale": 1,
        },
    },
}
WITHOUT_EFFECT: dict[str, tuple[dict[str, Any], str]] = {
    "compiler": ({"compile": {"deepcompile": True, "passes": ["z3"]}}, "compiles the forward alone"),
    "experts": (
        {"expert_parallel": {"enabled": True, "autoep_size": 8, "load_balance_coeff": None}},
        "each rank with all experts",
    ),
    "direct gathers": (
        {"zero_optimization": {"sdma_allgather": True, "sdma_allgather_max_numel": 64}},
        "through torch.distributed",
    ),
    "overlap misspelt": (
        {"zero_optimization": {"stage": 2, "comm_overlap": True}},
        "`overlap_comm` is meant",
    ),
    "threshold misspelt": (
        {"zero_optimization": {"stage": 3, "stage3_param_persitance_threshold": 1e5}},
        "`stage3_param_persistence_threshold` is meant",
    ),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "misspelt": ({"zero_optimization": {"stage3_param_persistance_threshold": 1}}, "did you mean"),
    "zenflow": ({"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}, "every gradient takes"),
    "compiler": ({"compile": {"deepcompile": True, "passes": ["autosp"]}}, "does not share sequences"),
    "experts": ({"expert_parallel": {"enabled": True, "top_k": 1}}, "the model's own router decides"),
    "sparse": ({"sparse_attention": {"mode": "strided"}}, "choose dense, fixed, variable, bigbird or"),
}


@over_table("name", ACCEPTED)
def test_configurations_that_scripts_carry(name: str):
    settings = read_settings({"train_batch_size": 8, **ACCEPTED[name]}, 1)
    if settings.extras.optimizer is not None:
        optimizer = of_json(settings.extras.optimizer, list(torch.nn.Linear(2, 2).parameters()))
        if settings.extras.scheduler is not None:
            schedule_of_json(settings.extras.scheduler, optimizer).step()


@over_table("name", WITHOUT_EFFECT)
def test_what_examples_carry_without_effect_is_named(name: str):
    config, why = WITHOUT_EFFECT[name]
    (note,) = read_settings({"train_batch_size": 8, **config}, 1).notes
    assert why in note


@over_table("name", REFUSED)
def test_refusals_say_why(name: str):
    config, why = REFUSED[name]
    with pytest.raises(ConfigError, match=why):
        read_settings({"train_batch_size": 8, **config}, 1)


def test_parameters_stay_where_they_are_used_below_stage_3():
    """DeepSpeed-Chat writes `offload_param` at every stage."""
    offload = {"device": "cpu"}
    for stage, place in ((2, "none"), (3, "cpu")):
        section = {"stage": stage, "offload_param": offload, "offload_optimizer": offload}
        read = read_settings({"train_batch_size": 1, "zero_optimization": section}, 1).offload
        assert (read.parameters, read.optimizer) == (place, "cpu")


CASTS = {
    "autocast": (
        {"torch_autocast": {"enabled": True, "dtype": "float16"}},
        "`torch_autocast.dtype` must be bf16 with weights in fp32, but is float16",
    ),
    "autocast beside another type": (
        {"torch_autocast": {"enabled": True, "dtype": "bf16"}, "fp16": {"enabled": True}},
        "`torch_autocast.dtype` must be fp16 with weights in fp16, but is bf16",
    ),
    "autocast misspelt": (
        {"torch_autocast": {"enabled": True, "type": "bf16"}},
        "unknown key `torch_autocast.type`",
    ),
}


@over_table("name", CASTS)
def test_casts_that_cannot_be_made_are_refused(name: str):
    config, why = CASTS[name]
    settings = read_settings({"train_batch_size": 8, **config}, 1)
    with pytest.raises(ConfigError, match=why):
        Autocast.of(settings)


def test_a_cast_beside_weights_of_its_type_is_made():
    for section, dtype, spelled in (
        ("bf16", torch.bfloat16, "torch.bfloat16"),  # as DeepSpeed's bf16_full.json has it
        ("fp16", torch.float16, None),
    ):
        cast = {"enabled": True, **({"dtype": spelled} if spelled else {})}
        config = {"train_batch_size": 8, "torch_autocast": cast, section: {"enabled": True}}
        assert Autocast.of(read_settings(config, 1)) == Autocast(dtype)


def test_clipping_is_deepspeeds_by_default():
    def clip(**config: Any) -> float:
        return read_settings({"train_batch_size": 1, **config}, 1).clip_grad

    named = {"type": "Adam", "params": {"max_grad_norm": 2.0}}
    found = [clip(), clip(gradient_clipping=0), clip(gradient_clipping=0.5), clip(optimizer=named)]
    assert found == [1.0, 0.0, 0.5, 2.0]


def test_narrow_gradients_on_the_wire_are_sent_with_a_warning():
    settings = read_settings({"train_batch_size": 1, "communication_data_type": "fp16"}, 1)
    assert settings.zero.grad_reduce_dtype == "fp16"
    assert "without a loss scale" in settings.notes[0]
    scaled = {"train_batch_size": 1, "communication_data_type": "fp16", "fp16": {"enabled": True}}
    assert read_settings(scaled, 1).notes == ()


def test_every_fault_is_in_one_error():
    with pytest.raises(ConfigError) as caught:
        DeepSpeedConfig({"train_batch_size": 8, "fp16": {"no": 1}, "gradient_clipping": "much"})
    assert len(caught.value.violations) == 2


def test_a_cast_around_an_engine_counts_on_a_cpu_alone(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    with torch.autocast("cpu", torch.bfloat16), Autocast().around(cpu):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: True)
    monkeypatch.setattr(torch, "autocast", lambda kind, dtype, enabled: (kind, dtype, enabled))
    assert Autocast().around(cuda) == ("cuda", None, False)
    assert Autocast(torch.bfloat16).around(cpu) == ("cpu", torch.bfloat16, True)
