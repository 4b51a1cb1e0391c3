"""The configuration: page "DeepSpeed Configuration JSON", read by `DeepSpeedConfig`."""

from __future__ import annotations

import base64
import copy
import json

import torch

from tests.deepspeed.checks import check, outcome

BATCH = {"train_batch_size": 8}
REMOVED = "DeepSpeed refuses the section because it has removed the feature"
TYPED = "a value of another type breaks DeepSpeed's training later; here it is refused at once"
NOT_HERE = "it is not offered here, and its sentence says what to do instead"


def read(deepspeed, config):
    return deepspeed.DeepSpeedConfig(copy.deepcopy(config))


def takes(why="", here=None, **config):
    """A check whether the configuration is accepted."""

    def run(deepspeed, scratch):
        return outcome(lambda: read(deepspeed, {**BATCH, **config}))

    return check(why=why, here=here)(run)


def zero(why="", here=None, **section):
    return takes(why, here, zero_optimization={"stage": 3, **section})


def text(words, why="", here=None):
    """A check whether a file with this text is accepted."""

    def run(deepspeed, scratch):
        path = scratch / "ds.json"
        path.write_text(words)
        return outcome(lambda: read(deepspeed, str(path)))

    return check(why=why, here=here)(run)


def batch(**sizes):
    """A check of the three batch sizes that follow."""

    def run(deepspeed, scratch):
        found = []

        def attempt():
            made = read(deepspeed, sizes)
            found.append(int(made.train_batch_size))
            found.append(int(made.train_micro_batch_size_per_gpu))
            found.append(int(made.gradient_accumulation_steps))

        return [outcome(attempt), *found]

    return check()(run)


all_three_sizes = batch(train_batch_size=8, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=4)
sizes_that_disagree = batch(
    train_batch_size=8, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=3
)
the_total_alone = batch(train_batch_size=8)
the_micro_batch_alone = batch(train_micro_batch_size_per_gpu=3)
the_total_and_the_micro_batch = batch(train_batch_size=8, train_micro_batch_size_per_gpu=2)
the_total_and_the_steps = batch(train_batch_size=8, gradient_accumulation_steps=2)
the_micro_batch_and_the_steps = batch(train_micro_batch_size_per_gpu=3, gradient_accumulation_steps=2)
the_steps_alone = batch(gradient_accumulation_steps=2)
no_size = batch()
a_size_of_zero = batch(train_batch_size=0)
a_negative_size = batch(train_batch_size=-4)
a_total_that_is_no_multiple = batch(train_batch_size=7, train_micro_batch_size_per_gpu=2)

an_unknown_key = takes(made_up=3)
a_comment = takes(_comment="what this is for")
the_devices = takes(cuda_visible_devices="0,1")
an_unknown_key_of_zero = zero(made_up=3)
an_unknown_key_of_fp16 = takes(fp16={"enabled": True, "made_up": 1})
an_unknown_key_of_offload = zero(offload_optimizer={"device": "cpu", "made_up": 1})
an_unknown_key_of_a_monitor = takes(tensorboard={"enabled": False, "made_up": 1})
an_unknown_key_of_activation_checkpointing = takes(activation_checkpointing={"made_up": 1})
an_unknown_key_of_aio = takes(aio={"made_up": 1})
an_unknown_key_of_the_profiler = takes(flops_profiler={"made_up": 1})

zero_as_true = takes(zero_optimization=True)
zero_as_false = takes(zero_optimization=False)
a_stage_of_four = takes(zero_optimization={"stage": 4})
a_stage_in_quotes = takes(zero_optimization={"stage": "2"})
a_stage_as_a_word = takes(zero_optimization={"stage": "two"})
every_auto_of_a_generated_file = zero(
    overlap_comm="auto",
    contiguous_gradients="auto",
    reduce_bucket_size="auto",
    sub_group_size="auto",
    stage3_prefetch_bucket_size="auto",
    stage3_param_persistence_threshold="auto",
    stage3_gather_16bit_weights_on_model_save="auto",
    offload_optimizer="auto",
    offload_param={"device": "auto", "nvme_path": "auto"},
)
auto_in_fp16 = takes(
    fp16={"enabled": "auto", "loss_scale": "auto", "initial_scale_power": "auto", "hysteresis": "auto"}
)
unprefixed_names_of_stage_3 = zero(
    prefetch_bucket_size=10,
    param_persistence_threshold=10,
    model_persistence_threshold=10,
    max_live_parameters=10,
    max_reuse_distance=10,
    gather_16bit_weights_on_model_save=True,
    module_granularity_threshold=1,
    use_all_reduce_for_fetch_params=True,
    allgather_sequential=True,
)
a_negative_bucket = zero(allgather_bucket_size=-1)
a_bucket_as_a_float = zero(reduce_bucket_size=5e8)
a_bucket_in_quotes = zero(reduce_bucket_size="500")
a_bucket_of_half_an_element = zero(reduce_bucket_size=1.5)
one_as_true = zero(overlap_comm=1)
a_word_as_true = zero(contiguous_gradients="yes")
two_as_true = zero(overlap_comm=2)
another_word_as_true = zero(overlap_comm="perhaps")
offload_to_nothing = zero(offload_optimizer={"device": "none", "nvme_path": None})
offload_elsewhere = zero(offload_optimizer={"device": "tape"})
old_offload = takes(zero_optimization={"stage": 2, "cpu_offload": True})
old_gather = zero(stage3_gather_fp16_weights_on_model_save=True)
leaf_modules = zero(leaf_module={"classes": ["a.B"]})
no_norm = takes(zero_optimization={"stage": 2, "compute_grad_norm": False})
mics = zero(REMOVED, "accepted", mics_shard_size=-1)
zenflow = zero(NOT_HERE, "refused", zenflow={"topk_ratio": 0.1})
loco = zero(zeropp_loco_param={"err_beta": 0.8})

an_older_name_of_bf16 = takes(bfloat16={"enabled": True})
both_types = takes(fp16={"enabled": True}, bf16={"enabled": True})
a_scale_that_is_static = takes(fp16={"enabled": True, "loss_scale": 128})
narrow_masters_without_zero = takes(
    "masters of the weights' type need no sharding here",
    "accepted",
    bf16={"enabled": True, "bf16_master_weights_and_grads": True},
)
fp16_on_the_wire = takes(communication_data_type="fp16")
fp16_on_the_wire_beside_bf16 = takes(communication_data_type="fp16", bf16={"enabled": True})
another_type_on_the_wire = takes(communication_data_type="int8")
a_type_of_sums = takes(data_types={"grad_accum_dtype": "fp32"})
modules_in_fp32 = takes(data_types={"keep_in_fp32_modules": ["norm"]})
sequence_parallel_type = takes(seq_parallel_communication_data_type="bf16")
sums_of_gradients = takes(NOT_HERE, "refused", gradient_allreduce_op="sum")
a_mean_of_gradients = takes(gradient_allreduce_op="MEAN")
another_reduction = takes(gradient_allreduce_op="max")

compression = takes(REMOVED, "accepted", compression_training={})
quantized_training = takes(REMOVED, "accepted", quantize_training={"enabled": False})
elasticity = takes(REMOVED, "accepted", elasticity={"enabled": False})
elasticity_that_is_on = takes(elasticity={"enabled": True})
layer_drop = takes(REMOVED, "accepted", progressive_layer_drop={"enabled": False})
sparse_attention = takes(REMOVED, "accepted", sparse_attention={"mode": "fixed"})
amp_that_is_off = takes(REMOVED, "accepted", amp={"enabled": False})
nebula = takes(REMOVED, "accepted", nebula={"enabled": False})
sparse_gradients = takes(REMOVED, "accepted", sparse_gradients=False)
eigenvalue = takes(REMOVED, "accepted", eigenvalue={"enabled": False})
old_curriculum = takes(REMOVED, "accepted", curriculum_learning={"enabled": False})
harvesting = takes(REMOVED, "accepted", graph_harvesting=False)

hybrid_engine = takes(hybrid_engine={"enabled": True, "max_out_tokens": 512})
tensor_parallel = takes(tensor_parallel={"autotp_size": 1})
compiling_nothing = takes(compile={"deepcompile": False})
monitors = takes(
    tensorboard={"enabled": False, "output_path": "x", "job_name": "y"},
    csv_monitor={"enabled": False},
    wandb={"enabled": False, "group": "g", "team": "t", "project": "p"},
    comet={"enabled": False, "samples_log_interval": 10},
)
logged_communication = takes(
    comms_logger={"enabled": True, "verbose": False, "prof_all": True, "prof_ops": [], "debug": False}
)
a_profiler = takes(
    flops_profiler={
        "enabled": False,
        "profile_step": 1,
        "module_depth": -1,
        "top_modules": 1,
        "detailed": True,
    }
)
autotuning_that_is_off = takes(autotuning={"enabled": False})
never_printing = takes(steps_per_print=float("inf"))
a_hybrid_engine_that_is_off = takes(hybrid_engine={"enabled": False, "inference_tp_size": 2})
printing_nothing = takes(steps_per_print=None)
timers = takes(timers={"throughput": {"enabled": True, "synchronized": True}})
tags = takes(checkpoint={"tag_validation": "fail"})
tags_of_another_kind = takes(checkpoint={"tag_validation": "often"})
local_storage = takes(checkpoint={"use_node_local_storage": True})
parallel_writing = takes(checkpoint={"parallel_write": {"pipeline_stage": True}})
a_pipeline = takes(pipeline={"stages": "auto", "partition": "best", "activation_checkpoint_interval": 0})
checkpointing = takes(
    activation_checkpointing={
        "partition_activations": True,
        "cpu_checkpointing": False,
        "contiguous_memory_optimization": False,
        "number_checkpoints": None,
        "synchronize_checkpoint_boundary": False,
        "profile": False,
    }
)
aio = takes(aio={"block_size": 1048576, "queue_depth": 8, "single_submit": False, "overlap_events": True})
a_clip_as_a_word = takes(TYPED, "refused", gradient_clipping="much")
an_optimizer_that_is_a_list = takes(optimizer=[1])

plain_json = text('{"train_batch_size": 8}')
with_comments = text('{\n # one\n // two\n "train_batch_size": 8 /* three */\n}')
with_loose_commas = text('{"train_batch_size": 8,\n "zero_optimization": {"stage": 1,},\n}')
with_a_byte_order_mark = text('\ufeff{"train_batch_size": 8}')
without_commas = text('{"train_batch_size": 8\n "steps_per_print": 1\n}')
with_bare_keys = text("{train_batch_size: 8, zero_optimization: {stage: 1}}")
with_single_quotes = text("{'train_batch_size': 8}")
with_a_key_twice = text('{"train_batch_size": 8, "train_batch_size": 8}')
without_braces = text(
    "# one\ntrain_batch_size: 8\n'gradient_clipping': 0.5,\nzero_optimization: {stage: 1}\n"
)
with_nothing = text("")
with_a_list = text("[1, 2]")
QUOTELESS = "DeepSpeed takes a word without quotes as text, which is true; here it is refused with its place"
with_pythons_true = text('{"train_batch_size": 8, "wall_clock_breakdown": False\n}', QUOTELESS, "refused")
with_a_bare_word = text("{train_batch_size: 8\n optimizer: {type: Adam\n}}", QUOTELESS, "refused")
with_lines_in_three_quotes = text(
    "{train_batch_size: 8\n note: '''\n  a\n  '''\n}", "texts of several lines need quotes here", "refused"
)
with_a_bare_fraction = text('{"train_batch_size": 8, "gradient_clipping": .5\n}', QUOTELESS, "refused")


@check()
def base64_text(deepspeed, scratch):
    def encoded(document):
        return base64.urlsafe_b64encode(json.dumps(document).encode()).decode()

    whole = encoded({"train_batch_size": 8, "zero_optimization": {"stage": 2}})
    made = read(deepspeed, whole)
    return [
        made.train_batch_size,
        int(made.zero_optimization_stage),
        outcome(lambda: read(deepspeed, "gone")),
    ]


@check()
def attributes(deepspeed, scratch):
    made = read(
        deepspeed,
        {
            **BATCH,
            "gradient_accumulation_steps": 2,
            "steps_per_print": 7,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
            "zero_optimization": {
                "stage": 3,
                "stage3_prefetch_bucket_size": 9,
                "offload_optimizer": {"device": "cpu"},
            },
            "bf16": {"enabled": True},
        },
    )
    part = made.zero_config
    return {
        "sizes": [
            made.train_batch_size,
            made.train_micro_batch_size_per_gpu,
            made.gradient_accumulation_steps,
        ],
        "plain": [made.steps_per_print, made.gradient_clipping, made.world_size, made.zero_enabled],
        "named": [made.optimizer_name, made.optimizer_params, made.scheduler_name, made.scheduler_params],
        "zero": [int(part.stage), part.prefetch_bucket_size, part.overlap_comm, part.reduce_bucket_size],
        "offload": [part.offload_param, part.offload_optimizer.pin_memory],
        "types": [made.bfloat16_config.enabled, made.float16_config.enabled],
        "given": sorted(made._param_dict),
    }


@check()
def attributes_of_an_empty_file(deepspeed, scratch):
    made = read(deepspeed, BATCH)
    names = [
        "prescale_gradients",
        "gradient_predivide_factor",
        "wall_clock_breakdown",
        "dataloader_drop_last",
    ]
    names += ["gradient_clipping", "optimizer_name", "scheduler_name", "zero_enabled", "dump_state"]
    names += ["zero_allow_untested_optimizer", "communication_data_type", "steps_per_print"]
    zero_names = ["overlap_comm", "contiguous_gradients", "sub_group_size", "max_live_parameters"]
    zero_names += ["offload_param", "gather_16bit_weights_on_model_save", "zero_hpz_partition_size"]
    fp16 = ["enabled", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis"]
    return [
        {name: getattr(made, name) for name in names},
        {name: getattr(made.zero_config, name) for name in zero_names},
        {name: getattr(made.float16_config, name) for name in fp16},
    ]


@check()
def the_world_of_an_mpu(deepspeed, scratch):
    class Four:
        def get_data_parallel_world_size(self):
            return 4

    made = deepspeed.DeepSpeedConfig({"train_batch_size": 8}, mpu=Four())
    return [made.world_size, made.train_micro_batch_size_per_gpu]


@check()
def the_json_is_left_as_it_is(deepspeed, scratch):
    given = {**BATCH, "zero_optimization": True, "optimizer": {"type": "Adam", "params": {"lr": 1}}}
    before = copy.deepcopy(given)
    deepspeed.DeepSpeedConfig(given)
    return given == before


@check()
def the_content_alone(deepspeed, scratch):
    path = scratch / "ds.json"
    path.write_text('{"train_batch_size": 8, "made_up": [1]}')
    return [deepspeed.load_ds_config(str(path)), deepspeed.load_ds_config({"a": 1})]


@check()
def the_error_has_a_name(deepspeed, scratch):
    try:
        read(deepspeed, {**BATCH, "checkpoint": {"tag_validation": "often"}})
    except deepspeed.DeepSpeedConfigError:
        return True
    return False


def moved(deepspeed, **config):
    """How far an SGD step of rate 1 moves from a gradient of norm 12, the weights' type and the setting."""
    model = torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.0)
    given = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}, **config}
    engine, *_ = deepspeed.initialize(model=model, config=given, model_parameters=model.parameters())
    x = torch.tensor([[3.0, 4.0]], dtype=model.weight.dtype)
    engine.backward((engine(x) * 2.4).sum())
    engine.step()
    return [model.weight.detach().float().norm().item(), str(model.weight.dtype)]


@check(tolerance=1e-5)
def clipping_by_a_switch_or_below_zero(deepspeed, scratch):
    return [moved(deepspeed, gradient_clipping=clip) for clip in (True, False, -1, 0, 0.5)]


@check(tolerance=2e-2)
def both_names_of_bf16(deepspeed, scratch):
    sections = [(True, False), (False, True), (True, True)]
    return [
        moved(deepspeed, bf16={"enabled": first}, bfloat16={"enabled": second}) for first, second in sections
    ]


@check()
def printing_at_steps_that_are_none(deepspeed, scratch):
    return [outcome(lambda every=every: moved(deepspeed, steps_per_print=every)) for every in (0, "auto")]
