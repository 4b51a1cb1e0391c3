"""Weights, gradients and optimizer states of one parameter; leaf modules; states that go and come back."""

from __future__ import annotations

import importlib

import torch
from torch import nn

from tests.deepspeed.checks import check, outcome

EVERYWHERE = "it works at stage 0 too"
KEPT = "slices are those of buckets of several parameters, so that a rank may keep any number of elements"


def config(stage, **more):
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "betas": [0.9, 0.99], "weight_decay": 0.0}},
        **more,
    }


def rank():
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        with torch.no_grad():
            for number, param in enumerate(self.parameters()):
                param.copy_(torch.linspace(-1.0, 0.5 + number, param.numel()).view(param.shape))

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))).square().mean()


def batch():
    return torch.arange(6.0).view(2, 3) / 6 + rank()


def engine_of(deepspeed, stage, **more):
    model = Net()
    return deepspeed.initialize(
        model=model, config=config(stage, **more), model_parameters=model.parameters()
    )[0]


def steps(engine, count=1):
    losses = []
    for _ in range(count):
        loss = engine(batch())
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def plain(value):
    return None if value is None else value.detach().float().flatten().tolist()


def weights(deepspeed, stage):
    engine = engine_of(deepspeed, stage)
    steps(engine, 2)
    return {
        name: plain(deepspeed.utils.safe_get_full_fp32_param(param))
        for name, param in engine.module.named_parameters()
    }


@check()
def weights_at_stage_1(deepspeed, scratch):
    return weights(deepspeed, 1)


@check()
def weights_at_stage_3(deepspeed, scratch):
    return weights(deepspeed, 3)


@check(here=[True, [4, 3]], why=EVERYWHERE)
def weights_at_stage_0(deepspeed, scratch):
    engine = engine_of(deepspeed, 0)
    found = deepspeed.utils.safe_get_full_fp32_param(engine.module.first.weight)
    return [found is not None, None if found is None else list(found.shape)]


@check()
def weights_without_an_engine(deepspeed, scratch):
    return deepspeed.utils.safe_get_full_fp32_param(nn.Linear(2, 2).weight)


def gradients(deepspeed, stage, **more):
    engine = engine_of(deepspeed, stage, **more)
    engine.backward(engine(batch().to(next(engine.module.parameters()).dtype)))
    found = {
        name: plain(deepspeed.utils.safe_get_full_grad(param))
        for name, param in engine.module.named_parameters()
    }
    engine.step()
    return found


@check()
def gradients_at_stage_0(deepspeed, scratch):
    return gradients(deepspeed, 0)


@check()
def gradients_at_stage_1(deepspeed, scratch):
    return gradients(deepspeed, 1)


@check()
def gradients_at_stage_3(deepspeed, scratch):
    return gradients(deepspeed, 3)


@check(here="accepted", why="it gives None; DeepSpeed fails on a dictionary that is not there yet")
def gradients_before_a_backward(deepspeed, scratch):
    engine = engine_of(deepspeed, 1)
    return outcome(lambda: plain(deepspeed.utils.safe_get_full_grad(engine.module.first.bias)))


@check()
def gradients_without_an_engine(deepspeed, scratch):
    return deepspeed.utils.safe_get_full_grad(nn.Linear(2, 2).weight)


def moments(deepspeed, stage):
    engine = engine_of(deepspeed, stage)
    steps(engine, 2)
    read = deepspeed.utils.safe_get_full_optimizer_state
    return {key: plain(read(engine.module.first.weight, key)) for key in ("exp_avg", "exp_avg_sq")}


@check()
def moments_at_stage_1(deepspeed, scratch):
    return moments(deepspeed, 1)


@check()
def moments_at_stage_3(deepspeed, scratch):
    return moments(deepspeed, 3)


@check()
def a_moment_that_does_not_exist(deepspeed, scratch):
    engine = engine_of(deepspeed, 3)
    steps(engine)
    return outcome(
        lambda: deepspeed.utils.safe_get_full_optimizer_state(
            engine.module.first.weight, "momentum_of_inertia"
        )
    )


def after_setting(deepspeed, stage, key=None):
    engine = engine_of(deepspeed, stage)
    steps(engine)
    param, value = engine.module.second.weight, torch.arange(8.0).view(2, 4) / 8
    if key is None:
        deepspeed.utils.safe_set_full_fp32_param(param, value)
        found = deepspeed.utils.safe_get_full_fp32_param(param)
    else:
        deepspeed.utils.safe_set_full_optimizer_state(param, value, key)
        found = deepspeed.utils.safe_get_full_optimizer_state(param, key)
    return plain(found)


def after_setting_gradients(deepspeed, stage, vectorized=False):
    engine = engine_of(deepspeed, stage)
    engine.backward(engine(batch()))
    params = list(engine.module.parameters())
    if vectorized:
        deepspeed.utils.safe_update_full_grad_vectorized(params, lambda grad, param: grad * 0 + 0.5)
    else:
        for param in params:
            shape = tuple(getattr(param, "ds_shape", param.shape))
            deepspeed.utils.safe_set_full_grad(param, torch.full(shape, 0.5))
    found = plain(deepspeed.utils.safe_get_full_grad(params[0]))
    engine.step()
    return [found, plain(deepspeed.utils.safe_get_full_fp32_param(params[0]))]


@check()
def setting_gradients_at_stage_3(deepspeed, scratch):
    return after_setting_gradients(deepspeed, 3)


@check()
def own_weights_on_one_rank(deepspeed, scratch):
    engine = engine_of(deepspeed, 3)
    return plain(deepspeed.utils.safe_get_local_fp32_param(engine.module.first.weight))


@check()
def own_slices_below_stage_3(deepspeed, scratch):
    engine = engine_of(deepspeed, 1)
    return outcome(lambda: deepspeed.utils.safe_get_local_fp32_param(engine.module.first.weight))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x):
        return self.parts[rank() % 2](x)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.experts = nn.Linear(3, 3), Experts()
        with torch.no_grad():
            for number, param in enumerate(self.parameters()):
                param.copy_(torch.linspace(-0.5, 0.25 + number / 4, param.numel()).view(param.shape))

    def forward(self, x):
        return self.experts(torch.tanh(self.head(x))).square().mean()


def flagged(model, leaves):
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(module)] for module in leaves]


@check()
def leaves_by_class(deepspeed, scratch):
    model = Mixture()
    found = deepspeed.utils.set_z3_leaf_modules(model, [Experts])
    return [flagged(model, found), flagged(model, deepspeed.utils.get_z3_leaf_modules(model))]


@check()
def leaves_by_name_of_the_class(deepspeed, scratch):
    model = Mixture()
    full = f"{Experts.__module__}.{Experts.__qualname__}"
    leaves = deepspeed.utils.set_z3_leaf_modules
    return [flagged(model, leaves(model, ["Experts"])), flagged(model, leaves(model, [full]))]


@check()
def leaves_in_order(deepspeed, scratch):
    model = Mixture()
    return flagged(model, deepspeed.utils.set_z3_leaf_modules(model, [nn.Linear]))


@check()
def leaves_taken_back(deepspeed, scratch):
    model = Mixture()
    deepspeed.utils.set_z3_leaf_modules(model, [Experts])
    deepspeed.utils.unset_z3_leaf_modules(model, [Experts])
    return deepspeed.utils.get_z3_leaf_modules(model)


@check()
def a_class_without_modules(deepspeed, scratch):
    model, leaves = Mixture(), deepspeed.utils.set_z3_leaf_modules
    return [
        outcome(lambda: leaves(model, [nn.Conv1d])),
        leaves(model, [nn.Conv1d], raise_if_not_found=False),
        outcome(lambda: leaves(model, [3])),
    ]


@check()
def leaves_by_name_and_by_suffix(deepspeed, scratch):
    from deepspeed.utils import set_z3_leaf_modules_by_name, set_z3_leaf_modules_by_suffix

    model = Mixture()
    by_name = set_z3_leaf_modules_by_name(model, ["experts", "nothing"], raise_if_not_found=False)
    by_suffix = set_z3_leaf_modules_by_suffix(model, ["parts.1"])
    return [
        flagged(model, by_name[0]),
        by_name[1],
        flagged(model, by_suffix[0]),
        by_suffix[1],
        outcome(lambda: set_z3_leaf_modules_by_name(model, ["nothing"])),
    ]


@check()
def one_leaf(deepspeed, scratch):
    model = Mixture()
    deepspeed.utils.set_z3_leaf_module(model.head, True)
    return [deepspeed.utils.z3_leaf_module(model.head), deepspeed.utils.z3_leaf_module(model.experts)]


@check()
def parameters_of_leaves(deepspeed, scratch):
    model = Mixture()
    deepspeed.utils.set_z3_leaf_modules(model, [Experts])
    deepspeed.initialize(model=model, config=config(3), model_parameters=model.parameters())
    return [deepspeed.utils.z3_leaf_parameter(p) for p in (model.head.weight, model.experts.parts[0].weight)]


@check()
def states_go_and_come_back(deepspeed, scratch):
    engine = engine_of(deepspeed, 3)
    losses = steps(engine, 2)
    engine.offload_states()
    engine.reload_states()
    return losses + steps(engine, 2)


@check()
def states_go_to_a_disk(deepspeed, scratch):
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

    engine = engine_of(deepspeed, 3)
    return outcome(lambda: engine.offload_states(device=OffloadDeviceEnum.nvme))


@check()
def kinds_of_states_and_devices(deepspeed, scratch):
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum

    return [[k.value for k in OffloadStateTypeEnum], [d.value for d in OffloadDeviceEnum]]


@check(
    here=[[14.257881164550781], ["AVAILABLE"] * 4, [13.738691329956055]],
    why="a single rank keeps all weights, so that none are gathered and none are freed",
)
def the_cache_of_gathered_weights(deepspeed, scratch):
    engine = engine_of(deepspeed, 3)
    losses = steps(engine)
    engine.empty_partition_cache()
    return [losses, [p.ds_status.name for p in engine.module.parameters()], steps(engine)]


@check(ranks=2)
def weights_at_stage_1_of_two_ranks(deepspeed, scratch):
    return weights(deepspeed, 1)


@check(ranks=2)
def weights_at_stage_2_of_two_ranks(deepspeed, scratch):
    return weights(deepspeed, 2)


@check(ranks=2)
def weights_at_stage_3_of_two_ranks(deepspeed, scratch):
    return weights(deepspeed, 3)


@check(ranks=2)
def weights_in_bf16(deepspeed, scratch):
    engine = engine_of(deepspeed, 3, bf16={"enabled": True})
    found = deepspeed.utils.safe_get_full_fp32_param(engine.module.first.weight)
    return [str(found.dtype), plain(found)]


@check(ranks=2)
def gradients_at_stage_1_of_two_ranks(deepspeed, scratch):
    return gradients(deepspeed, 1)


@check(ranks=2)
def gradients_at_stage_2_of_two_ranks(deepspeed, scratch):
    return gradients(deepspeed, 2)


@check(ranks=2)
def gradients_at_stage_3_of_two_ranks(deepspeed, scratch):
    return gradients(deepspeed, 3)


@check(ranks=2, tolerance=0.02)
def gradients_in_bf16(deepspeed, scratch):
    return gradients(deepspeed, 3, bf16={"enabled": True})


@check(ranks=2)
def gradients_of_two_micro_batches(deepspeed, scratch):
    engine = engine_of(deepspeed, 2, gradient_accumulation_steps=2)
    engine.backward(engine(batch()))
    engine.step()
    engine.backward(engine(batch() + 1))
    return plain(deepspeed.utils.safe_get_full_grad(engine.module.first.bias))


@check(ranks=2, tolerance=2e-6)
def moments_at_stage_2_of_two_ranks(deepspeed, scratch):
    return moments(deepspeed, 2)


@check(ranks=2, tolerance=2e-6)
def moments_at_stage_3_of_two_ranks(deepspeed, scratch):
    return moments(deepspeed, 3)


@check(ranks=2)
def setting_weights_at_stage_1(deepspeed, scratch):
    return after_setting(deepspeed, 1)


@check(ranks=2)
def setting_weights_at_stage_3(deepspeed, scratch):
    return after_setting(deepspeed, 3)


@check(ranks=2)
def setting_a_moment_at_stage_2(deepspeed, scratch):
    return after_setting(deepspeed, 2, "exp_avg_sq")


@check(ranks=2)
def setting_a_moment_at_stage_3(deepspeed, scratch):
    return after_setting(deepspeed, 3, "exp_avg")


@check(
    ranks=2,
    here=[0.509557843208313, 0.4477398693561554],
    why="the next forward reads the new weights; DeepSpeed's reads the old ones until the step",
)
def a_step_after_setting_weights(deepspeed, scratch):
    engine = engine_of(deepspeed, 3)
    for param in engine.module.parameters():
        deepspeed.utils.safe_set_full_fp32_param(param, torch.full(tuple(param.ds_shape), 0.25))
    losses = steps(engine, 3)
    return losses[1:] if losses else losses


@check(ranks=2)
def setting_gradients_at_stage_3_of_two_ranks(deepspeed, scratch):
    return after_setting_gradients(deepspeed, 3)


@check(ranks=2)
def setting_gradients_at_stage_2_of_two_ranks(deepspeed, scratch):
    return after_setting_gradients(deepspeed, 2)


@check(ranks=2)
def updating_gradients_together_at_stage_3(deepspeed, scratch):
    return after_setting_gradients(deepspeed, 3, vectorized=True)


@check(ranks=2)
def updating_gradients_together_at_stage_1(deepspeed, scratch):
    return after_setting_gradients(deepspeed, 1, vectorized=True)


@check(ranks=2)
def own_slices_of_all_ranks_make_the_whole(deepspeed, scratch):
    engine = engine_of(deepspeed, 3)
    total = torch.zeros(1)
    for param in engine.module.parameters():
        total += deepspeed.utils.safe_get_local_fp32_param(param).sum()
    torch.distributed.all_reduce(total)
    return float(total)


@check(ranks=2)
def setting_own_slices(deepspeed, scratch):
    engine = engine_of(deepspeed, 3)
    for param in engine.module.parameters():
        mine = deepspeed.utils.safe_get_local_fp32_param(param)
        deepspeed.utils.safe_set_local_fp32_param(param, torch.full_like(mine, 0.125))
    return plain(deepspeed.utils.safe_get_full_fp32_param(engine.module.first.weight))


@check(ranks=2)
def setting_own_moments(deepspeed, scratch):
    engine = engine_of(deepspeed, 3)
    steps(engine)
    for param in engine.module.parameters():
        mine = deepspeed.utils.safe_get_local_optimizer_state(param, "exp_avg")
        deepspeed.utils.safe_set_local_optimizer_state(param, torch.full_like(mine, 0.125), "exp_avg")
    return plain(deepspeed.utils.safe_get_full_optimizer_state(engine.module.first.weight, "exp_avg"))


@check(ranks=2)
def setting_own_gradients(deepspeed, scratch):
    engine = engine_of(deepspeed, 3)
    engine.backward(engine(batch()))
    for param in engine.module.parameters():
        mine = deepspeed.utils.safe_get_local_grad(param)
        deepspeed.utils.safe_set_local_grad(param, torch.full_like(mine, 0.125))
    return plain(deepspeed.utils.safe_get_full_grad(engine.module.first.weight))


@check()
def the_other_place_of_the_names(deepspeed, scratch):
    tensor_fragment = importlib.import_module("deepspeed.utils.tensor_fragment")

    names = "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_set_full_grad"
    return [getattr(tensor_fragment, name) is getattr(deepspeed.utils, name) for name in names.split()]


@check(ranks=2)
def ranks_that_run_different_experts_of_a_leaf(deepspeed, scratch):
    model = Mixture()
    deepspeed.utils.set_z3_leaf_modules(model, [Experts])
    engine, *_ = deepspeed.initialize(model=model, config=config(3), model_parameters=model.parameters())
    losses = steps(engine, 3)
    found = [plain(deepspeed.utils.safe_get_full_fp32_param(part.bias)) for part in model.experts.parts]
    return [losses, found]


@check(ranks=2)
def some_states_go_and_come_back(deepspeed, scratch):
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum

    engine = engine_of(deepspeed, 3)
    losses = steps(engine, 2)
    kinds = [OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params]
    engine.offload_states(include=kinds, device=OffloadDeviceEnum.cpu, pin_memory=False, non_blocking=False)
    engine.reload_states(non_blocking=True)
    return losses + steps(engine, 2)


@check(ranks=2)
def states_go_at_stage_2(deepspeed, scratch):
    engine = engine_of(deepspeed, 2)
    losses = steps(engine, 2)
    engine.offload_states(pin_memory=False)
    engine.reload_states()
    return losses + steps(engine, 2)
