"""What a script sees of the JSON through `DeepSpeedConfig` and an engine."""

from __future__ import annotations

import torch

from tests.deepspeed.checks import check

SECTIONS = {
    "activation_checkpointing_config": "partition_activations number_checkpoints profile",
    "compile_config": "deepcompile passes",
    "flops_profiler_config": "enabled profile_step module_depth top_modules detailed output_file",
    "hybrid_engine": "enabled max_out_tokens inference_tp_size pin_parameters release_inference_cache",
    "tensor_parallel_config": "autotp_size tp_overlap_comm preset_model",
    "timers_config": "enabled synchronized",
    "comms_config": "comms_logger_enabled",
    "monitor_config": "tensorboard.enabled tensorboard.job_name wandb.project csv_monitor.output_path",
    "zero_config": "parameter_alignment enable_sanity_checks log_trace_cache_warnings compute_grad_norm",
}
VALUES = (
    "aio_config checkpoint_config pipeline buffer_dtype data_efficiency_enabled disable_allgather "
    "param_dtype disable_python_gc grad_accum_dtype keep_in_fp32_modules load_universal_checkpoint log_level "
    "managed_gradient_accumulation optimizer_legacy_fusion seq_parallel_communication_data_type "
    "torch_autocast_dtype torch_autocast_enabled torch_autocast_lower_precision_safe_modules "
    "use_data_before_expert_parallel_ use_node_local_storage checkpoint_tag_validation_enabled "
    "checkpoint_tag_validation_fail wall_clock_breakdown global_rank"
)
FULL = {
    "train_batch_size": 4,
    "activation_checkpointing": {"partition_activations": True, "number_checkpoints": 3},
    "aio": {"queue_depth": 16},
    "checkpoint": {"tag_validation": "Fail", "load_universal": True, "use_node_local_storage": True},
    "comms_logger": {"enabled": True, "verbose": True},
    "csv_monitor": {"enabled": True, "output_path": "there", "job_name": "job"},
    "data_types": {"grad_accum_dtype": "fp32"},
    "flops_profiler": {"enabled": True, "module_depth": 2},
    "hybrid_engine": {"enabled": False, "max_out_tokens": 9},
    "pipeline": {"activation_checkpoint_interval": 1},
    "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
}


def plain(value):
    """Types as text."""
    return str(value) if isinstance(value, torch.dtype) else value


def shown(config):
    """All of it, by dotted name."""
    values = {name: plain(getattr(config, name)) for name in VALUES.split()}
    for name, keys in SECTIONS.items():
        for key in keys.split():
            node = getattr(config, name)
            for part in key.split("."):
                node = getattr(node, part)
            values[f"{name}.{key}"] = node
    return values


@check()
def a_config_with_nothing_in_it(deepspeed, scratch):
    return shown(deepspeed.DeepSpeedConfig({"train_batch_size": 4}))


@check()
def a_config_with_everything(deepspeed, scratch):
    return shown(deepspeed.DeepSpeedConfig(FULL))


@check()
def a_section_as_a_dictionary(deepspeed, scratch):
    config = deepspeed.DeepSpeedConfig(
        {"train_batch_size": 4, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    )
    zero = config.zero_config.model_dump()
    offload = zero["offload_param"]
    return [
        zero["stage"],
        zero["overlap_comm"],
        str(offload["device"]).endswith("cpu"),
        offload["pin_memory"],
    ]


def engine_of(deepspeed, stage, **more):
    """A small engine."""
    model = torch.nn.Linear(3, 2)
    config = {
        "train_batch_size": 4,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        **more,
    }
    return deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0]


GETTERS = (
    "cpuadam_cores_perc super_offload zero_compute_grad_norm is_deepcompile_enabled is_deepcompile_active "
    "is_first_weights_partition_group torch_autocast_dtype torch_autocast_lower_precision_safe_modules "
    "get_data_types torch_autocast_enabled zero_parameter_alignment"
)
ATTRIBUTES = (
    "checkpoint_mp_rank collate_fn communication_data_type gradient_average has_moe_layers num_experts "
    "pipeline_parallelism sequence_parallel_size training_data"
)


def asked(engine):
    """What getters and attributes say."""
    answers = {}
    for name in GETTERS.split():
        value = getattr(engine, name)()
        answers[name] = [plain(part) for part in value] if isinstance(value, tuple) else plain(value)
    for name in ATTRIBUTES.split():
        answers[name] = plain(getattr(engine, name))
    answers["param_names"] = sorted(engine.param_names.values())
    answers["kinds"] = [engine.is_map_style_dataset([1]), engine.is_iterable_style_dataset([1])]
    return answers


@check()
def getters_of_a_plain_engine(deepspeed, scratch):
    return asked(engine_of(deepspeed, 1))


@check()
def getters_in_16_bits(deepspeed, scratch):
    return asked(engine_of(deepspeed, 3, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"}))


@check()
def getters_under_autocast(deepspeed, scratch):
    named = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": ["torch.nn.Linear"]}
    return asked(engine_of(deepspeed, 0, torch_autocast=named, communication_data_type="fp32"))


@check()
def what_a_zero_optimizer_can_be_asked(deepspeed, scratch):
    answers = []
    for stage in (1, 2, 3):
        engine = engine_of(deepspeed, stage, gradient_clipping=0.5)
        optimizer = engine.optimizer
        for bad in (1.0, float("inf")):
            engine.backward(engine(torch.ones(4, 3) * bad).square().mean())
            optimizer.check_overflow()
            answers += [optimizer.overflow, optimizer.has_overflow()]
            engine.step()
        groups = optimizer.bit16_groups if stage < 3 else optimizer.fp16_groups
        answers += [optimizer.clip_grad, [len(group) for group in groups]]
        if stage < 3:
            answers.append(optimizer.partition_gradients)
        optimizer.quantize_nontrainable_params() if stage == 3 else None
    return answers


@check()
def states_go_and_come_by_the_optimizer(deepspeed, scratch):
    torch.manual_seed(5)
    engine = engine_of(deepspeed, 3)
    losses = []
    for _ in range(3):
        loss = engine(torch.ones(4, 3)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        engine.optimizer.offload_states()
        engine.optimizer.reload_states()
    weight = engine.module.weight
    engine.optimizer.set_full_hp_param(torch.ones(2, 3), weight)
    state = engine.optimizer.get_full_hp_param(weight, "exp_avg")
    return [losses, engine.optimizer.get_full_hp_param(weight).tolist(), state.tolist()]
