"""`GatheredParameters`, parameters that other modules read, and generation."""

from __future__ import annotations

import torch
from torch import nn

from tests.deepspeed.checks import check, outcome

CONFIG = {
    "train_batch_size": 2,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_allow_untested_optimizer": True,
}
REFUSED = "DeepSpeed does nothing without a word"


def rank():
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def layer(deepspeed, value=None):
    """A sharded linear layer from 3 to 2."""
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        made = nn.Linear(3, 2)
    if value is not None:
        with deepspeed.zero.GatheredParameters(list(made.parameters()), modifier_rank=0), torch.no_grad():
            for param in made.parameters():
                param.fill_(value)
    return made


def values(deepspeed, param):
    with deepspeed.zero.GatheredParameters(param):
        return param.detach().flatten().tolist()


def attempt(deepspeed, params, **arguments):
    def run():
        with deepspeed.zero.GatheredParameters(params, **arguments):
            pass

    return outcome(run)


@check()
def one_parameter(deepspeed, scratch):
    return values(deepspeed, layer(deepspeed, 0.5).weight)


@check()
def a_list_of_parameters(deepspeed, scratch):
    made = layer(deepspeed, 0.5)
    with deepspeed.zero.GatheredParameters([made.weight, made.bias]):
        return [float(made.weight.detach().sum()), float(made.bias.detach().sum())]


@check()
def a_generator_of_parameters(deepspeed, scratch):
    made = layer(deepspeed, 0.5)
    with deepspeed.zero.GatheredParameters(made.parameters()):
        return [list(made.weight.shape), list(made.bias.shape)]


@check()
def a_parameter_twice(deepspeed, scratch):
    made = layer(deepspeed, 0.5)
    with deepspeed.zero.GatheredParameters([made.weight, made.weight]):
        return float(made.weight.detach().sum())


@check()
def an_empty_list(deepspeed, scratch):
    return attempt(deepspeed, [], modifier_rank=0)


@check()
def a_module_without_parameters(deepspeed, scratch):
    return attempt(deepspeed, nn.Tanh().parameters(), modifier_rank=0)


@check()
def none_among_parameters(deepspeed, scratch):
    return attempt(deepspeed, [layer(deepspeed).weight, None], modifier_rank=0)


@check()
def a_buffer_among_parameters(deepspeed, scratch):
    return attempt(deepspeed, [layer(deepspeed).weight, torch.ones(2)], modifier_rank=0)


@check()
def ordinary_parameters(deepspeed, scratch):
    return attempt(deepspeed, list(nn.Linear(2, 2).parameters()), modifier_rank=0)


@check(here="refused", why=REFUSED)
def a_module_by_mistake(deepspeed, scratch):
    return attempt(deepspeed, layer(deepspeed))


@check(here="refused", why=REFUSED)
def a_generator_that_is_used_up(deepspeed, scratch):
    params = layer(deepspeed).parameters()
    list(params)
    return attempt(deepspeed, params)


@check(here="refused", why=REFUSED)
def pairs_of_names_and_parameters(deepspeed, scratch):
    return attempt(deepspeed, layer(deepspeed).named_parameters())


@check(here="refused", why=REFUSED)
def text_by_mistake(deepspeed, scratch):
    return attempt(deepspeed, "weight")


@check()
def a_modifier_rank_that_does_not_exist(deepspeed, scratch):
    return attempt(deepspeed, layer(deepspeed).weight, modifier_rank=7)


@check()
def disabled(deepspeed, scratch):
    param = layer(deepspeed).weight
    with deepspeed.zero.GatheredParameters(param, enabled=False):
        return param.ds_status.name


@check()
def all_is_sharded_again(deepspeed, scratch):
    made = layer(deepspeed)
    with deepspeed.zero.GatheredParameters(made.parameters()):
        pass
    return [param.ds_status.name for param in made.parameters()]


@check()
def changes_with_a_modifier_rank(deepspeed, scratch):
    param = layer(deepspeed, 0.5).weight
    with deepspeed.zero.GatheredParameters(param, modifier_rank=0), torch.no_grad():
        param.fill_(2.0)
    return values(deepspeed, param)


@check()
def changes_through_data(deepspeed, scratch):
    param = layer(deepspeed, 0.5).weight
    with deepspeed.zero.GatheredParameters(param, modifier_rank=0):
        param.data.fill_(2.0)
    return values(deepspeed, param)


@check()
def new_data(deepspeed, scratch):
    param = layer(deepspeed, 0.5).weight
    with deepspeed.zero.GatheredParameters(param, modifier_rank=0):
        param.data = torch.full((2, 3), 3.0)
    return values(deepspeed, param)


@check(ranks=2)
def the_modifier_ranks_changes_count(deepspeed, scratch):
    param = layer(deepspeed, 0.5).weight
    with deepspeed.zero.GatheredParameters(param, modifier_rank=1), torch.no_grad():
        param.fill_(10.0 + rank())
    return values(deepspeed, param)


@check(ranks=2)
def only_the_modifier_rank_writes(deepspeed, scratch):
    made = layer(deepspeed, 0.5)
    with deepspeed.zero.GatheredParameters(made.parameters(), modifier_rank=0), torch.no_grad():
        if rank() == 0:
            made.weight.zero_()
            made.bias.fill_(4.0)
    return values(deepspeed, made.weight) + values(deepspeed, made.bias)


@check(here="refused", why="DeepSpeed loses them without a word unless it is told to look")
def changes_without_a_modifier_rank(deepspeed, scratch):
    param = layer(deepspeed, 0.5).weight

    def run():
        with deepspeed.zero.GatheredParameters(param), torch.no_grad():
            param.fill_(2.0)

    return outcome(run)


@check(here="refused", why="DeepSpeed loses them without a word unless it is told to look")
def changes_through_data_without_a_modifier_rank(deepspeed, scratch):
    param = layer(deepspeed, 0.5).weight

    def run():
        with deepspeed.zero.GatheredParameters(param):
            param.data.mul_(2.0)

    return outcome(run)


@check()
def lost_changes_are_not_kept(deepspeed, scratch):
    param = layer(deepspeed, 0.5).weight

    def run():
        with deepspeed.zero.GatheredParameters(param), torch.no_grad():
            param.fill_(2.0)

    outcome(run)
    return values(deepspeed, param)


@check()
def a_failing_block_shards_again(deepspeed, scratch):
    param = layer(deepspeed).weight

    def run():
        with deepspeed.zero.GatheredParameters(param):
            raise ZeroDivisionError

    return [outcome(run), param.ds_status.name]


@check(here="accepted", why="a reader within a reader changes nothing")
def contexts_over_one_parameter(deepspeed, scratch):
    param = layer(deepspeed).weight

    def run():
        with deepspeed.zero.GatheredParameters(param), deepspeed.zero.GatheredParameters(param):
            pass

    return outcome(run)


@check()
def a_writer_within_a_reader(deepspeed, scratch):
    param = layer(deepspeed).weight

    def run():
        with deepspeed.zero.GatheredParameters(param):  # noqa: SIM117
            with deepspeed.zero.GatheredParameters(param, modifier_rank=0):
                pass

    return outcome(run)


@check()
def contexts_over_two_parameters(deepspeed, scratch):
    made = layer(deepspeed, 0.5)
    with deepspeed.zero.GatheredParameters(made.weight), deepspeed.zero.GatheredParameters(made.bias):
        return [made.weight.ds_status.name, made.bias.ds_status.name]


def trained(deepspeed, model, config=None):
    engine, *_ = deepspeed.initialize(
        model=model,
        config=config or CONFIG,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
    )
    return engine


@check(
    here=[[0.9] * 6, [0.85] * 6],
    why="changes reach the masters here; DeepSpeed's next step goes on from the old ones",
)
def writing_between_steps(deepspeed, scratch):
    made = layer(deepspeed, 0.5)
    engine = trained(deepspeed, made, {**CONFIG, "gradient_clipping": 0.0})
    engine.backward(engine(torch.ones(2, 3)).sum() / 4)
    engine.step()
    with deepspeed.zero.GatheredParameters(made.weight, modifier_rank=0), torch.no_grad():
        made.weight.fill_(0.95)
    found = []
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 3)).sum() / 4)
        engine.step()
        found.append(values(deepspeed, made.weight))
    return found


class Reader(nn.Module):
    """Its forward reads a weight of a layer that it has called before."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3)
        with torch.no_grad():
            for number, param in enumerate(self.parameters()):
                param.copy_(torch.linspace(-1.0, 0.5 + number, param.numel()).view(param.shape))

    def forward(self, x):
        return (self.second(torch.tanh(self.first(x))) @ self.first.weight).mean()


def losses(engine, steps=3):
    found = []
    for _ in range(steps):
        loss = engine(torch.arange(6.0).view(2, 3) / 6)
        engine.backward(loss)
        engine.step()
        found.append(float(loss.detach()))
    return found


@check()
def registering_something_else(deepspeed, scratch):
    register = deepspeed.zero.register_external_parameter
    return [outcome(lambda: register(Reader(), "weight")), outcome(lambda: register(Reader(), torch.ones(2)))]


@check()
def unregistering(deepspeed, scratch):
    from deepspeed.runtime.zero.partition_parameters import unregister_external_parameter

    model = Reader()
    before = outcome(lambda: unregister_external_parameter(model, model.first.weight))
    deepspeed.zero.register_external_parameter(model, model.first.weight)
    return [before, outcome(lambda: unregister_external_parameter(model, model.first.weight))]


@check()
def reading_between_steps(deepspeed, scratch):
    made = layer(deepspeed, 0.5)
    engine = trained(deepspeed, made)
    engine.backward(engine(torch.ones(2, 3)).mean())
    engine.step()
    return values(deepspeed, made.weight)


@check(ranks=2)
def reading_between_steps_on_two_ranks(deepspeed, scratch):
    made = layer(deepspeed, 0.5)
    engine = trained(deepspeed, made)
    engine.backward(engine(torch.full((1, 3), 1.0 + rank())).mean())
    engine.step()
    return values(deepspeed, made.weight) + values(deepspeed, made.bias)


@check()
def the_engine_shows_its_parameters(deepspeed, scratch):
    made = layer(deepspeed)
    engine = trained(deepspeed, made)
    param = engine.module.weight
    return [hasattr(param, "ds_id"), list(param.ds_shape), param.ds_numel, param.ds_persist]


@check()
def small_parameters_persist(deepspeed, scratch):
    zero = {"stage": 3, "stage3_param_persistence_threshold": 4}
    made = nn.Linear(3, 2)
    trained(deepspeed, made, {**CONFIG, "zero_optimization": zero})
    return [made.weight.ds_persist, made.bias.ds_persist]


@check()
def below_stage_3_nothing_is_marked(deepspeed, scratch):
    made = nn.Linear(3, 2)
    trained(deepspeed, made, {**CONFIG, "zero_optimization": {"stage": 1}})
    return hasattr(made.weight, "ds_id")


@check()
def gathering_below_stage_3(deepspeed, scratch):
    made = nn.Linear(3, 2)
    with torch.no_grad():
        made.weight.fill_(0.5)
    trained(deepspeed, made, {**CONFIG, "zero_optimization": {"stage": 1}})
    return values(deepspeed, made.weight)


@check(ranks=2)
def a_read_of_another_layers_weight(deepspeed, scratch):
    return losses(trained(deepspeed, Reader(), {**CONFIG, "train_batch_size": 4}))


@check(ranks=2)
def a_registered_read(deepspeed, scratch):
    model = Reader()
    deepspeed.zero.register_external_parameter(model, model.first.weight)
    return losses(trained(deepspeed, model, {**CONFIG, "train_batch_size": 4}))


@check(
    ranks=2,
    here=[0.7709293365478516, 0.5462549328804016, 0.3312622606754303],
    why="it trains as without the gather; DeepSpeed cannot free what a module still uses",
)
def a_read_within_a_gather_of_the_forward(deepspeed, scratch):
    class Gathering(Reader):
        def forward(self, x):
            x = torch.tanh(self.first(x))
            with deepspeed.zero.GatheredParameters(self.first.weight, fwd_module=self):
                return (self.second(x) @ self.first.weight).mean()

    return losses(trained(deepspeed, Gathering(), {**CONFIG, "train_batch_size": 4}))


@check(ranks=2)
def whole_weights_for_generation(deepspeed, scratch):
    engine = trained(deepspeed, Reader(), {**CONFIG, "train_batch_size": 4})
    before = losses(engine, 1)
    with deepspeed.zero.unwrap_model_for_generation(engine) as unwrapped, torch.no_grad():
        status = [param.ds_status.name for param in unwrapped.module.parameters()]
        x = torch.arange(6.0).view(2, 3) / 6
        generated = [float(unwrapped.module(x)) for _ in range(2)]
    return [before, status, generated, losses(engine, 2)]


@check(
    ranks=2,
    here=[[0.7709293365478516, -2.25], [0.7709293365478516, 0.5462549328804016]],
    why="the weights stay whole until the context ends; DeepSpeed's forward frees them",
)
def a_forward_within_a_gather(deepspeed, scratch):
    engine = trained(deepspeed, Reader(), {**CONFIG, "train_batch_size": 4})
    x = torch.arange(6.0).view(2, 3) / 6
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())), torch.no_grad():
        found = [float(engine(x)), float(engine.module.first.weight.sum())]
    return [found, losses(engine, 2)]
