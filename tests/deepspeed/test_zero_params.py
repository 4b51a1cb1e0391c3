"""What a script does with parameters of stage 3: builds, reads, sets, and takes them away for a while."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megazero.deepspeed.initialize import initialize
from megazero.deepspeed.zero.fragments import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_update_full_grad_vectorized,
)
from megazero.deepspeed.zero.gathered import GatheredParameters, unwrap_model_for_generation
from megazero.deepspeed.zero.init import Init
from megazero.deepspeed.zero.leaf_modules import apply_leaf_settings, get_z3_leaf_modules, set_z3_leaf_modules
from megazero.deepspeed.zero.parameter import ZeroParamStatus
from megazero.deepspeed.zero.partition import ShardedParameter, partition_of
from megazero.errors import CommunicationError, ConfigError, MegazeroError
from megazero.mpu.context import ParallelContext, solo_context
from tests.deepspeed.user_models import ADAMW, WIDTH, Tied, batch, build, on_ranks, settings, start
from tests.forks import ROOT, run_ranks


def whole(param: nn.Parameter) -> torch.Tensor:
    with GatheredParameters(param):
        return param.detach().clone()


# Constructors


class Rewritten(nn.Module):
    """Writes to its layers after it has registered them: by torch's init, through `data`, and to a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(6))
        self.embedding = nn.Embedding(5, 3)
        for number, layer in enumerate(self.layers):
            nn.init.constant_(layer.weight, number)
            layer.bias.data.fill_(-number)
        nn.init.ones_(self.embedding.weight)
        with torch.no_grad():
            self.embedding.weight[2].zero_()
            self.layers[0].weight.copy_(self.layers[1].weight + self.layers[2].weight)
        self.seen = float(self.layers[5].weight.detach().sum())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_constructor_may_go_on_writing_to_its_layers(ranks):
    def work(context: ParallelContext):
        with Init(mpu=context):
            model = Rewritten()
        assert all(type(param) is ShardedParameter for param in model.parameters())
        return model.seen, {name: whole(param) for name, param in model.named_parameters()}

    expected = Rewritten()
    for seen, weights in on_ranks(ranks, work):
        assert seen == expected.seen
        for name, param in expected.named_parameters():
            assert torch.equal(weights[name], param), name


def test_the_first_ranks_writes_count():
    def work(context: ParallelContext):
        with Init(mpu=context):
            model = nn.Sequential(nn.Linear(2, 2))
            model[0].weight.data.fill_(float(context.rank + 5))
        return whole(model[0].weight).unique().tolist()

    assert on_ranks(2, work) == [[5.0], [5.0]]


def test_no_more_than_a_few_layers_are_whole_while_a_constructor_writes():
    def work(context: ParallelContext):
        most = 0

        class Deep(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                nonlocal most
                self.layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(9))
                for layer in self.layers:
                    nn.init.zeros_(layer.weight)
                    opened = [p.ds_status is ZeroParamStatus.AVAILABLE for p in self.parameters()]
                    most = max(most, sum(opened))

        with Init(mpu=context):
            model = Deep()
        return most, [p.ds_status for p in model.parameters()]

    for most, after in on_ranks(2, work):
        assert most == 4
        assert set(after) == {ZeroParamStatus.NOT_AVAILABLE}


def test_types_that_a_constructor_changes_stay_changed():
    with Init(mpu=solo_context()):
        model = nn.Sequential(nn.Linear(2, 2)).to(torch.bfloat16)
    assert whole(model[0].weight).dtype == torch.bfloat16


def test_what_has_no_values_yet_is_sharded_once_it_has():
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.device("meta"):
                self.inner = nn.Sequential(nn.Linear(2, 2))
            self.inner.to_empty(device="cpu")
            self.lazy = nn.LazyLinear(3)

    with Init(mpu=solo_context()):
        model = Late()
    assert all(map(partition_of, model.inner.parameters()))
    assert partition_of(model.lazy.weight) is None


def test_slices_can_wait_on_the_host_and_be_of_a_group():
    context = solo_context()
    with Init(mpu=context, remote_device="cpu", data_parallel_group=context.world):
        layer = nn.Linear(2, 2)
    assert layer.weight.ds_tensor.device.type == "cpu"
    with pytest.raises(ConfigError, match="`remote_device` must be none, cpu or nvme, but is moon"):
        Init(mpu=context, remote_device="moon")
    with pytest.raises(ConfigError, match="`data_parallel_group` must be given alone"):
        Init(mpu=context, data_parallel_group=context.world, sequence_data_parallel_group=context.world)
    with pytest.warns(UserWarning, match="makes nothing of zero_quantized_weights"):
        Init(mpu=context, zero_quantized_weights=True)


def test_sharded_weights_compare_by_their_values():
    """transformers ties a head to its embedding if both are in a file and equal."""

    def work(context: ParallelContext):
        with Init(mpu=context):
            layers = [nn.Linear(2, 3) for _ in range(3)]
        with GatheredParameters([layer.weight for layer in layers], modifier_rank=0):
            for number, layer in enumerate(layers):
                layer.weight.fill_(1.0)
                layer.weight[2, 1] += number // 2  # in the last rank's slice
        return [torch.equal(layers[0].weight, layer.weight) for layer in layers[1:]]

    assert on_ranks(2, work) == [[True, False]] * 2


# Reading and writing


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("offload", [False, True])
def test_fragments_are_those_of_plain_torch(stage, ranks, offload):
    if offload and stage == 0:
        pytest.skip("nothing is offloaded at stage 0")
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}

    def work(context: ParallelContext):
        config = settings(stage, optimizer=ADAMW, zero_optimization=zero, gradient_clipping=0.0)
        engine = start(context, build(Tied), config)
        up, bias = engine.module.up.weight, engine.module.up.bias
        assert safe_get_full_grad(up) is None
        engine.backward(engine(*batch(0, 0, context.data.rank)))
        gradient = safe_get_full_grad(up)
        safe_set_full_grad(bias, torch.ones(bias.shape))
        safe_update_full_grad_vectorized([bias, engine.module.frozen.bias], lambda grad, param: grad * 3)
        engine.step()
        assert safe_get_full_grad(up) is None
        frozen = engine.module.frozen.weight
        assert safe_get_full_grad(frozen) is safe_get_full_fp32_param(frozen) is None
        assert safe_get_full_optimizer_state(frozen, "exp_avg") is None
        moment = safe_get_full_optimizer_state(bias, "exp_avg")
        safe_set_full_optimizer_state(bias, torch.full(bias.shape, 7.0), "exp_avg_sq")
        safe_set_full_fp32_param(bias, torch.full(bias.shape, 2.0))
        with GatheredParameters(bias):
            seen = bias.detach().unique().tolist()
        found = [
            gradient,
            safe_get_full_fp32_param(up),
            moment,
            safe_get_full_optimizer_state(bias, "exp_avg_sq"),
        ]
        return found, seen

    model = build(Tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for rank in range(ranks):
        (model(*batch(0, 0, rank)) / ranks).backward()
    expected = [
        model.up.weight.grad.clone(),
        None,
        torch.full((2 * WIDTH,), 0.3),
        torch.full((2 * WIDTH,), 7.0),
    ]
    optimizer.step()
    expected[1] = model.up.weight.detach()
    for found, seen in on_ranks(ranks, work):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert seen == [2.0]


def test_own_slices_make_the_whole():
    def work(context: ParallelContext):
        engine = start(context, build(Tied), settings(3, optimizer=ADAMW))
        total = torch.zeros(())
        for param in engine.module.parameters():
            mine = safe_get_local_fp32_param(param)
            assert (mine is None) == (not param.requires_grad)
            if mine is not None:
                total += mine.numel()
                safe_set_local_fp32_param(param, torch.full_like(mine, 0.5))
        context.data.all_reduce(total).wait()
        with pytest.raises(ConfigError, match=r"`value` must have the elements that this rank keeps"):
            safe_set_local_fp32_param(engine.module.scale, torch.ones(100))
        return int(total), safe_get_full_fp32_param(engine.module.up.weight).unique().tolist()

    expected = sum(param.numel() for param in Tied().parameters() if param.requires_grad)
    assert on_ranks(2, work) == [(expected, [0.5])] * 2


def test_fragments_say_what_is_wrong():
    engine = start(solo_context(), build(Tied), settings(1, optimizer=ADAMW))
    weight = engine.module.up.weight
    with pytest.raises(
        ConfigError, match="`optim_state_key` must be one of exp_avg, exp_avg_sq, but is momentum"
    ):
        safe_get_full_optimizer_state(weight, "momentum")
    with pytest.raises(ConfigError, match="`param` must be sharded by ZeRO stage 3 here"):
        safe_get_local_fp32_param(weight)
    with pytest.raises(ConfigError, match=r"`value` must have the parameter's shape \[16, 8\]"):
        safe_set_full_fp32_param(weight, torch.ones(3))
    with pytest.raises(ConfigError, match="`param` must have a gradient to set"):
        safe_set_full_grad(weight, torch.ones(16, 8))
    with pytest.raises(ConfigError, match="`param` must be a parameter of an engine"):
        safe_set_full_fp32_param(nn.Linear(2, 2).weight, torch.ones(2, 2))


def take_hooks_off(engine) -> None:
    """Clear what is in use and remove the hooks, as libraries that generate between steps do at stage 3."""
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    own, external = offload.module.named_parameters(recurse=True), offload.module.ds_external_parameters()
    for _, param in [*own, *external]:
        param.ds_active_sub_modules.clear()
    for hook in (*offload.forward_hooks, *offload.backward_hooks):
        hook.remove()
    offload.forward_hooks, offload.backward_hooks = [], []


def put_hooks_back(engine) -> None:
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    offload._register_deepspeed_module(offload.module)


def test_hooks_may_be_taken_off_around_generation():
    """Forwards of the module itself in between, in training and in an engine that only evaluates."""

    def work(context: ParallelContext):
        engine = start(context, build(Tied), settings(3, optimizer=ADAMW))
        judge = start(context, build(Tied), settings(3), model_parameters=[])
        for step in range(2):
            seen = []
            for served in (engine, judge):
                with GatheredParameters(served.parameters()):
                    take_hooks_off(served)
                    with torch.no_grad():
                        seen += [float(served.module(*batch(9, micro, 0))) for micro in range(2)]
                    put_hooks_back(served)
            loss = engine(*batch(step, 0, context.data.rank))
            engine.backward(loss)
            engine.step()
        judge.optimizer.empty_partition_cache()
        module, weights = engine.module, engine.module_state_dict()
        engine.destroy()
        assert not hasattr(module, "ds_external_parameters")
        return seen[-2:], weights

    def plain(context: ParallelContext):
        engine = start(context, build(Tied), settings(3, optimizer=ADAMW))
        for step in range(2):
            engine.backward(engine(*batch(step, 0, context.data.rank)))
            engine.step()
        return engine.module_state_dict()

    model, expected = build(Tied), on_ranks(2, plain)[0]
    for seen, weights in on_ranks(2, work):
        assert seen == pytest.approx([float(model(*batch(9, micro, 0))) for micro in range(2)], rel=1e-6)
        assert all(torch.equal(weights[name], value) for name, value in expected.items())


def test_a_forward_within_a_gather_keeps_what_was_gathered():
    """Each layer's end used to free its weights, which then read as NaN within the context."""

    def work(context: ParallelContext):
        engine = start(context, build(Tied), settings(3, optimizer=ADAMW))
        with unwrap_model_for_generation(engine) as model, torch.no_grad():
            losses = [float(model(*batch(0, 0, 0))) for _ in range(2)]
            assert not any(param.isnan().any() for param in model.parameters())
        assert engine.module.up.weight.isnan().all()
        return losses

    with torch.no_grad():
        expected = float(build(Tied)(*batch(0, 0, 0)))
    for losses in on_ranks(2, work):
        assert losses == pytest.approx([expected] * 2, rel=1e-5)


def test_changes_that_would_be_lost_are_reported_on_all_ranks():
    def work(context: ParallelContext):
        with Init(mpu=context):
            model = nn.Sequential(nn.Linear(4, 4))
        with (
            pytest.raises(MegazeroError, match="`modifier_rank` must be given where a sharded parameter"),
            GatheredParameters(model.parameters()),
        ):
            model[0].weight.data[-1, -1] += 9.0 * context.rank  # in the slice that rank 1 keeps
        return bool((whole(model[0].weight) > 8.0).any())

    assert on_ranks(2, work) == [False, False]


# Different layers on different ranks


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x, choice):
        return self.experts[choice](x)


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(WIDTH, WIDTH), Chooses()

    def forward(self, x, choice):
        return self.block(torch.tanh(self.first(x)), choice).square().mean()


def inputs(rank: int) -> torch.Tensor:
    return torch.linspace(-1, 1 + rank, 2 * WIDTH).view(2, WIDTH)


def test_ranks_that_run_different_layers_are_named():
    """The layers are of one size, so each rank got weights made of both, and nobody noticed."""

    def work(context: ParallelContext):
        engine = start(context, build(Routed), settings(3, optimizer=ADAMW))
        loss = engine(inputs(context.rank), context.rank)
        with pytest.raises(
            CommunicationError, match=r"`block.experts.0.\w+` on rank 0, `block.experts.1.\w+` on"
        ):
            engine.backward(loss)
        engine.eval()
        with torch.no_grad(), pytest.raises(CommunicationError, match="set_z3_leaf_modules"):
            engine(inputs(0), context.rank)

    on_ranks(2, work)


@pytest.mark.parametrize("phase", ["backward", "evaluation"])
def test_processes_that_run_different_layers_end_with_an_error(phase):
    """Threads notice at once when one has ended; processes would wait for each other (trap 47)."""
    program = ROOT / "tests/deepspeed/programs/different_layers.py"
    for rank in run_ranks(*[["-m", "megazero.deepspeed", program, phase]] * 2):
        assert rank.returncode == 1, (rank.returncode, rank.stdout, rank.stderr)
        assert "gathered nothing more on rank 0, `layers.1.weight` on rank 1" in rank.stderr


def test_ranks_may_run_different_parts_of_a_leaf():
    def work(context: ParallelContext):
        model = build(Routed)
        assert set_z3_leaf_modules(model, [Chooses]) == [model.block]
        engine = start(context, model, settings(3, optimizer=ADAMW, gradient_clipping=0.0))
        losses = []
        for step in range(3):
            loss = engine(inputs(context.rank), (context.rank + step) % 2)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        return losses

    model = build(Routed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    expected: list[list[float]] = [[], []]
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        for rank in range(2):
            loss = model(inputs(rank), (rank + step) % 2)
            (loss / 2).backward()
            expected[rank].append(loss.item())
        optimizer.step()
    for found, wanted in zip(on_ranks(2, work), expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-4)


def test_leaves_of_a_configuration():
    model = Routed()
    assert apply_leaf_settings(model) == []
    assert apply_leaf_settings(model, {"classes": "Chooses", "name_suffixes": ["experts.1"]}) == [
        model.block,
        model.block.experts[1],
    ]
    assert get_z3_leaf_modules(model) == [model.block, model.block.experts[1]]
    absent = {"classes": ["a.Sparse"], "names": ["nowhere", "block"], "name_suffixes": ["experts.9"]}
    with pytest.warns(UserWarning, match=r"nothing for a\.Sparse, nowhere, experts\.9, which Routed lacks"):
        assert apply_leaf_settings(model, absent) == [model.block]
    with pytest.raises(ConfigError, match="but has suffixes"):
        apply_leaf_settings(model, {"suffixes": ["x"]})


# States that go and come back


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_states_go_to_the_host_and_come_back(stage):
    def work(context: ParallelContext):
        engine = start(context, build(Tied), settings(stage, optimizer=ADAMW, bf16={"enabled": True}))
        run = lambda step: engine(*batch(step, 0, context.rank))  # noqa: E731
        engine.backward(run(0))
        engine.step()
        before = {name: value.clone() for name, value in engine.module_state_dict().items()}
        engine.offload_states(include=["optim_states", "hp_params"])
        held = engine.states.parallel.offloaded.nbytes
        float(run(1).detach())  # the weights are still there
        with pytest.raises(
            MegazeroError, match=r"hp_params, optim_states are offloaded; call `engine.reload"
        ):
            safe_get_full_fp32_param(engine.module.scale)
        engine.offload_states()
        assert engine.states.parallel.offloaded.nbytes > held
        for _ in range(2):
            with pytest.raises(MegazeroError, match=r"call `engine.reload_states\(\)` first"):
                run(1)
        engine.reload_states()
        engine.reload_states()
        after = engine.module_state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        engine.backward(run(1))
        engine.step()
        return float(safe_get_full_fp32_param(engine.module.up.weight).double().sum())

    def plainly(context: ParallelContext):
        engine = start(context, build(Tied), settings(stage, optimizer=ADAMW, bf16={"enabled": True}))
        for step in range(2):
            engine.backward(engine(*batch(step, 0, context.rank)))
            engine.step()
        return float(safe_get_full_fp32_param(engine.module.up.weight).double().sum())

    assert on_ranks(2, work) == on_ranks(2, plainly)


def test_states_cannot_go_anywhere():
    engine = start(solo_context(), build(Tied), settings(1, optimizer=ADAMW))
    with pytest.raises(ConfigError, match="`device` must be cpu, but is nvme"):
        engine.offload_states(device="nvme")
    with pytest.raises(ConfigError, match="`include` must be one of optim_states, hp_params"):
        engine.offload_states(include=["everything"])
    with pytest.warns(UserWarning, match="moves nothing"):
        engine.offload_states(device="none")


def test_kept_weights_can_be_freed():
    def work(context: ParallelContext):
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
        engine = start(context, build(Tied), settings(3, optimizer=ADAMW, zero_optimization=zero))
        loss = engine(*batch(0, 0, 0))
        kept = engine.module.up.weight.ds_status.name
        engine.empty_partition_cache()
        freed = engine.module.up.weight.ds_status.name
        engine.backward(loss)
        engine.step()
        return kept, freed

    assert on_ranks(2, work) == [("AVAILABLE", "NOT_AVAILABLE")] * 2


def test_a_script_of_the_tutorial_runs():
    """docs/deepspeed/zero.md"""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.up = nn.Embedding(7, 4), nn.Linear(4, 4)

        def forward(self, tokens):
            return F.linear(self.up(self.embedding(tokens)), self.embedding.weight).logsumexp(-1).mean()

    config = {
        "train_batch_size": 2,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
    }
    with Init(config_dict_or_path=config, mpu=solo_context()):
        model = Model()
    with GatheredParameters(model.embedding.weight, modifier_rank=0):
        model.embedding.weight.normal_()
    engine, *_ = initialize(model=model, config=config, mpu=solo_context())
    engine.backward(engine(torch.arange(4).view(2, 2)))
    weight = model.up.weight
    assert safe_get_full_grad(weight).shape == weight.shape
    engine.step()
    assert safe_get_full_optimizer_state(weight, "exp_avg").shape == weight.shape
    engine.offload_states()
    engine.reload_states()
