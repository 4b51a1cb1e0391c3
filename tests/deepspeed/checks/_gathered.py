# ruff: noqa: F403, F405
"""Checks of `gathered` that DeepSpeed has not answered yet: move them there, then record the area."""

from tests.deepspeed.checks.gathered import *


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


@check(ranks=2)
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


@check(ranks=2)
def a_forward_within_a_gather(deepspeed, scratch):
    engine = trained(deepspeed, Reader(), {**CONFIG, "train_batch_size": 4})
    x = torch.arange(6.0).view(2, 3) / 6
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())), torch.no_grad():
        found = [float(engine(x)), float(engine.module.first.weight.sum())]
    return [found, losses(engine, 2)]
