# ruff: noqa: F403, F405
"""Checks of `fragments` that DeepSpeed has not answered yet: move them there, then record the area."""

from tests.deepspeed.checks.fragments import *


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


@check(ranks=2)
def moments_at_stage_2_of_two_ranks(deepspeed, scratch):
    return moments(deepspeed, 2)


@check(ranks=2)
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


@check(ranks=2)
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
