"""Saving and loading, whole weights, and ``zero_to_fp32`` (DeepSpeed's pages on checkpoints and on ZeRO)."""

from __future__ import annotations

import argparse
import importlib
import os

import torch

from tests.deepspeed.checks import check, outcome

RESUMED = 1e-5
"""DeepSpeed's own losses after a load differ by 2e-6 from those without it."""


class Net(torch.nn.Module):
    """A tied head, a frozen layer, a buffer and odd sizes."""

    def __init__(self, width=5):
        super().__init__()
        self.first = torch.nn.Linear(width, 3)
        self.frozen = torch.nn.Linear(3, 3).requires_grad_(False)
        self.head = torch.nn.Linear(width, 3, bias=False)
        self.head.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        self.seen += 1
        return (self.frozen(torch.tanh(self.first(x))) + self.head(x)).square().mean()


def start(deepspeed, stage=1, seed=0, width=5, **more):
    """An engine."""
    torch.manual_seed(seed)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "Adam", "params": {"lr": 0.05}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.05, "warmup_num_steps": 4}},
    }
    for key, value in more.items():
        config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
    model = Net(width)
    trained = [p for p in model.parameters() if p.requires_grad]
    return deepspeed.initialize(model=model, config=config, model_parameters=trained)[0]


def train(engine, steps=2, first=0):
    """The losses of some steps."""
    losses = []
    for number in range(first, first + steps):
        x = torch.arange(10.0).reshape(2, 5) / (3 + number)
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


def saved(deepspeed, scratch, stage=1, **more):
    """An engine that has trained and saved."""
    engine = start(deepspeed, stage, **more)
    train(engine)
    engine.save_checkpoint(str(scratch))
    return engine


def names(scratch):
    """What is in the folder, without scripts."""
    return sorted(name for name in os.listdir(scratch) if not name.endswith(".py"))


@check()
def the_default_tag_is_the_number_of_steps(deepspeed, scratch):
    saved(deepspeed, scratch)
    return [names(scratch), (scratch / "latest").read_text().strip()]


@check()
def save_checkpoint_returns_true(deepspeed, scratch):
    return start(deepspeed).save_checkpoint(str(scratch))


@check()
def a_tag_may_be_a_number(deepspeed, scratch):
    engine = start(deepspeed)
    engine.save_checkpoint(str(scratch), tag=7)
    return [names(scratch), engine.load_checkpoint(str(scratch), tag=7)[0] is not None]


@check()
def save_latest_false_leaves_the_pointer(deepspeed, scratch):
    engine = start(deepspeed)
    engine.save_checkpoint(str(scratch), tag="a")
    engine.save_checkpoint(str(scratch), tag="b", save_latest=False)
    return [names(scratch), (scratch / "latest").read_text().strip()]


@check()
def a_folder_is_made(deepspeed, scratch):
    start(deepspeed).save_checkpoint(str(scratch / "a" / "b"), tag="t")
    return names(scratch / "a" / "b")


@check()
def nothing_is_loaded_without_latest_and_without_a_tag(deepspeed, scratch):
    return list(start(deepspeed).load_checkpoint(str(scratch)))


@check()
def a_missing_folder_loads_nothing(deepspeed, scratch):
    return list(start(deepspeed).load_checkpoint(str(scratch / "none")))


@check()
def the_path_that_a_load_returns_is_in_the_folder(deepspeed, scratch):
    path, _ = saved(deepspeed, scratch).load_checkpoint(str(scratch))
    return [path.startswith(str(scratch / "global_step2")), os.path.exists(path)]


@check()
def client_state_comes_back(deepspeed, scratch):
    engine = start(deepspeed)
    state = {"epoch": 3, "best": 0.5, "names": ["a", "b"], "pair": (1, None), "by": {2: "x"}}
    engine.save_checkpoint(str(scratch), client_state=state)
    client = engine.load_checkpoint(str(scratch))[1]
    return [
        client["epoch"],
        client["best"],
        client["names"],
        isinstance(client["pair"], tuple),
        client["by"][2],
    ]


@check()
def tensors_in_client_state_come_back(deepspeed, scratch):
    engine = start(deepspeed)
    engine.save_checkpoint(str(scratch), client_state={"order": torch.arange(4)})
    return engine.load_checkpoint(str(scratch))[1]["order"].tolist()


@check()
def a_namespace_in_client_state_comes_back(deepspeed, scratch):
    engine = start(deepspeed)
    engine.save_checkpoint(str(scratch), client_state={"args": argparse.Namespace(lr=0.5, layers=[1, 2])})
    args = engine.load_checkpoint(str(scratch))[1]["args"]
    return [args.lr, args.layers]


@check(
    here=["epoch"],
    why="the script's values alone come back; DeepSpeed adds param_shapes, ds_config and others of its own",
)
def client_state_holds_the_scripts_keys(deepspeed, scratch):
    engine = start(deepspeed)
    engine.save_checkpoint(str(scratch), client_state={"epoch": 3})
    return sorted(engine.load_checkpoint(str(scratch))[1])


@check(
    here={"module": "mine", "lr_scheduler": 1, "global_steps": 99, "loss": True},
    why="DeepSpeed's own keys share the dictionary and are overwritten (trap 20); here they are apart",
)
def keys_of_client_state_do_not_collide(deepspeed, scratch):
    engine = start(deepspeed)
    expected = train(engine, 1)
    mine = {"module": "mine", "lr_scheduler": 1, "global_steps": 99}
    engine.save_checkpoint(str(scratch), client_state=mine)
    expected = train(engine, 1, 1)
    other = start(deepspeed, seed=4)
    client = other.load_checkpoint(str(scratch))[1]
    found = {key: client[key] for key in mine}
    return {**found, "loss": train(other, 1, 1) == expected}


class Progress:
    """A class of the script."""

    epoch = 3


@check(
    here="refused",
    why="a pickle of the script's class is only made with MEGAZERO_TRUST_PICKLE=1: it can run any code",
)
def an_object_of_the_scripts_class_in_client_state(deepspeed, scratch):
    engine = start(deepspeed)
    engine.save_checkpoint(str(scratch), client_state={"progress": Progress()})
    return outcome(lambda: engine.load_checkpoint(str(scratch)))


def resumed(deepspeed, scratch, stage, **more):
    """The losses after a load into another model, and those without the interruption."""
    engine = saved(deepspeed, scratch, stage, **more)
    whole = train(engine, 2, 2)
    other = start(deepspeed, stage, seed=4, **more)
    other.load_checkpoint(str(scratch))
    return [train(other, 2, 2), whole]


@check(tolerance=RESUMED)
def stage_0_goes_on(deepspeed, scratch):
    return resumed(deepspeed, scratch, 0)


@check(tolerance=RESUMED)
def stage_1_goes_on(deepspeed, scratch):
    return resumed(deepspeed, scratch, 1)


@check(tolerance=RESUMED)
def stage_2_goes_on(deepspeed, scratch):
    return resumed(deepspeed, scratch, 2)


@check(tolerance=RESUMED)
def stage_3_goes_on(deepspeed, scratch):
    return resumed(deepspeed, scratch, 3)


@check(ranks=2, tolerance=RESUMED)
def stage_2_goes_on_on_two_ranks(deepspeed, scratch):
    return resumed(deepspeed, scratch, 2)


@check(ranks=2, tolerance=RESUMED)
def stage_3_goes_on_on_two_ranks(deepspeed, scratch):
    return resumed(deepspeed, scratch, 3)


@check(here=True, why="DeepSpeed's losses after a load differ in the sixth digit from those without it")
def a_load_directly_after_a_save_and_a_step(deepspeed, scratch):
    engine = saved(deepspeed, scratch, 3)
    expected = train(engine, 2, 2)
    engine.load_checkpoint(str(scratch))
    return train(engine, 2, 2) == expected


@check(
    here="accepted",
    why="a checkpoint has no topology; DeepSpeed's loads at the stage that it was saved at",
)
def another_stage_loads_it(deepspeed, scratch):
    saved(deepspeed, scratch, 1)
    other = start(deepspeed, 3, seed=4)
    return outcome(lambda: other.load_checkpoint(str(scratch)))


@check()
def counters_come_back(deepspeed, scratch):
    saved(deepspeed, scratch)
    other = start(deepspeed, seed=4)
    other.load_checkpoint(str(scratch))
    return [other.global_steps, other.global_samples, other.skipped_steps]


@check()
def the_learning_rate_comes_back(deepspeed, scratch):
    engine = saved(deepspeed, scratch)
    other = start(deepspeed, seed=4)
    other.load_checkpoint(str(scratch))
    return [engine.get_lr() == other.get_lr(), other.get_lr()]


@check()
def moments_stay_without_optimizer_states(deepspeed, scratch):
    saved(deepspeed, scratch)
    other = start(deepspeed, seed=4)
    other.load_checkpoint(str(scratch), load_optimizer_states=False)
    return [train(other, 2, 2), other.global_steps]


@check()
def the_schedule_stays_without_its_state(deepspeed, scratch):
    saved(deepspeed, scratch)
    other = start(deepspeed, seed=4)
    other.load_checkpoint(str(scratch), load_lr_scheduler_states=False)
    train(other, 1, 2)
    return other.get_lr()


@check()
def the_module_alone(deepspeed, scratch):
    saved(deepspeed, scratch)
    other = start(deepspeed, seed=4)
    other.load_checkpoint(str(scratch), load_module_only=True)
    return [other.global_steps, train(other, 1, 2)]


@check()
def a_module_that_lacks_weights_is_refused(deepspeed, scratch):
    saved(deepspeed, scratch)
    other = start(deepspeed, seed=4)
    other.module.register_buffer("more", torch.ones(1))
    return outcome(lambda: other.load_checkpoint(str(scratch)))


@check()
def a_module_of_another_shape_is_refused(deepspeed, scratch):
    saved(deepspeed, scratch)
    return outcome(lambda: start(deepspeed, width=6).load_checkpoint(str(scratch)))


@check()
def a_load_that_is_not_strict_leaves_what_is_missing(deepspeed, scratch):
    saved(deepspeed, scratch)
    other = start(deepspeed, seed=4)
    other.module.register_buffer("more", torch.ones(1))
    other.load_checkpoint(str(scratch), load_module_strict=False)
    return [other.module.more.tolist(), train(other, 1, 2)]


@check()
def buffers_come_back(deepspeed, scratch):
    saved(deepspeed, scratch)
    other = start(deepspeed, seed=4)
    other.load_checkpoint(str(scratch))
    return other.module.seen.tolist()


@check()
def a_custom_function_gets_state_and_module(deepspeed, scratch):
    engine = saved(deepspeed, scratch, 0)
    seen = []

    def load(src, dst):
        seen.append([sorted(src), dst is engine.module])
        dst.load_state_dict(src)

    engine.load_checkpoint(str(scratch), custom_load_fn=load, load_module_only=True)
    return seen


@check()
def a_missing_tag(deepspeed, scratch):
    engine = saved(deepspeed, scratch)
    return outcome(lambda: engine.load_checkpoint(str(scratch), tag="none"))


@check()
def folders_must_be_named(deepspeed, scratch):
    engine = start(deepspeed)
    return [outcome(lambda: engine.save_checkpoint(None)), outcome(lambda: engine.load_checkpoint(None))]


@check()
def scripts_lie_beside_a_checkpoint_of_zero(deepspeed, scratch):
    saved(deepspeed, scratch)
    return sorted(name for name in os.listdir(scratch) if name.endswith(".py"))


@check()
def no_scripts_lie_beside_one_of_stage_0(deepspeed, scratch):
    saved(deepspeed, scratch, 0)
    return sorted(name for name in os.listdir(scratch) if name.endswith(".py"))


@check()
def a_wrong_tag_validation_is_refused(deepspeed, scratch):
    return outcome(lambda: start(deepspeed, checkpoint={"tag_validation": "maybe"}))


@check()
def tag_validation_takes_any_case(deepspeed, scratch):
    def made(mode):
        return outcome(lambda: start(deepspeed, checkpoint={"tag_validation": mode}))

    return [made("WARN"), made("fail")]


@check(ranks=2)
def differing_tags_fail(deepspeed, scratch):
    engine = start(deepspeed, checkpoint={"tag_validation": "Fail"})
    return outcome(lambda: engine.save_checkpoint(str(scratch), tag=f"rank{engine.global_rank}"))


@check(ranks=2)
def differing_tags_that_are_ignored(deepspeed, scratch):
    engine = start(deepspeed, checkpoint={"tag_validation": "Ignore"})
    engine.save_checkpoint(str(scratch), tag=f"rank{engine.global_rank}")
    engine.load_checkpoint(str(scratch))
    return (scratch / "latest").read_text().strip()


@check()
def a_16_bit_model_of_stage_2(deepspeed, scratch):
    engine = start(deepspeed, 2, bf16={"enabled": True})
    done = engine.save_16bit_model(str(scratch))
    state = torch.load(scratch / "pytorch_model.bin", weights_only=True)
    return [done, sorted(state), str(state["first.weight"].dtype), list(state["first.weight"].shape)]


@check()
def save_fp16_model_is_the_same(deepspeed, scratch):
    return [start(deepspeed, 1).save_fp16_model(str(scratch), "weights.bin"), os.listdir(scratch)]


@check()
def a_16_bit_model_of_stage_3_needs_a_key(deepspeed, scratch):
    return [start(deepspeed, 3).save_16bit_model(str(scratch)), names(scratch)]


@check()
def a_16_bit_model_of_stage_3_with_the_key(deepspeed, scratch):
    engine = start(deepspeed, 3, zero_optimization={"stage3_gather_16bit_weights_on_model_save": True})
    done = engine.save_16bit_model(str(scratch))
    state = torch.load(scratch / "pytorch_model.bin", weights_only=True)
    shapes = {name: list(value.shape) for name, value in state.items()}
    return [done, engine.zero_gather_16bit_weights_on_model_save(), shapes]


@check()
def a_16_bit_model_without_frozen_parameters(deepspeed, scratch):
    start(deepspeed, 2).save_16bit_model(str(scratch), exclude_frozen_parameters=True)
    return sorted(torch.load(scratch / "pytorch_model.bin", weights_only=True))


@check()
def consolidated_weights_at_stage_3(deepspeed, scratch):
    state = start(deepspeed, 3)._zero3_consolidated_16bit_state_dict()
    tied = state["head.weight"].data_ptr() == state["first.weight"].data_ptr()
    return [sorted(state), tied, str(state["seen"].device)]


@check()
def consolidated_weights_at_stage_3_without_frozen_ones(deepspeed, scratch):
    return sorted(start(deepspeed, 3)._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True))


@check()
def sharded_weights_are_of_stage_3_alone(deepspeed, scratch):
    return outcome(start(deepspeed, 2)._zero3_consolidated_16bit_state_dict)


@check(
    here=[["first.bias", "first.weight", "frozen.bias", "frozen.weight", "head.weight", "seen"]] * 2,
    why="whole weights can be had at any stage; DeepSpeed refuses where nothing is partitioned",
)
def consolidated_weights_at_any_stage(deepspeed, scratch):
    return [sorted(start(deepspeed, stage)._consolidated_16bit_state_dict()) for stage in (0, 2)]


@check()
def module_state_dict_of_stage_1(deepspeed, scratch):
    state = start(deepspeed).module_state_dict()
    return {name: list(value.shape) for name, value in state.items()}


@check(
    here=[3, 5],
    why="weights are whole at every stage; DeepSpeed's have no elements at stage 3 (trap 23)",
)
def module_state_dict_of_stage_3(deepspeed, scratch):
    return list(start(deepspeed, 3).module_state_dict()["first.weight"].shape)


@check()
def module_state_dict_into_a_dictionary(deepspeed, scratch):
    into: dict = {}
    start(deepspeed).module_state_dict(destination=into, prefix="model.")
    return sorted(into)


@check()
def module_state_dict_without_frozen_parameters(deepspeed, scratch):
    return sorted(start(deepspeed).module_state_dict(exclude_frozen_parameters=True))


@check()
def load_module_state_dict_reads_the_entry_module(deepspeed, scratch):
    engine = start(deepspeed, 0)
    state = {name: torch.full_like(value, 0.5) for name, value in engine.module_state_dict().items()}
    engine.load_module_state_dict({"module": state})
    return [train(engine, 1), outcome(lambda: engine.load_module_state_dict({"module": {}}))]


@check(
    here="accepted",
    why="parameters that were left out on purpose are not missing; DeepSpeed's strict load fails (trap 44)",
)
def a_checkpoint_without_frozen_parameters(deepspeed, scratch):
    engine = start(deepspeed)
    engine.save_checkpoint(str(scratch), exclude_frozen_parameters=True)
    return outcome(lambda: engine.load_checkpoint(str(scratch)))


def fp32(name="zero_to_fp32"):
    """The module of the tools, of whichever DeepSpeed there is."""
    return importlib.import_module(f"deepspeed.utils.{name}")


def sums(state):
    """Names and sums of a state dict."""
    return {name: float(value.double().sum()) for name, value in state.items()}


@check()
def whole_weights_of_stage_2(deepspeed, scratch):
    saved(deepspeed, scratch, 2)
    return sums(fp32().get_fp32_state_dict_from_zero_checkpoint(str(scratch)))


@check(ranks=2)
def whole_weights_of_two_ranks(deepspeed, scratch):
    saved(deepspeed, scratch, 2, bf16={"enabled": False})
    return sums(fp32().get_fp32_state_dict_from_zero_checkpoint(str(scratch)))


@check()
def whole_weights_of_stage_3_have_every_name(deepspeed, scratch):
    saved(deepspeed, scratch, 3)
    return sorted(fp32().get_fp32_state_dict_from_zero_checkpoint(str(scratch)))


@check()
def whole_weights_without_frozen_ones(deepspeed, scratch):
    saved(deepspeed, scratch, 2)
    found = fp32().get_fp32_state_dict_from_zero_checkpoint(str(scratch), exclude_frozen_parameters=True)
    return sorted(found)


@check()
def whole_weights_by_tag(deepspeed, scratch):
    engine = start(deepspeed, 2)
    engine.save_checkpoint(str(scratch), tag="t", save_latest=False)
    tools = fp32()
    return [
        outcome(lambda: tools.get_fp32_state_dict_from_zero_checkpoint(str(scratch))),
        len(tools.get_fp32_state_dict_from_zero_checkpoint(str(scratch), tag="t")),
    ]


@check()
def weights_are_written_to_a_file(deepspeed, scratch):
    saved(deepspeed, scratch, 2)
    fp32().convert_zero_checkpoint_to_fp32_state_dict(str(scratch), str(scratch / "out"))
    return [names(scratch / "out"), len(torch.load(scratch / "out/pytorch_model.bin", weights_only=True))]


@check()
def a_model_takes_whole_weights(deepspeed, scratch):
    saved(deepspeed, scratch, 2)
    model = fp32().load_state_dict_from_zero_checkpoint(Net(), str(scratch))
    return sums(model.state_dict())


@check()
def tensors_are_cloned_for_a_save(deepspeed, scratch):
    clone = importlib.import_module("deepspeed.checkpoint.utils").clone_tensors_for_torch_save
    base = torch.arange(10.0)
    item = {"a": base[:2], "b": [base[2:4], ("x", base[4:])], "c": 3}
    found = clone(item)
    return [
        found["a"].untyped_storage().nbytes(),
        found["b"][0].tolist(),
        isinstance(found["b"][1], tuple),
        found["c"],
    ]


@check()
def constants_of_files(deepspeed, scratch):
    names_of = importlib.import_module("deepspeed.checkpoint.constants")
    wanted = ("OPTIMIZER_STATE_DICT", "PARAM_SHAPES", "ZERO_FILE_PREFIX", "UNIVERSAL_CHECKPOINT_INFO")
    return [getattr(names_of, name) for name in wanted]
