"""`megazero.initialize`: any module trains as in plain torch, on any number of ranks, at any stage."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
from functools import partial

import pytest
import torch
from torch import nn

import megazero
from megazero.deepspeed.optimizers.fused import FusedLamb, FusedLion
from megazero.mpu.context import ParallelContext, solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from tests.deepspeed.user_models import (
    ADAMW,
    MICRO,
    WIDTH,
    Encoder,
    Tied,
    assert_same,
    batch,
    build,
    on_ranks,
    settings,
    start,
    train_engine,
    train_plain,
)
from tests.tables import over_table


def adamw(model: nn.Module, **options) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, **options)


@pytest.mark.fast
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_trains_as_plain_torch(stage, ranks, accumulation):
    def work(context: ParallelContext):
        engine = start(context, build(Tied), settings(stage, accumulation, optimizer=ADAMW))
        return train_engine(engine, context, range(5))

    model = build(Tied)
    expected = train_plain(model, adamw(model), ranks=ranks, accumulation=accumulation)
    for record in on_ranks(ranks, work):
        assert_same(record, expected)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_json_of_type_lamb_trains_as_whole_tensors_would(stage, ranks):
    told = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1, "max_coeff": 2.0, "min_coeff": 0.1}
    optimizer = {"type": "Lamb", "params": {**told, "betas": [0.8, 0.95], "bias_correction": True}}

    def work(context: ParallelContext):
        engine = start(context, build(Tied), settings(stage, 2, optimizer=optimizer))
        return train_engine(engine, context, range(4))

    model = build(Tied)
    plain = FusedLamb((p for p in model.parameters() if p.requires_grad), betas=(0.8, 0.95), **told)
    expected = train_plain(model, plain, ranks=ranks, accumulation=2, steps=4)
    for record in on_ranks(ranks, work):
        assert_same(record, expected)


@pytest.mark.parametrize("live", [0, 10**9])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_transformer_of_torch_trains(stage, live):
    # The gradient of a bias of keys is rounding alone, which a small eps would blow up.
    optimizer = {"type": "AdamW", "params": {**ADAMW["params"], "eps": 1e-3}}

    def work(context: ParallelContext):
        config = settings(stage, 2, optimizer=optimizer)
        config["zero_optimization"]["stage3_max_live_parameters"] = live
        return train_engine(start(context, build(Encoder), config), context, range(3))

    model = build(Encoder)
    expected = train_plain(model, adamw(model, eps=1e-3), ranks=2, accumulation=2, steps=3)
    expected.weights["seen"] /= 2  # one process saw the batches of both
    assert_same(on_ranks(2, work)[0], expected)


def groups_of(model: nn.Module) -> list[dict]:
    plain = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    small = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    return [{"params": plain, "weight_decay": 0.2}, {"params": small, "lr": 3e-3, "weight_decay": 0.0}]


OPTIMIZERS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95)),
    "AdamW amsgrad": lambda groups: torch.optim.AdamW(groups, lr=1e-2, amsgrad=True),
    "Adam with L2": lambda groups: torch.optim.Adam(groups, lr=1e-2),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "SGD nesterov": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "SGD dampened": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, dampening=0.3),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, momentum=0.5, centered=True),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2, initial_accumulator_value=0.1),
    "FusedLamb": lambda groups: FusedLamb(groups, lr=1e-2, eps=1e-4),
    "FusedLamb as apex": lambda groups: FusedLamb(groups, lr=1e-2, use_nvlamb=False, bias_correction=False),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=1e-2, decoupled_weight_decay=True),
    "RAdam": lambda groups: torch.optim.RAdam(groups, lr=1e-2),
    "Adadelta": lambda groups: torch.optim.Adadelta(groups, lr=1.0),
    "FusedLion": lambda groups: FusedLion(groups, lr=1e-3, betas=(0.8, 0.95)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_torch_with_two_groups_and_a_schedule(name):
    make = OPTIMIZERS[name]

    def halving(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    def work(context: ParallelContext):
        model = build(Tied)
        engine = start(
            context,
            model,
            settings(3 if context.data.size > 1 else 1),
            optimizer=make(groups_of(model)),
            lr_scheduler=halving,
        )
        record = train_engine(engine, context, range(4))
        assert engine.get_lr()[0] == pytest.approx(engine.optimizer.param_groups[0]["initial_lr"] / 16)
        return record

    model = build(Tied)
    optimizer = make(groups_of(model))
    expected = train_plain(model, optimizer, ranks=2, accumulation=1, steps=4, scheduler=halving(optimizer))
    assert_same(on_ranks(2, work)[0], expected)


def test_a_schedule_made_of_the_callers_own_optimizer_moves_the_engine():
    model = build(Tied)
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of a schedule whose optimizer never steps
        engine, wrapped, _, returned = megazero.initialize(
            model=model, optimizer=optimizer, lr_scheduler=schedule, config=settings(), mpu=solo_context()
        )
        train_engine(engine, engine.context, range(3))
    assert returned is schedule
    assert wrapped.param_groups is optimizer.param_groups
    assert engine.get_lr() == pytest.approx([1e-5])


def test_options_that_a_schedule_moves_count():
    """OneCycleLR moves the betas as well."""

    def cycle(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=6)

    model = build(Tied)
    optimizer = adamw(model)
    expected = train_plain(model, optimizer, ranks=1, accumulation=1, scheduler=cycle(optimizer))
    model = build(Tied)
    engine = start(solo_context(), model, settings(), optimizer=adamw(model), lr_scheduler=cycle)
    assert_same(train_engine(engine, engine.context, range(5)), expected)


def test_a_function_makes_the_optimizer_of_the_given_parameters():
    model = build(Tied)
    chosen = [model.up.weight, model.up.bias]
    with pytest.warns(UserWarning, match="in no parameter group and are frozen: scale"):
        engine = start(
            solo_context(),
            model,
            settings(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            model_parameters=chosen,
        )
    before = engine.module_state_dict()
    after = train_engine(engine, engine.context, range(1)).weights
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"up.weight", "up.bias"}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_reduced_precision_trains(stage, dtype):
    def work(context: ParallelContext):
        section = {"enabled": True, **({"initial_scale_power": 4} if dtype == "fp16" else {})}
        engine = start(context, build(Tied), settings(stage, 2, optimizer=ADAMW, **{dtype: section}))
        assert engine.cur_scale == (16.0 if dtype == "fp16" else 1.0)
        record = train_engine(engine, context, range(4))
        assert {t.dtype for t in record.weights.values()} == {engine.module.scale.dtype}
        return record

    model = build(Tied)
    expected = train_plain(model, adamw(model), ranks=2, accumulation=2, steps=4)
    record = on_ranks(2, work)[0]
    assert record.weights["scale"].dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    torch.testing.assert_close(record.losses, expected.losses, rtol=2e-2, atol=0)
    torch.testing.assert_close(record.norms, expected.norms, rtol=5e-2, atol=0)


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    def work(context: ParallelContext):
        fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
        schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_type": "linear"}}
        config = settings(2, optimizer=ADAMW, fp16=fp16, scheduler=schedule)
        engine = start(context, build(Tied), config)
        before = engine.module_state_dict()
        loss = engine(*batch(0, 0, context.data.rank))
        engine.backward(loss * (float("inf") if context.data.rank == 1 else 1.0))
        engine.step()
        same = all(torch.equal(value, before[name]) for name, value in engine.module_state_dict().items())
        counted = engine.skipped_steps, engine.global_steps, engine.cur_scale, engine.was_step_applied()
        return same, engine.optimizer.overflow, counted, engine.lr_scheduler.last_batch_iteration

    assert on_ranks(2, work) == [(True, True, (1, 1, 128.0, False), -1)] * 2


@pytest.mark.parametrize(
    "scaling",
    [{"prescale_gradients": True}, {"gradient_predivide_factor": 8.0}, {"communication_data_type": "bf16"}],
)
def test_where_gradients_are_divided_changes_the_rounding_alone(scaling):
    def work(context: ParallelContext):
        engine = start(context, build(Tied), settings(1, optimizer=ADAMW, **scaling))
        return train_engine(engine, context, range(3))

    model = build(Tied)
    expected = train_plain(model, adamw(model), ranks=4, accumulation=1, steps=3)
    record = on_ranks(4, work)[0]
    narrow = "communication_data_type" in scaling
    torch.testing.assert_close(record.norms, expected.norms, rtol=1e-2 if narrow else 1e-5, atol=0)
    torch.testing.assert_close(record.losses, expected.losses, rtol=1e-2 if narrow else 1e-5, atol=0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "sums", [{"communication_data_type": "fp16"}, {"data_types": {"grad_accum_dtype": "fp16"}}]
)
def test_sums_over_ranks_in_fp16_overflow_only_where_their_means_would(sums, stage):
    """On 1,024 ranks the search for a loss scale would otherwise end 1,024 times lower."""

    def work(context: ParallelContext):
        fp16 = {"enabled": True, "loss_scale": 1}
        config = settings(stage, optimizer=ADAMW, fp16=fp16, **sums)
        engine = start(context, torch.nn.Linear(1, 1, bias=False), config)
        engine.backward(engine(torch.ones(1, 1).half()).float().sum() * 5e4)
        engine.step()
        return engine.was_step_applied(), engine.get_global_grad_norm()

    assert on_ranks(4, work) == [(True, pytest.approx(5e4, rel=1e-3))] * 4


def test_train_batch_is_forward_backward_and_step():
    def work(context: ParallelContext):
        by_hand = start(context, build(Tied), settings(2, 3, optimizer=ADAMW))
        expected = train_engine(by_hand, context, range(2))
        engine = start(context, build(Tied), settings(2, 3, optimizer=ADAMW))
        losses = []
        for step in range(2):
            micro_batches = iter([batch(step, micro, context.data.rank) for micro in range(3)])
            losses.append(engine.train_batch(micro_batches))
        assert losses == pytest.approx(expected.losses, abs=1e-6)
        assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (2, 6, 2 * 2 * 3 * MICRO)
        assert engine.module.training
        evaluated = engine.eval_batch(iter([batch(9, micro, context.data.rank) for micro in range(3)]))
        assert engine.module.training
        assert engine.global_steps == 2
        with torch.no_grad():
            own = [by_hand(*batch(9, micro, context.data.rank)) for micro in range(3)]
        mean = torch.stack(own).mean()
        context.data.all_reduce(mean).wait()
        assert evaluated == pytest.approx(float(mean) / 2)
        return True

    assert all(on_ranks(2, work))


def test_without_synchronization_gradients_add_up_and_are_reduced_once():
    def work(context: ParallelContext):
        plain = start(context, build(Tied), settings(1, 2, optimizer=ADAMW))
        expected = train_engine(plain, context, range(1))
        engine = start(context, build(Tied), settings(1, 2, optimizer=ADAMW))
        with engine.no_sync():
            engine.backward(engine(*batch(0, 0, context.data.rank)))
        engine.backward(engine(*batch(0, 1, context.data.rank)))
        engine.set_gradient_accumulation_boundary(True)
        engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(expected.norms[0], rel=1e-5)
        return True

    assert all(on_ranks(2, work))


@over_table("stage", [0, 2, 3])
def test_two_losses_of_one_micro_batch_add_up(stage):
    def work(context: ParallelContext):
        engine = start(context, build(Tied), settings(stage, optimizer=ADAMW))
        for micro in range(2):
            engine.backward(engine(*batch(0, micro, context.data.rank)) / 2)
        engine.step()
        return engine.get_global_grad_norm()

    model = build(Tied)
    expected = train_plain(model, adamw(model), ranks=2, accumulation=2, steps=1)
    assert on_ranks(2, work) == pytest.approx([expected.norms[0]] * 2, rel=1e-5)


def test_gradients_that_were_dropped_do_not_count():
    def work(context: ParallelContext):
        engine = start(context, build(Tied), settings(2, optimizer=ADAMW))
        engine.backward(100.0 * engine(*batch(7, 0, context.data.rank)))
        engine.zero_grad()
        return train_engine(engine, context, range(1))

    model = build(Tied)
    assert_same(on_ranks(2, work)[0], train_plain(model, adamw(model), ranks=2, accumulation=1, steps=1))


def test_a_second_partition_within_nodes():
    world, grid = ThreadWorld(4), ProcessGrid(dp=4)

    def work(rank: int):
        context = thread_context(world, grid, rank, node_size=2)
        config = settings(3, 2, optimizer=ADAMW)
        config["zero_optimization"]["zero_hpz_partition_size"] = 2
        return train_engine(start(context, build(Tied), config), context, range(2))

    model = build(Tied)
    assert_same(world.run(work)[0], train_plain(model, adamw(model), ranks=4, accumulation=2, steps=2))


def test_quantized_communication_stays_close():
    """ZeRO++ in full: int8 weights, int4 gradients over two hops, a second partition."""
    world, grid = ThreadWorld(4), ProcessGrid(dp=4)

    def work(rank: int, **keys):
        context = thread_context(world, grid, rank, node_size=2)
        config = settings(3, 2, optimizer=ADAMW)
        config["zero_optimization"].update(keys)
        return train_engine(start(context, build(Tied), config), context, range(3))

    exact = world.run(work)[0]
    keys = {
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
        "zero_hpz_partition_size": 2,
    }
    for record in world.run(partial(work, **keys)):
        assert record.losses == pytest.approx(exact.losses, rel=0.05)
        assert record.losses != exact.losses


def test_initial_weights_are_the_first_ranks():
    def work(context: ParallelContext):
        engine = start(context, build(Tied, seed=context.rank), settings(3, optimizer=ADAMW))
        return engine.module_state_dict()

    expected = build(Tied, seed=0).state_dict()
    for weights in on_ranks(2, work):
        assert all(torch.equal(weights[name], value) for name, value in expected.items())


def test_samples_are_dealt_once_in_micro_batches():
    def work(context: ParallelContext):
        data = [(torch.tensor([float(i)]), i) for i in range(16)]
        _, _, loader, _ = megazero.initialize(
            model=nn.Linear(1, 1),
            training_data=data,
            config=settings(0, 2, optimizer=ADAMW),
            mpu=context,
        )
        return [labels.tolist() for _, labels in loader]

    dealt = on_ranks(2, work)
    assert [[len(labels) for labels in rank] for rank in dealt] == [[MICRO] * 4] * 2
    assert sorted(i for rank in dealt for labels in rank for i in labels) == list(range(16))


def test_the_dataloader_feeds_train_batch_and_uses_the_callers_collation():
    def collate(samples):
        stacked = torch.stack(samples)
        return {"tokens": stacked[:, 0], "labels": stacked[:, 1]}

    data = [torch.stack(batch(i, 0, 0))[:, 0] for i in range(5)]
    config = settings(0, 1, optimizer=ADAMW, dataloader_drop_last=True)
    engine, _, loader, _ = megazero.initialize(
        model=build(Tied), training_data=data, collate_fn=collate, config=config, mpu=solo_context()
    )
    assert len(loader) == 2
    losses = [engine.train_batch() for _ in range(6)]
    assert losses[4:] < losses[:2]


def test_inputs_are_cast_where_fp16_auto_cast_is_on():
    config = settings(fp16={"enabled": True, "auto_cast": True}, optimizer=ADAMW)
    engine = start(solo_context(), nn.Linear(WIDTH, 1), config)
    assert engine(torch.ones(2, WIDTH)).dtype == torch.float16


def test_the_engine_answers_as_deepspeeds_does():
    engine = start(solo_context(), build(Tied), settings(1, 4, optimizer=ADAMW))
    assert isinstance(engine, nn.Module)
    assert engine.train_batch_size() == 4 * MICRO
    assert engine.train_micro_batch_size_per_gpu() == MICRO
    assert engine.gradient_accumulation_steps() == 4
    assert engine.zero_optimization_stage() == 1
    assert engine.gradient_clipping() == 0.5
    assert (engine.device, engine.local_rank, engine.global_rank) == (torch.device("cpu"), 0, 0)
    assert (engine.world_size, engine.dp_world_size) == (1, 1)
    assert engine.embedding is engine.module.embedding  # attributes of the module
    assert engine.get_lr() == [1e-2]
    assert engine.get_global_grad_norm() is None
    assert [engine.is_gradient_accumulation_boundary(), engine.global_steps] == [False, 0]
    engine.eval()
    assert not engine.module.training


def test_arguments_name_the_configuration(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(settings(optimizer=ADAMW)))
    parser = megazero.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    assert args.deepspeed
    engine, *_ = megazero.initialize(args, build(Tied), mpu=solo_context())
    assert engine.get_lr() == [1e-2]


def test_a_tensor_parallel_parameter_counts_whole_in_the_norm():
    """Megatron's layers mark theirs; what is not marked is the same on every tensor-parallel rank."""

    class Sliced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slice = nn.Parameter(torch.ones(3))
            self.slice.tensor_model_parallel = True
            self.same = nn.Parameter(torch.ones(4))

        def forward(self) -> torch.Tensor:
            return self.slice.sum() + self.same.sum()

    world, grid = ThreadWorld(4), ProcessGrid(dp=2, tp=2)

    def work(rank: int):
        engine = start(thread_context(world, grid, rank), Sliced(), settings(2, optimizer=ADAMW))
        engine.backward(engine())
        engine.step()
        return engine.get_global_grad_norm()

    assert world.run(work) == pytest.approx([10**0.5] * 4)


def _gloo_rank(rank: int, world_size: int, stage: int) -> tuple[list[float], list[float], dict]:
    """The world is joined already, as by a script that called init_process_group."""
    engine, *_ = megazero.initialize(model=build(Tied), config=settings(stage, 2, optimizer=ADAMW))
    record = train_engine(engine, engine.context, range(3))
    return record.losses, record.norms, {name: value.tolist() for name, value in record.weights.items()}


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [1, 3])
def test_real_processes_train_as_plain_torch(pool, stage):
    model = build(Tied)
    expected = train_plain(model, adamw(model), ranks=2, accumulation=2, steps=3)
    for losses, norms, weights in pool.run(_gloo_rank, 2, stage):
        assert losses == pytest.approx(expected.losses, rel=1e-4)
        assert norms == pytest.approx(expected.norms, rel=1e-4)
        for name, value in expected.weights.items():
            torch.testing.assert_close(torch.tensor(weights[name]), value, rtol=1e-4, atol=1e-5)


def _foreign_mpu_rank(rank: int, world_size: int) -> tuple[int, int, str]:
    class Megatron:
        get_model_parallel_world_size = get_tensor_model_parallel_world_size = staticmethod(lambda: 2)
        get_model_parallel_rank = staticmethod(lambda: rank % 2)
        get_data_parallel_rank = staticmethod(lambda: rank // 2)

    class Elsewhere(Megatron):
        get_model_parallel_rank = staticmethod(lambda: 1 - rank % 2)

    engine, *_ = megazero.initialize(model=build(Tied), config=settings(1, optimizer=ADAMW), mpu=Megatron())
    train_engine(engine, engine.context, range(1))
    try:
        megazero.initialize(model=build(Tied), config=settings(optimizer=ADAMW), mpu=Elsewhere())
    except megazero.errors.ConfigError as error:
        return engine.context.tp.size, engine.train_batch_size(), str(error)
    return 0, 0, ""


@pytest.mark.gloo
def test_an_mpu_of_the_scripts_own_is_followed(pool):
    for tp, samples, message in pool.run(_foreign_mpu_rank, 2):
        assert (tp, samples) == (2, MICRO)
        assert "`mpu` must lay ranks out with tensor-parallel ranks adjacent" in message


def test_importing_megazero_does_not_import_torch():
    code = "import sys, megazero; megazero.__version__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert {"initialize", "zero"} <= set(dir(megazero))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = megazero.nothing
