"""`initialize` and its arguments, backwards of all kinds, and what an engine can be asked."""

from __future__ import annotations

import argparse
import base64
import json

import torch

from tests.deepspeed.checks import check, outcome

X = torch.arange(12.0).reshape(4, 3) / 12


def configured(accumulation=1, stage=1, **more):
    """A JSON."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        **more,
    }


def small():
    """A layer."""
    torch.manual_seed(5)
    return torch.nn.Linear(3, 2)


def engine_of(deepspeed, accumulation=1, stage=1, model=None, **more):
    """A small engine."""
    model = model or small()
    if hasattr(deepspeed, "get_accelerator"):  # DeepSpeed refuses fp16 on processors that could do it
        deepspeed.get_accelerator().is_fp16_supported = lambda: True
    config = configured(accumulation, stage, **more)
    return deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0]


def weights(engine):
    """The module's weights."""
    return [value for p in engine.module.parameters() for value in p.detach().flatten().tolist()]


def trained(engine, backward, steps=2):
    """The weights after some steps."""
    for number in range(steps):
        backward(engine(X + number).square().mean())
        engine.step()
    return weights(engine)


@check()
def all_arguments_by_position(deepspeed, scratch):
    model = small()
    config = configured()
    engine, optimizer, loader, schedule = deepspeed.initialize(
        None, model, None, model.parameters(), None, None, 29500, None, None, None, config, None, None
    )
    return [optimizer is engine.optimizer, loader, schedule, trained(engine, engine.backward)]


@check()
def a_file(deepspeed, scratch):
    path = scratch / "ds.json"
    path.write_text(json.dumps(configured()))
    model = small()
    more = {"model_parameters": model.parameters()}
    return deepspeed.initialize(model=model, config=str(path), **more)[0].train_batch_size()


@check()
def a_file_in_args(deepspeed, scratch):
    path = scratch / "ds.json"
    path.write_text(json.dumps(configured()))
    model, args = small(), argparse.Namespace(deepspeed_config=str(path), local_rank=0)
    more = {"model_parameters": model.parameters()}
    return deepspeed.initialize(args, model, **more)[0].train_batch_size()


@check()
def the_old_name_in_args(deepspeed, scratch):
    path = scratch / "ds.json"
    path.write_text(json.dumps(configured()))
    model, args = small(), argparse.Namespace(deepscale_config=str(path), local_rank=0)
    return outcome(lambda: deepspeed.initialize(args, model, model_parameters=model.parameters()))


@check()
def base64_of_a_json(deepspeed, scratch):
    model, text = small(), base64.urlsafe_b64encode(json.dumps(configured()).encode()).decode()
    return deepspeed.initialize(model=model, config=text, model_parameters=model.parameters())[0].config[
        "train_micro_batch_size_per_gpu"
    ]


@check()
def a_configuration_given_twice(deepspeed, scratch):
    path = scratch / "ds.json"
    path.write_text(json.dumps(configured()))
    model, args = small(), argparse.Namespace(deepspeed_config=str(path))
    more = {"model_parameters": model.parameters(), "config": configured()}
    return outcome(lambda: deepspeed.initialize(args, model, **more))


@check()
def no_configuration(deepspeed, scratch):
    return outcome(lambda: deepspeed.initialize(model=small()))


@check()
def no_model(deepspeed, scratch):
    return outcome(lambda: deepspeed.initialize(config=configured()))


@check()
def config_params_is_the_old_name(deepspeed, scratch):
    model = small()
    more = {"model_parameters": model.parameters(), "config_params": configured()}
    return deepspeed.initialize(model=model, **more)[0].train_batch_size()


@check()
def another_local_rank_in_args(deepspeed, scratch):
    model, args = small(), argparse.Namespace(local_rank=3)
    more = {"model_parameters": model.parameters(), "config": configured()}
    return outcome(lambda: deepspeed.initialize(args, model, **more))


@check()
def a_filter_object_of_parameters(deepspeed, scratch):
    model = small()
    params = filter(lambda p: p.requires_grad, model.parameters())
    engine = deepspeed.initialize(model=model, config=configured(), model_parameters=params)[0]
    return trained(engine, engine.backward)


@check()
def no_model_parameters_means_all(deepspeed, scratch):
    engine = deepspeed.initialize(model=small(), config=configured())[0]
    return trained(engine, engine.backward)


@check(tolerance=5e-6)
def groups_with_an_empty_one(deepspeed, scratch):
    model = small()
    groups = [
        {"params": [model.weight], "lr": 0.1},
        {"params": []},
        {"params": [model.bias], "weight_decay": 0.5},
    ]
    engine = deepspeed.initialize(model=model, config=configured(), model_parameters=groups)[0]
    return [trained(engine, engine.backward), engine.get_lr()]


@check()
def a_parameter_in_two_groups(deepspeed, scratch):
    model = small()
    groups = [{"params": [model.weight, model.bias]}, {"params": [model.weight]}]
    more = {"config": configured(), "model_parameters": groups}
    return outcome(lambda: deepspeed.initialize(model=model, **more))


@check()
def a_function_makes_the_optimizer(deepspeed, scratch):
    model, config = small(), configured()
    del config["optimizer"]

    def make(params):
        return torch.optim.AdamW(params, lr=0.01)

    more = {"config": config, "optimizer": make, "model_parameters": model.parameters()}
    engine = deepspeed.initialize(model=model, **more)[0]
    return trained(engine, engine.backward)


@check()
def training_data_becomes_a_loader(deepspeed, scratch):
    model = small()
    more = {"config": configured(), "model_parameters": model.parameters()}
    _, _, loader, _ = deepspeed.initialize(model=model, training_data=torch.arange(8).tolist(), **more)
    return [len(loader), [batch.tolist() for batch in loader]]


def own(engine):
    """The script runs backward itself."""
    return trained(engine, lambda loss: loss.backward())


@check()
def loss_backward_at_stage_one(deepspeed, scratch):
    return own(engine_of(deepspeed, stage=1))


@check()
def loss_backward_at_stage_two(deepspeed, scratch):
    return own(engine_of(deepspeed, stage=2))


@check()
def loss_backward_at_stage_three(deepspeed, scratch):
    return own(engine_of(deepspeed, stage=3))


@check(
    tolerance=5e-6,
    here=[0.384512, -0.42834, 0.474097, 0.350965, 0.466537, -0.461304, -0.380083, 0.255023],
    why="DeepSpeed refuses it at stage 0 and takes it at the others; nothing speaks against it",
)
def loss_backward_at_stage_zero(deepspeed, scratch):
    return own(engine_of(deepspeed, stage=0))


@check()
def loss_backward_is_divided_by_the_accumulation(deepspeed, scratch):
    engine = engine_of(deepspeed, 2, stage=2)
    return trained(engine, lambda loss: loss.backward(), 4)


@check()
def engine_backward_is_divided_by_the_accumulation(deepspeed, scratch):
    engine = engine_of(deepspeed, 2, stage=2)
    return trained(engine, engine.backward, 4)


@check()
def a_backward_that_the_caller_has_divided(deepspeed, scratch):
    engine = engine_of(deepspeed, 2, stage=2)
    return trained(engine, lambda loss: engine.backward(loss / 2, scale_wrt_gas=False), 4)


@check()
def backward_returns_the_divided_loss(deepspeed, scratch):
    engine = engine_of(deepspeed, 2)
    loss = engine(X).square().mean()
    return [float(engine.backward(loss) / loss), float(loss)]


@check(tolerance=5e-4)
def scale_and_loss_backward_in_fp16(deepspeed, scratch):
    fp16 = {"enabled": True, "initial_scale_power": 8}
    engine = engine_of(deepspeed, stage=2, fp16=fp16)
    for _ in range(2):
        engine.scale(engine(X.half()).float().square().mean()).backward()
        engine.step()
    return weights(engine)


@check()
def loss_backward_without_scale_in_fp16(deepspeed, scratch):
    engine = engine_of(deepspeed, stage=2, fp16={"enabled": True, "initial_scale_power": 8})
    return outcome(lambda: engine(X.half()).float().square().mean().backward())


@check()
def two_losses_of_one_forward(deepspeed, scratch):
    engine = engine_of(deepspeed, stage=1)
    y = engine(X)
    engine.backward(y.square().mean(), retain_graph=True)
    engine.backward(y.abs().mean())
    engine.step()
    return weights(engine)


@check(
    tolerance=5e-6,
    here=[0.371342, -0.44173, 0.460505, 0.35942, 0.475094, -0.45266, -0.377527, 0.264726],
    why="gradients of several backwards add up, as in torch; DeepSpeed's stage 2 keeps the last alone",
)
def two_forwards_before_a_step(deepspeed, scratch):
    engine = engine_of(deepspeed, stage=2)
    for number in range(2):
        engine.backward(engine(X * (number + 1)).square().mean())
    engine.step()
    return weights(engine)


class Twice(torch.nn.Module):
    """Uses one layer twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.inner, self.head = torch.nn.Linear(3, 3), torch.nn.Linear(3, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


@check(ranks=2)
def a_layer_used_twice_on_two_ranks(deepspeed, scratch):
    found = []
    for stage in (1, 2):
        engine = engine_of(deepspeed, stage=stage, model=Twice())
        found.append(trained(engine, engine.backward))
    return found


@check(ranks=2)
def loss_backward_on_two_ranks(deepspeed, scratch):
    found = []
    for stage in (1, 2, 3):
        engine = engine_of(deepspeed, 2, stage=stage, model=Twice())
        found.append(trained(engine, lambda loss: loss.backward(), 4))
    return found


@check(tolerance=5e-6)
def two_engines_on_one_loss(deepspeed, scratch):
    engines = [engine_of(deepspeed, stage=1) for _ in range(2)]
    for _ in range(2):
        loss = (engines[0](X) - 2 * engines[1](X + 1)).square().mean()
        loss.backward()
        for engine in engines:
            engine.step()
    return [weights(engine) for engine in engines]


@check()
def no_sync_at_stage_one(deepspeed, scratch):
    engine = engine_of(deepspeed, stage=1)
    with engine.no_sync():
        engine.backward(engine(X).square().mean())
    engine.backward(engine(X + 1).square().mean())
    engine.step()
    return weights(engine)


@check(
    here="accepted",
    why="gradients that are not reduced can be kept at every stage; accelerate's `accumulate` walked into it",
)
def no_sync_at_stage_two(deepspeed, scratch):
    engine = engine_of(deepspeed, stage=2)

    def work():
        with engine.no_sync():
            engine.backward(engine(X).square().mean())
        engine.step()

    return outcome(work)


@check()
def step_within_no_sync(deepspeed, scratch):
    engine = engine_of(deepspeed, stage=1)

    def work():
        with engine.no_sync():
            engine.backward(engine(X).square().mean())
            engine.step()

    return outcome(work)


@check()
def reductions_together(deepspeed, scratch):
    engine = engine_of(deepspeed, stage=2)
    with engine.coalesce_grad_reduction():
        engine.backward(engine(X).square().mean())
        engine.backward(engine(X + 1).square().mean())
    engine.step()
    return weights(engine)


@check()
def losses_that_are_none(deepspeed, scratch):
    engine = engine_of(deepspeed)
    return [outcome(lambda each=each: engine.backward(each)) for each in (torch.ones(()), 1.5, engine(X))]


@check()
def gradients_at_stage_zero(deepspeed, scratch):
    engine = engine_of(deepspeed, stage=0)
    engine.backward(engine(X).square().mean())
    grads = [p.grad.flatten().tolist() for p in engine.module.parameters()]
    engine.step()
    return grads


@check()
def gradients_over_an_accumulation_at_stage_zero(deepspeed, scratch):
    engine = engine_of(deepspeed, 2, stage=0)
    found = []
    for number in range(2):
        engine.backward(engine(X + number).square().mean())
        found.append(engine.module.weight.grad.flatten().tolist())
        engine.step()
    return found


@check()
def gradients_clipped_by_hand_at_stage_zero(deepspeed, scratch):
    engine = engine_of(deepspeed, stage=0, optimizer={"type": "SGD", "params": {"lr": 0.5}})
    engine.backward(engine(X).square().mean())
    torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 0.1)
    engine.step()
    return weights(engine)


@check()
def gradients_are_taken_at_stage_two(deepspeed, scratch):
    engine = engine_of(deepspeed, stage=2)
    engine.backward(engine(X).square().mean())
    engine.step()
    return [p.grad is None for p in engine.module.parameters()]


@check(
    here=[None, 0.5829624177521864],
    why="documented as the norm of the last step; DeepSpeed has none at stage 0 in fp32 (DS#7255)",
)
def the_norm_at_stage_zero(deepspeed, scratch):
    engine = engine_of(deepspeed, stage=0)
    before = engine.get_global_grad_norm()
    engine.backward(engine(X).square().mean())
    engine.step()
    return [before, engine.get_global_grad_norm()]


@check()
def the_norm_at_stages_one_to_three(deepspeed, scratch):
    found = []
    for stage in (1, 2, 3):
        engine = engine_of(deepspeed, stage=stage)
        found.append(engine.get_global_grad_norm())
        engine.backward(engine(X).square().mean())
        engine.step()
        found.append(float(engine.get_global_grad_norm()))
    return found


@check()
def evaluation_without_an_optimizer(deepspeed, scratch):
    config = configured(stage=0)
    del config["optimizer"]
    engine, optimizer, *_ = deepspeed.initialize(model=small(), config=config, model_parameters=[])
    with torch.no_grad():
        found = engine(X).flatten().tolist()
    refused = [outcome(lambda: engine.backward(engine(X).sum())), outcome(engine.step)]
    return [found, optimizer, refused]


@check()
def evaluation_at_stage_three_without_an_optimizer(deepspeed, scratch):
    config = configured(stage=3)
    del config["optimizer"]
    engine = deepspeed.initialize(model=small(), config=config)[0]
    with torch.no_grad():
        found = engine(X).flatten().tolist()
    return [found, outcome(lambda: engine.backward(engine(X).sum()))]


@check(
    here=["accepted", "accepted"],
    why="an engine that only evaluates needs no optimizer at any stage",
)
def stages_one_and_two_without_an_optimizer(deepspeed, scratch):
    def make(stage):
        config = configured(stage=stage)
        del config["optimizer"]
        return outcome(lambda: deepspeed.initialize(model=small(), config=config))

    return [make(1), make(2)]


@check(here=["refused", "refused"], why="a step without a backward is a mistake, which DeepSpeed lets pass")
def a_step_without_a_backward(deepspeed, scratch):
    return [outcome(engine_of(deepspeed, stage=stage).step) for stage in (0, 1)]


@check()
def a_name_that_nobody_has(deepspeed, scratch):
    engine = engine_of(deepspeed)
    try:
        return engine.surprise
    except AttributeError as error:
        return str(error)


@check()
def a_name_of_the_module(deepspeed, scratch):
    return [engine_of(deepspeed).in_features, hasattr(engine_of(deepspeed), "surprise")]


@check()
def the_dictionary_of_the_configuration(deepspeed, scratch):
    engine = engine_of(deepspeed, stage=2)
    return [engine.config.get("zero_optimization", {}).get("stage"), type(engine.config).__name__]


GETTERS = """
train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping
zero_optimization zero_optimization_stage zero_optimization_partition_gradients
zero_optimization_partition_weights fp16_enabled bfloat16_enabled fp16_auto_cast dynamic_loss_scale
loss_scale initial_dynamic_scale steps_per_print wall_clock_breakdown memory_breakdown dump_state
optimizer_name optimizer_params scheduler_name scheduler_params random_ltd_enabled
data_efficiency_enabled curriculum_learning_enabled data_sampling_enabled dataloader_drop_last
flops_profiler_enabled flops_profiler_profile_step flops_profiler_module_depth
flops_profiler_top_modules flops_profiler_detailed flops_profiler_output_file
flops_profiler_recompute_fwd_factor autotuning_enabled autotuning_start_profile_step
autotuning_end_profile_step autotuning_metric checkpoint_tag_validation_enabled
checkpoint_tag_validation_fail checkpoint_writer_enabled checkpoint_serialization_enabled
load_universal_checkpoint use_node_local_storage gradient_predivide_factor postscale_gradients
managed_gradient_accumulation is_sanity_checks_enabled optimizer_legacy_fusion
zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_reduce_scatter zero_overlap_comm
zero_offload_optimizer zero_offload_param zero_cpu_offload zero_use_cpu_optimizer
zero_nvme_offload_optimizer zero_partial_offload zero_sub_group_size zero_reduce_bucket_size
zero_multi_rank_bucket_allreduce zero_allgather_bucket_size zero_allgather_partitions
zero_contiguous_gradients zero_load_from_fp32_weights zero_elastic_checkpoint zero_max_live_parameters
zero_max_reuse_distance zero_prefetch_bucket_size zero_param_persistence_threshold
zero_model_persistence_threshold zero_module_granularity_threshold
zero_gather_16bit_weights_on_model_save zero_ignore_unused_parameters zero_legacy_stage1
zero_round_robin_gradients zero_hpz_partition_size zero_quantized_weights
zero_quantized_nontrainable_weights zero_quantized_gradients zero_log_trace_cache_warnings
zero_save_muon_momentum_buffer_in_memory torch_autocast_enabled autotp_size
"""


def asked(engine):
    """Getter -> answer."""
    return {name: getattr(engine, name)() for name in GETTERS.split()}


@check()
def getters_of_a_bare_configuration(deepspeed, scratch):
    return asked(engine_of(deepspeed, stage=0))


@check()
def getters_of_stage_three(deepspeed, scratch):
    zero = {
        "stage": 3,
        "overlap_comm": False,
        "reduce_bucket_size": 1000,
        "stage3_prefetch_bucket_size": 2000,
        "stage3_param_persistence_threshold": 10,
        "stage3_max_live_parameters": 5000,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    more = {"zero_optimization": zero, "steps_per_print": 3, "wall_clock_breakdown": True}
    return asked(engine_of(deepspeed, **more))


@check()
def places(deepspeed, scratch):
    engine = engine_of(deepspeed)
    names = "world_size global_rank local_rank dp_world_size mp_world_size seq_dp_world_size dist_backend mpu"
    found = {name: getattr(engine, name) for name in names.split()}
    return {**found, "device": str(engine.device)}


@check()
def attributes_before_training(deepspeed, scratch):
    engine = engine_of(deepspeed)
    names = (
        "client_optimizer client_lr_scheduler lr_scheduler training_dataloader losses "
        "loaded_checkpoint_dp_world_size loaded_checkpoint_mp_world_size global_steps is_compiled"
    )
    return {name: getattr(engine, name) for name in names.split()}


@check()
def the_inner_optimizer(deepspeed, scratch):
    model, config = small(), configured()
    del config["optimizer"]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    engine = deepspeed.initialize(model=model, config=config, optimizer=optimizer)[0]
    return [
        engine.optimizer.optimizer is optimizer,
        engine.basic_optimizer is optimizer,
        engine.client_optimizer is optimizer,
    ]


@check()
def the_monitor_is_off(deepspeed, scratch):
    engine = engine_of(deepspeed)
    engine.monitor.write_events([("Train/x", 1.0, 1)])
    return bool(engine.monitor.enabled)


@check(
    here=["the engine", "the engine"],
    why="an engine is a torch module, whose `train` and `eval` return it; DeepSpeed returns None",
)
def train_and_eval(deepspeed, scratch):
    engine = engine_of(deepspeed)
    return ["the engine" if each() is engine else "nothing" for each in (engine.train, engine.eval)]


@check()
def eval_and_train_reach_the_module(deepspeed, scratch):
    engine = engine_of(deepspeed)
    engine.eval()
    found = [engine.module.training]
    engine.train()
    return [*found, engine.module.training]


@check()
def loaders_of_each_route(deepspeed, scratch):
    engine = engine_of(deepspeed)
    data = list(range(8))
    more = {"num_local_io_workers": 0}
    loaders = [engine.deepspeed_io(data, batch_size=4, route=route, **more) for route in ("train", "eval")]
    return [[batch.tolist() for batch in loader] for loader in loaders]


@check()
def destroy_leaves_the_world(deepspeed, scratch):
    engine = engine_of(deepspeed)
    before = torch.distributed.is_initialized()
    engine.destroy()
    return torch.distributed.is_initialized() == before


@check()
def a_folder_that_is_none(deepspeed, scratch):
    engine = engine_of(deepspeed)
    return [
        outcome(lambda: engine.save_checkpoint(None)),
        outcome(lambda: engine.save_checkpoint("")),
        outcome(lambda: engine.load_checkpoint(None)),
    ]


@check(ranks=2)
def tags_that_differ(deepspeed, scratch):
    engine = engine_of(deepspeed, checkpoint={"tag_validation": "FAIL"})
    return outcome(lambda: engine.save_checkpoint(str(scratch), tag=f"rank{engine.global_rank}"))


@check(ranks=2)
def the_group_of_data_parallel_ranks(deepspeed, scratch):
    engine = engine_of(deepspeed)
    value = torch.full((2,), float(engine.global_rank + 1))
    torch.distributed.all_reduce(value, group=engine.data_parallel_group)
    return [value.tolist(), engine.dp_world_size]


@check(ranks=2)
def ranks_start_with_the_first_ones_weights(deepspeed, scratch):
    torch.manual_seed(int(engine_of(deepspeed).global_rank))
    engine = deepspeed.initialize(model=torch.nn.Linear(3, 2), config=configured())[0]
    value = engine.module.weight.detach().sum()
    other = value.clone()
    torch.distributed.broadcast(other, 0)
    return float(value - other)


@check()
def the_class_of_the_engine(deepspeed, scratch):
    engine = engine_of(deepspeed)
    return [type(engine).__name__, isinstance(engine, deepspeed.DeepSpeedEngine)]
