"""DeepSpeed's schedules: documentation page "Learning Rate Schedulers"."""

from __future__ import annotations

import argparse
import math
import warnings

import torch

from tests.deepspeed.checks import check, outcome

STEPS = 14
BETA2 = "DeepSpeed replaces the user's second beta by 0.99, which its documentation does not say"


def optimizer(kind=torch.optim.Adam, rates=(0.3, 0.007), **options):
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in rates]
    return kind([{"params": [w], "lr": rate} for w, rate in zip(weights, rates, strict=True)], **options)


def path(deepspeed, name, *, made=None, steps=STEPS, **params):
    """The rates of two groups at construction and after each step."""
    from deepspeed.runtime import lr_schedules

    made = made or optimizer()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schedule = getattr(lr_schedules, name)(made, **params)
    found = [[float(group["lr"]) for group in made.param_groups]]
    for _ in range(steps):
        schedule.step()
        found.append([float(group["lr"]) for group in made.param_groups])
    return found


def of(name, **params):
    """A check that a schedule takes this path."""
    return check(tolerance=1e-12)(lambda deepspeed, scratch: path(deepspeed, name, **params))


warmup_log = of("WarmupLR", warmup_num_steps=10, warmup_max_lr=1.0)
warmup_of_the_groups_own_rates = of("WarmupLR", warmup_num_steps=4)
warmup_default_length = of("WarmupLR")
warmup_of_one_step = of("WarmupLR", warmup_num_steps=1, warmup_min_lr=0.01, warmup_max_lr=0.5)
warmup_linear = of("WarmupLR", warmup_num_steps=5, warmup_type="linear", warmup_min_lr=1e-4)
warmup_of_an_unknown_type_is_log = of("WarmupLR", warmup_num_steps=5, warmup_type="cubic")
warmup_with_a_list = of("WarmupLR", warmup_num_steps=5, warmup_max_lr=[0.5, 0.25], warmup_min_lr=[0.1, 0.0])
warmup_downwards = of("WarmupLR", warmup_num_steps=5, warmup_min_lr=0.5, warmup_max_lr=0.1)
decay_ignores_the_groups_rates = of("WarmupDecayLR", total_num_steps=12, warmup_num_steps=4)
decay_linear = of(
    "WarmupDecayLR",
    total_num_steps=20,
    warmup_num_steps=10,
    warmup_type="linear",
    warmup_max_lr=1.0,
    steps=25,
)
decay_shorter_than_its_warmup = of("WarmupDecayLR", total_num_steps=3, warmup_num_steps=6, warmup_max_lr=0.2)
decay_with_a_list = of("WarmupDecayLR", total_num_steps=9, warmup_num_steps=3, warmup_max_lr=[0.2, 0.1])
decay_from_a_floor = of(
    "WarmupDecayLR", total_num_steps=9, warmup_num_steps=3, warmup_min_lr=0.05, warmup_max_lr=0.2
)
cosine = of("WarmupCosineLR", total_num_steps=12, warmup_num_steps=4)
cosine_linear = of(
    "WarmupCosineLR",
    total_num_steps=20,
    warmup_num_steps=10,
    warmup_type="linear",
    warmup_min_ratio=0.1,
    cos_min_ratio=0.0,
    steps=25,
)
cosine_shorter_than_its_warmup = of("WarmupCosineLR", total_num_steps=2, warmup_num_steps=5)
cosine_with_a_floor = of("WarmupCosineLR", total_num_steps=8, warmup_num_steps=2, cos_min_ratio=0.5)
range_test = of("LRRangeTest", lr_range_test_step_size=5)
range_test_in_stairs = of("LRRangeTest", lr_range_test_step_size=5, lr_range_test_staircase=True)
range_test_with_a_list_and_a_rate = of(
    "LRRangeTest", lr_range_test_min_lr=[0.1, 0.2], lr_range_test_step_size=3, lr_range_test_step_rate=2.5
)
cycle = of("OneCycle", cycle_min_lr=0.1, cycle_max_lr=1.1, cycle_first_step_size=4)
cycle_with_decay = of(
    "OneCycle",
    cycle_min_lr=0.1,
    cycle_max_lr=1.1,
    cycle_first_step_size=4,
    decay_lr_rate=1.0,
    decay_step_size=2,
)
cycle_down_slower = of(
    "OneCycle", cycle_min_lr=0.1, cycle_max_lr=1.0, cycle_first_step_size=3, cycle_second_step_size=7
)
cycle_in_stairs = of(
    "OneCycle", cycle_min_lr=0.0, cycle_max_lr=1.0, cycle_first_step_size=4, cycle_first_stair_count=2
)
cycle_in_unequal_stairs = of(
    "OneCycle",
    cycle_min_lr=0.0,
    cycle_max_lr=1.0,
    cycle_first_step_size=5,
    cycle_second_step_size=6,
    cycle_first_stair_count=5,
    cycle_second_stair_count=3,
)
cycle_with_lists = of(
    "OneCycle",
    cycle_min_lr=[0.1, 0.2],
    cycle_max_lr=[1.0, 2.0],
    cycle_first_step_size=3,
    cycle_momentum=False,
)
cycle_without_decay_steps = of(
    "OneCycle", cycle_min_lr=0.1, cycle_max_lr=1.0, cycle_first_step_size=2, decay_lr_rate=1.0
)
cycle_with_an_instant_end = of(
    "OneCycle", cycle_min_lr=0.1, cycle_max_lr=1.0, cycle_first_step_size=4, cycle_second_step_size=0
)


def momenta(deepspeed, rate, steps=9):
    from deepspeed.runtime.lr_schedules import OneCycle

    made = optimizer(betas=(0.5, 0.95))
    sizes = {"cycle_first_step_size": 4, "decay_step_size": 2, "decay_mom_rate": rate}
    schedule = OneCycle(made, 0.1, 1.1, **sizes)
    found = [list(made.param_groups[0]["betas"])]
    for _ in range(steps):
        schedule.step()
        found.append(list(made.param_groups[0]["betas"]))
    return found


@check()
def the_momentum_cycles(deepspeed, scratch):
    return [pair[0] for pair in momenta(deepspeed, 0.0)]


RISE_AND_FALL = [0.8, 0.875, 0.85, 0.825, 0.8, 0.825, 0.85, 0.875, 0.9]


@check(here=[*RISE_AND_FALL, 0.9999], why="a momentum of 1 and more makes Adam's averages diverge")
def a_growing_momentum_stays_below_one(deepspeed, scratch):
    return [pair[0] for pair in momenta(deepspeed, 0.5)]


@check(here=[0.95] * 10, why=BETA2)
def the_second_beta_is_the_users(deepspeed, scratch):
    return [pair[1] for pair in momenta(deepspeed, 0.0)]


@check()
def sgd_keeps_its_momentum(deepspeed, scratch):
    made = optimizer(torch.optim.SGD, momentum=0.7)
    rates = path(
        deepspeed, "OneCycle", made=made, cycle_min_lr=0.1, cycle_max_lr=1.0, cycle_first_step_size=3
    )
    return [rates[:5], made.param_groups[0]["momentum"]]


def refused(name, make=optimizer, **params):
    def run(deepspeed, scratch):
        return outcome(lambda: path(deepspeed, name, made=make(), **params))

    return check()(run)


a_warmup_of_no_steps = refused("WarmupLR", warmup_num_steps=0)
a_warmup_of_half_a_step = refused("WarmupLR", warmup_num_steps=2.5)
a_negative_warmup = refused("WarmupCosineLR", total_num_steps=3, warmup_num_steps=-1)
a_list_of_the_wrong_length = refused("WarmupLR", warmup_max_lr=[0.1])
a_decay_without_its_length = refused("WarmupDecayLR")
a_range_test_of_no_steps = refused("LRRangeTest", lr_range_test_step_size=0)
a_cycle_without_rates = refused("OneCycle")
a_cycle_of_no_steps = refused("OneCycle", cycle_min_lr=0.1, cycle_max_lr=1.0, cycle_first_step_size=0)
a_cycle_with_a_negative_end = refused(
    "OneCycle", cycle_min_lr=0.1, cycle_max_lr=1.0, cycle_second_step_size=-1
)
an_optimizer_that_is_none = refused("WarmupLR", make=lambda: object())
a_strange_argument = refused("WarmupLR", total_num_steps=3)


@check()
def the_state_is_the_count(deepspeed, scratch):
    from deepspeed.runtime.lr_schedules import WarmupDecayLR

    made = optimizer()
    schedule = WarmupDecayLR(made, 10, warmup_num_steps=2, warmup_type="linear", warmup_max_lr=0.4)
    for _ in range(4):
        schedule.step()
    state = schedule.state_dict()
    schedule.load_state_dict({"last_batch_iteration": 6})
    before = [group["lr"] for group in made.param_groups]
    schedule.step()
    after = [group["lr"] for group in made.param_groups]
    schedule.step(1)
    return [state, before, after, schedule.last_batch_iteration, schedule.get_last_lr()]


@check()
def going_on_from_a_count_leaves_rates_alone(deepspeed, scratch):
    return [
        path(deepspeed, "WarmupLR", warmup_num_steps=4, last_batch_iteration=2),
        path(deepspeed, "WarmupCosineLR", total_num_steps=9, warmup_num_steps=3, last_batch_iteration=4),
        path(deepspeed, "LRRangeTest", lr_range_test_step_size=4, last_batch_iteration=1),
        path(deepspeed, "OneCycle", cycle_min_lr=0.1, cycle_max_lr=1.0, last_batch_iteration=5),
    ]


def asked_too_early(deepspeed, name, **params):
    from deepspeed.runtime import lr_schedules

    schedule = getattr(lr_schedules, name)(optimizer(), **params)
    try:
        return list(schedule.get_last_lr())
    except AssertionError as error:
        return "need to call step" in str(error)


@check()
def the_last_rate_before_a_step(deepspeed, scratch):
    return [
        asked_too_early(deepspeed, "WarmupLR", warmup_num_steps=3),
        asked_too_early(deepspeed, "WarmupCosineLR", total_num_steps=3),
        asked_too_early(deepspeed, "LRRangeTest"),
        asked_too_early(deepspeed, "OneCycle", cycle_min_lr=0.1, cycle_max_lr=1.0),
        asked_too_early(deepspeed, "WarmupLR", last_batch_iteration=3),
    ]


@check()
def rates_may_be_tensors(deepspeed, scratch):
    weight = torch.nn.Parameter(torch.ones(2))
    made = torch.optim.AdamW([weight], lr=torch.tensor(0.5))
    found = path(deepspeed, "WarmupLR", made=made, warmup_num_steps=3, steps=4)
    return [found, isinstance(made.param_groups[0]["lr"], torch.Tensor)]


@check()
def a_wrapper_is_looked_into(deepspeed, scratch):
    class Wrapper:
        optimizer = optimizer()

    found = path(deepspeed, "WarmupLR", made=Wrapper.optimizer, warmup_num_steps=3, steps=2)
    from deepspeed.runtime.lr_schedules import WarmupLR

    return [found, WarmupLR(Wrapper(), warmup_num_steps=3).optimizer is Wrapper.optimizer]


def flags(deepspeed, *words):
    from deepspeed.runtime.lr_schedules import add_tuning_arguments, get_config_from_args

    return get_config_from_args(add_tuning_arguments(argparse.ArgumentParser()).parse_args(words))


@check()
def the_names(deepspeed, scratch):
    from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES

    return list(VALID_LR_SCHEDULES)


@check()
def flags_have_defaults_of_their_own(deepspeed, scratch):
    from deepspeed.runtime.lr_schedules import add_tuning_arguments

    found = vars(add_tuning_arguments(argparse.ArgumentParser()).parse_args([]))
    return {name: value for name, value in found.items() if not (value == 0 and name == "warmup_min_lr")}


@check()
def flags_of_a_range_test(deepspeed, scratch):
    return flags(deepspeed, "--lr_schedule", "LRRangeTest", "--lr_range_test_step_size", "5")[0]


@check()
def flags_of_a_warmup(deepspeed, scratch):
    config = flags(deepspeed, "--lr_schedule", "WarmupLR", "--warmup_max_lr", "0.5")[0]
    return [config, flags(deepspeed, "--lr_schedule", "WarmupCosineLR")[0]]


@check(here=["type", "params", True], why="-1, the flag's default, makes DeepSpeed's own OneCycle fail")
def flags_of_a_cycle_make_one(deepspeed, scratch):
    from deepspeed.runtime.lr_schedules import OneCycle

    config = flags(deepspeed, "--lr_schedule", "OneCycle")[0]
    return [*config, OneCycle(optimizer(), **config["params"]).total_size == 2000]


@check()
def flags_without_a_schedule(deepspeed, scratch):
    return [flags(deepspeed)[0] is None, flags(deepspeed, "--lr_schedule", "Other")[0] is None]


@check()
def the_rate_that_a_section_names(deepspeed, scratch):
    from deepspeed.runtime.lr_schedules import get_lr_from_config

    sections = [
        {"type": "OneCycle", "params": {"cycle_max_lr": 0.3}},
        {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 0.1}},
        {"type": "WarmupLR", "params": {"warmup_max_lr": 0.2}},
        {"type": "WarmupCosineLR", "params": {}},
        {"type": "Other", "params": {}},
        {"type": "WarmupLR"},
        {},
    ]
    return [get_lr_from_config(section)[0] for section in sections]


def engine_rates(deepspeed, steps=5, scheduler=None, stage=1, **arguments):
    """The rates of the engine's optimizer after each of its steps, and those that updates used."""
    config = {"train_batch_size": 1, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}}
    if "optimizer" not in arguments:
        config["optimizer"] = {"type": "Adam", "params": {"lr": 0.3}}
    if scheduler:
        config["scheduler"] = scheduler
    model = arguments.pop("model", None) or torch.nn.Linear(2, 1)
    engine, wrapped, _, schedule = deepspeed.initialize(
        model=model, config=config, model_parameters=model.parameters(), **arguments
    )
    found = []
    for _ in range(steps):
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        found.append(float(wrapped.param_groups[0]["lr"]))
    return [found, type(schedule).__name__]


@check()
def a_json_of_each_schedule(deepspeed, scratch):
    sections = [
        {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
        {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 4}},
        {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 2, "total_num_steps": 4}},
        {"type": "LRRangeTest", "params": {"lr_range_test_step_size": 2}},
        {
            "type": "OneCycle",
            "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 2},
        },
    ]
    return [engine_rates(deepspeed, scheduler=section) for section in sections]


@check()
def a_json_of_schedules_of_torch(deepspeed, scratch):
    sections = [
        {"type": "StepLR", "params": {"step_size": 2, "gamma": 0.5}},
        {"type": "CosineAnnealingLR", "params": {"T_max": 4}},
        {"type": "ExponentialLR", "params": {"gamma": 0.9}},
        {"type": "LinearLR", "params": {"total_iters": 3}},
    ]
    return [engine_rates(deepspeed, scheduler=section, stage=0) for section in sections]


@check()
def a_json_of_unknown_schedules(deepspeed, scratch):
    sections = [
        {"type": "Sawtooth", "params": {}},
        {"type": "warmuplr", "params": {}},
        {"type": "WarmupLR", "params": {"wrong": 1}},
        {"type": "StepLR", "params": {}},
    ]
    return [outcome(lambda section=s: engine_rates(deepspeed, scheduler=section)) for s in sections]


@check()
def a_json_schedule_over_a_clients_optimizer(deepspeed, scratch):
    model = torch.nn.Linear(2, 1)
    own = torch.optim.AdamW(model.parameters(), lr=0.2)
    section = {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_type": "linear"}}
    found = engine_rates(deepspeed, scheduler=section, model=model, optimizer=own)
    return [*found, float(own.param_groups[0]["lr"])]


@check()
def a_clients_schedule_and_a_function_that_makes_one(deepspeed, scratch):
    def halving(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    model = torch.nn.Linear(2, 1)
    own = torch.optim.AdamW(model.parameters(), lr=0.2)
    seen = []

    def noted(optimizer):
        seen.append(type(optimizer).__name__)
        return halving(optimizer)

    return [
        engine_rates(deepspeed, model=model, optimizer=own, lr_scheduler=halving(own)),
        engine_rates(
            deepspeed,
            optimizer=lambda params: torch.optim.AdamW(params, lr=0.4),
            lr_scheduler=noted,
        ),
        seen,
        math.isclose(0.2 * 0.5**5, own.param_groups[0]["lr"]),
    ]
