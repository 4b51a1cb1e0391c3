"""Counters, boundaries, learning rates and schedules of an engine."""

from __future__ import annotations

import torch

from tests.deepspeed.checks import check, outcome


def engine_of(deepspeed, accumulation=1, stage=1, model=None, **more):
    """A small engine and its input."""
    torch.manual_seed(5)
    if hasattr(deepspeed, "get_accelerator"):  # DeepSpeed refuses fp16 on processors that could do it
        deepspeed.get_accelerator().is_fp16_supported = lambda: True
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        **more.pop("config", {}),
    }
    model = model or torch.nn.Linear(3, 2)
    if "optimizer" not in more:
        more["model_parameters"] = model.parameters()
    else:
        config.pop("optimizer")
    return deepspeed.initialize(model=model, config=config, **more)[0]


X = torch.arange(6.0).reshape(2, 3) / 6


def micro(engine, x=X):
    """One micro-batch."""
    loss = engine(x).square().mean()
    engine.backward(loss)
    engine.step()
    return float(loss)


def counters(engine):
    """All four."""
    return [engine.micro_steps, engine.global_steps, engine.global_samples, engine.skipped_steps]


@check()
def counters_over_five_micro_batches(deepspeed, scratch):
    engine = engine_of(deepspeed, 2)
    found = [counters(engine)]
    for _ in range(5):
        micro(engine)
        found.append(counters(engine))
    return found


@check(ranks=2)
def counters_of_two_ranks(deepspeed, scratch):
    engine = engine_of(deepspeed, 2)
    for _ in range(4):
        micro(engine)
    return [*counters(engine), engine.train_batch_size()]


@check()
def a_skipped_step_counts(deepspeed, scratch):
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}
    engine = engine_of(deepspeed, stage=2, config={"fp16": fp16, "scheduler": schedule})
    found = []
    for factor in (1.0, 1e9, 1.0):
        engine.backward(engine(X.half()).float().sum() * factor)
        engine.step()
        found.append([*counters(engine), engine.lr_scheduler.last_batch_iteration])
    return found


@check()
def the_boundary_is_the_last_micro_batch(deepspeed, scratch):
    engine = engine_of(deepspeed, 3)
    found = []
    for _ in range(4):
        found.append(engine.is_gradient_accumulation_boundary())
        micro(engine)
    return found


@check()
def a_step_between_boundaries_is_not_applied(deepspeed, scratch):
    engine = engine_of(deepspeed, 2)
    found = []
    for _ in range(4):
        micro(engine)
        found.append(engine.was_step_applied())
    return found


@check()
def a_forced_boundary_stays(deepspeed, scratch):
    engine = engine_of(deepspeed, 4)
    engine.set_gradient_accumulation_boundary(True)
    for _ in range(3):
        micro(engine)
    found = counters(engine)
    engine.set_gradient_accumulation_boundary(False)
    for _ in range(5):
        micro(engine)
    return [found, counters(engine)]


@check()
def an_incomplete_accumulation_ends_with_the_epoch(deepspeed, scratch):
    engine = engine_of(deepspeed, 4)
    for number in range(5):
        engine.set_gradient_accumulation_boundary(number in (3, 4))
        micro(engine)
    return [*counters(engine), float(engine.module.weight.detach().sum())]


@check()
def accumulation_in_one_or_eight(deepspeed, scratch):
    found = []
    for accumulation in (1, 2):
        engine = engine_of(deepspeed, accumulation)
        for part in X.split(2 // accumulation):
            micro(engine, part)
        found.append(engine.module.weight.detach().flatten().tolist())
    return found


@check()
def samples_per_step_can_be_changed(deepspeed, scratch):
    engine = engine_of(deepspeed, 2)
    engine.set_train_batch_size(8)
    found = [engine.train_batch_size(), engine.gradient_accumulation_steps()]
    for _ in range(4):
        micro(engine)
    return [found, counters(engine)]


@check()
def samples_per_step_must_be_whole_micro_batches(deepspeed, scratch):
    return outcome(lambda: engine_of(deepspeed).set_train_batch_size(3))


@check()
def samples_per_forward_can_be_changed(deepspeed, scratch):
    engine = engine_of(deepspeed, 2)
    engine.set_train_micro_batch_size(5)
    return [
        engine.train_batch_size(),
        engine.train_micro_batch_size_per_gpu(),
        engine.gradient_accumulation_steps(),
    ]


@check(
    here=[4, 2, 2],
    why="documented to return the sizes; DeepSpeed 0.19.8 returns the methods that tell them",
)
def batch_info(deepspeed, scratch):
    info = engine_of(deepspeed, 2).get_batch_info()
    return [value if isinstance(value, int) else "a method" for value in info]


@check()
def rates_and_momenta(deepspeed, scratch):
    engine = engine_of(deepspeed)
    return [engine.get_lr(), [list(mom) for mom in engine.get_mom()], engine.get_type()]


@check()
def momentum_of_sgd(deepspeed, scratch):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.75)
    config = {"zero_allow_untested_optimizer": True}
    engine = engine_of(deepspeed, model=model, optimizer=optimizer, config=config)
    return [engine.get_lr(), engine.get_mom()]


@check()
def the_wrappers_rate(deepspeed, scratch):
    engine = engine_of(deepspeed)
    engine.optimizer.set_lr(0.25)
    return [engine.get_lr(), float(engine.optimizer.get_lr())]


@check()
def rates_of_a_json_schedule(deepspeed, scratch):
    params = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.01, "warmup_num_steps": 4, "warmup_type": "linear"}
    engine = engine_of(deepspeed, config={"scheduler": {"type": "WarmupLR", "params": params}})
    found = []
    for _ in range(5):
        found.append(engine.get_lr()[0])
        micro(engine)
    return found


@check()
def a_schedule_steps_with_the_update_alone(deepspeed, scratch):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    engine = engine_of(deepspeed, 2, model=model, optimizer=optimizer, lr_scheduler=schedule)
    found = []
    for _ in range(4):
        micro(engine)
        found.append(engine.get_lr()[0])
    return found


@check()
def a_function_makes_the_schedule_from_the_inner_optimizer(deepspeed, scratch):
    seen = []

    def make(optimizer):
        seen.append([type(optimizer).__module__.partition(".")[0] == "torch", len(optimizer.param_groups)])
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    engine = engine_of(deepspeed, model=model, optimizer=optimizer, lr_scheduler=make)
    for _ in range(3):
        micro(engine)
    inner = engine.basic_optimizer.param_groups[0]["lr"]
    return [seen, inner, engine.optimizer.param_groups[0]["lr"], engine.get_lr()]


@check()
def functions_make_both(deepspeed, scratch):
    def schedule(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)

    def adam(params):
        return torch.optim.Adam(params, lr=0.5)

    model = torch.nn.Linear(3, 2)
    more = {"model_parameters": model.parameters(), "lr_scheduler": schedule}
    engine = engine_of(deepspeed, model=model, optimizer=adam, **more)
    losses = [micro(engine) for _ in range(3)]
    return [losses, engine.get_lr()]


@check()
def a_json_optimizer_with_a_function_for_the_schedule(deepspeed, scratch):
    def make(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)

    engine = engine_of(deepspeed, lr_scheduler=make)
    losses = [micro(engine) for _ in range(3)]
    return [losses, engine.get_lr()]


@check()
def the_scripts_schedule_goes_before_the_jsons(deepspeed, scratch):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    more = {"config": {"scheduler": {"type": "WarmupLR", "params": {}}}}
    engine = engine_of(deepspeed, model=model, optimizer=optimizer, lr_scheduler=schedule, **more)
    return type(engine.lr_scheduler).__name__


@check()
def the_schedule_can_be_taken_away(deepspeed, scratch):
    params = {"warmup_max_lr": 0.01, "warmup_num_steps": 4, "warmup_type": "linear"}
    engine = engine_of(deepspeed, config={"scheduler": {"type": "WarmupLR", "params": params}})
    engine.lr_scheduler = None
    micro(engine)
    return [engine.lr_scheduler, engine.global_steps]


class Told:
    """A schedule that notes what its `step` is given."""

    def __init__(self):
        self.calls = []

    def step(self, epoch=None):
        self.calls.append(epoch)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@check()
def a_schedule_is_given_lr_kwargs(deepspeed, scratch):
    model, schedule = torch.nn.Linear(3, 2), Told()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    engine = engine_of(deepspeed, model=model, optimizer=optimizer, lr_scheduler=schedule)
    for kwargs in (None, {"epoch": 7}):
        engine.backward(engine(X).sum())
        engine.step(lr_kwargs=kwargs)
    return schedule.calls


class Failing(Told):
    """A schedule whose step has a fault of its own."""

    def step(self, epoch=None):
        self.calls.append(epoch)
        if epoch is None:
            raise TypeError("a fault within the schedule")


@check(
    here="refused",
    why="DeepSpeed tries `step(train_batch_size)` after any TypeError, which hides a schedule's own fault",
)
def a_fault_within_a_schedule_shows(deepspeed, scratch):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    engine = engine_of(deepspeed, model=model, optimizer=optimizer, lr_scheduler=Failing())
    return outcome(lambda: micro(engine))


@check()
def global_steps_can_be_written(deepspeed, scratch):
    engine = engine_of(deepspeed)
    engine.global_steps = 41
    micro(engine)
    return engine.global_steps


@check()
def a_constant_rate_without_a_schedule(deepspeed, scratch):
    engine = engine_of(deepspeed)
    micro(engine)
    return [engine.lr_scheduler, engine.get_lr()]
