"""Training over wires that send codes: exact masters, equal replicas, bad gradients seen, close losses."""

from __future__ import annotations

import math
from datetime import timedelta
from functools import cache, partial

import pytest
import torch
from torch import nn

from megazero.config.derive import replicas_per_node
from megazero.config.training_plan import training_plan_of
from megazero.config.tree.checkpoint import CheckpointConfig
from megazero.config.tree.config import Config
from megazero.mpu.context import make_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from megazero.mpu.torch_group import open_group
from megazero.ops.quantize import Quantization
from megazero.optim.elementwise import Adam
from megazero.train.resume.resume import resume
from megazero.train.resume.snapshot import Snapshots
from megazero.train.step.state import TrainState
from megazero.train.step.timers import Timers
from megazero.verify.record import micro_batches, verification_engine
from megazero.verify.run import run_in_threads
from megazero.zero.build import build_store
from megazero.zero.copies import CopyCheck
from megazero.zero.parallel import DataParallel
from megazero.zero.policy import ZeroPolicy
from megazero.zero.unit import module_units
from tests.layouts.layout import VOCABULARY, Layout
from tests.zero.harness import SAMPLES, Record, Trainer, in_threads
from tests.zero.late_group import with_late_groups
from tests.zero.models import Zoo, gpt_loss, layer_units, make_gpt, zoo_loss
from tests.zero.policies import make_policy

F32, BF16 = torch.float32, torch.bfloat16
# What weights and gradients travel as, over how many ranks of a node, and how gradients are rounded.
EVERY_WIRE = pytest.mark.parametrize(
    ("kind", "stage", "dtype", "node", "hpz", "seed"),
    [
        ("int8", 1, BF16, 2, 1, None),
        ("int4", 2, BF16, 1, 1, 1),
        ("fp8", 2, F32, 2, 1, None),
        ("int4", 3, F32, 1, 1, None),
        ("fp8", 3, BF16, 2, 2, 2),
        ("int8", 3, F32, 4, 4, 3),
    ],
)


def policy(stage: int, kind: str = "int8", *, weights: bool = True, **changes) -> ZeroPolicy:
    codes = Quantization(kind, 16)
    usual = {"persistence_threshold": 0, "max_live": 0, "bucket_size": 200, "gradient_codes": codes}
    return make_policy(stage, **{**usual, "weight_codes": codes if weights else None, **changes})


def in_use(trainer: Trainer) -> dict[str, torch.Tensor]:
    with trainer.parallel.gathered():
        params = [(param, param.spec.name) for param in trainer.model.parameters()]
        return {name: param.detach().clone() for param, name in params}


def masters(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {spec.name: state["weight"].clone() for spec, state in trainer.optimizer.full_state()}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@EVERY_WIRE
def test_replicas_have_the_same_bits_and_repeat_them(kind, stage, dtype, node, hpz, seed):
    def work(context):
        settings = policy(stage, kind, hpz=hpz, rounding_seed=seed)
        trainer = Trainer(Zoo().to(dtype), zoo_loss, settings, context)
        record = trainer.train(2, 3)
        assert CopyCheck(trainer.optimizer, context).compare().differences == ()
        return in_use(trainer), masters(trainer), record.norms

    first, *others = in_threads(4, work, node_size=node)
    for used, kept, norms in others:
        assert equal(used, first[0])
        assert equal(kept, first[1])
        assert norms == first[2]
    again = in_threads(4, work, node_size=node)[0]
    assert equal(again[0], first[0])
    # What is in use are the rounded masters, wherever these are apart.
    used, kept, _ = first
    differ = [name for name in used if not torch.equal(used[name], kept[name].to(dtype))]
    if stage == 3 or dtype == BF16:
        assert {used[name].dim() for name in differ} == {2}
    else:
        assert differ == []


@EVERY_WIRE
def test_overlap_is_no_race(kind, stage, dtype, node, hpz, seed):
    """A collective that happens as late as it may, when it is waited for, gives the same bits."""

    def work(context):
        settings = policy(stage, kind, hpz=hpz, rounding_seed=seed, max_live=60)
        trainer = Trainer(Zoo().to(dtype), zoo_loss, settings, context)
        record = trainer.train(2, 3)
        return record.norms, masters(trainer)

    at_once = in_threads(4, work, node_size=node)[0]
    late = in_threads(4, lambda context: work(with_late_groups(context)), node_size=node)[0]
    assert late[0] == at_once[0]
    assert equal(late[1], at_once[1])


def _train_int8(context) -> Record:
    return Trainer(Zoo(), zoo_loss, policy(3, rounding_seed=4), context).train(2, 2)


def _gloo_rank(rank: int, world_size: int) -> Record:
    return _train_int8(
        make_context(
            ProcessGrid(dp=world_size),
            rank,
            torch.device("cpu"),
            lambda name, ranks: open_group(name, rank, ranks, timedelta(seconds=30)),
        )
    )


@pytest.mark.gloo
def test_gloo_processes_have_the_bits_of_threads(pool):
    for got, want in zip(pool.run(_gloo_rank, 2), in_threads(2, _train_int8), strict=True):
        assert got.norms == want.norms
        assert all(equal(a, b) for a, b in zip(got.weights, want.weights, strict=True))


@EVERY_WIRE
def test_rounding_never_reaches_the_masters(kind, stage, dtype, node, hpz, seed):
    """With a learning rate of zero nothing changes, however often weights are gathered and published."""

    def work(context):
        trainer = Trainer(Zoo().to(dtype), zoo_loss, policy(stage, kind, hpz=hpz), context)
        before, used = masters(trainer), in_use(trainer)
        for step in range(3):
            trainer.accumulate(step, 1)
            assert trainer.optimizer.step(0.0, 0.0).applied
        trainer.optimizer.publish()
        assert equal(masters(trainer), before)
        assert equal(in_use(trainer), used)
        exact = Zoo().to(dtype).pair.weight
        assert torch.equal(before["pair.weight"], exact.to(before["pair.weight"].dtype))

    in_threads(4, work, node_size=node)


@EVERY_WIRE
def test_a_gradient_that_is_not_finite_skips_the_step_on_all_ranks(kind, stage, dtype, node, hpz, seed):
    def loss(model, step, sample):
        bad = math.nan if step == 0 and sample == 5 else 1.0
        return zoo_loss(model, step, sample) + (model.matrix * bad).sum()

    def work(context):
        model = Zoo()
        model.matrix = nn.Parameter(torch.ones(6, 5))
        trainer = Trainer(model.to(dtype), loss, policy(stage, kind, hpz=hpz, rounding_seed=seed), context)
        before = masters(trainer)
        trainer.accumulate(0, 1)
        report = trainer.optimizer.step(1e-2, 0.1)
        assert equal(masters(trainer), before)
        trainer.accumulate(1, 1)
        assert trainer.optimizer.step(1e-2, 0.1).applied
        return report.applied, report.first_bad_parameter

    found = in_threads(4, work, node_size=node)
    assert [applied for applied, _ in found] == [False] * 4
    assert len({name for _, name in found}) == 1


@pytest.mark.parametrize(("stage", "dtype"), [(1, BF16), (3, F32), (3, BF16)])
def test_writing_to_one_parameter_leaves_the_others_exact(stage, dtype):
    """What a gather has rounded must not become the masters of what nobody wrote to."""

    def work(context):
        trainer = Trainer(Zoo().to(dtype), zoo_loss, policy(stage, "int4"), context)
        before = masters(trainer)
        weight = trainer.model.pair.weight
        with trainer.parallel.gathered([weight], write_back=True):
            weight[0, 0] = 3.0
        after, used = masters(trainer), in_use(trainer)
        assert after["pair.weight"][0, 0] == 3.0
        after["pair.weight"][0, 0] = before["pair.weight"][0, 0]
        assert equal(after, before)
        trainer.optimizer.publish()
        assert equal(in_use(trainer), used)

    in_threads(2, work)


def test_a_flipped_bit_of_rounded_weights_is_found():
    def work(context):
        trainer = Trainer(Zoo().to(BF16), zoo_loss, policy(2, "int8"), context)
        trainer.train(1)
        if context.rank == 1:
            trainer.model.pair.weight.data.view(torch.int16)[0, 0] ^= 1
        found = CopyCheck(trainer.optimizer, context).compare()
        return {difference.name for difference in found.differences}

    assert in_threads(2, work) == [{"pair.weight"}] * 2


def losses(settings: ZeroPolicy, steps: int, node: int = 1) -> list[float]:
    """Of a small GPT that learns a few sequences on four ranks, by the samples of one of them."""

    def work(context):
        model, seen = make_gpt(), []

        def loss(model, step, sample):
            value = gpt_loss(model, 0, sample)
            seen.append(value.item() / 8)  # tokens
            return value

        trainer = Trainer(model, loss, settings, context, layer_units(model), rule=Adam(eps=1e-5))
        for step in range(steps):
            trainer.accumulate(step, 1)
            trainer.optimizer.step(3e-3, 0.0, 1 / SAMPLES)
        return [sum(seen[i : i + 3]) / 3 for i in range(0, len(seen), 3)]

    return in_threads(4, work, node_size=node)[0]


@cache
def exact_losses(steps: int) -> list[float]:
    return losses(make_policy(2), steps)


@pytest.mark.parametrize(
    ("kind", "weights", "seed", "close"),
    [
        ("int8", True, None, 0.01),
        ("int8", True, 1, 0.01),
        ("fp8", True, None, 0.05),
        ("int4", False, 1, 0.1),
    ],
)
def test_losses_stay_close_to_exact_ones(kind, weights, seed, close):
    """From 2.7 to 1.8 per token, with gradients as codes over two hops, and weights as codes or not."""
    exact = exact_losses(20)
    codes = Quantization(kind)
    settings = make_policy(
        3,
        persistence_threshold=0,
        gradient_codes=codes,
        weight_codes=codes if weights else None,
        rounding_seed=seed,
    )
    found = losses(settings, 20, node=2)
    assert exact[0] > 2.6
    assert exact[-1] < 1.9
    assert max(abs(ours - theirs) for ours, theirs in zip(found, exact, strict=True)) < close
    assert found != exact


# (layout, what its communication is): with tensor and pipeline slices, whose copies must stay equal.
RUNS = [
    (Layout(tp=2, pp=2, dp=2, zero=1, dtype="bf16"), {"quantized_weights": "int8"}),
    (Layout(pp=2, dp=2, zero=2), {"quantization_rounding": "stochastic"}),
    (
        Layout(tp=2, dp=4, zero=3, sequence_parallel=True),
        {"quantized_weights": "fp8", "hpz_partition_size": 2},
    ),
    (Layout(dp=4, ep=2, zero=3, experts="shared"), {"quantized_weights": "int8", "node_size": 2}),
]
EVERY_RUN = pytest.mark.parametrize(("layout", "zero"), RUNS, ids=lambda x: getattr(x, "name", ""))


def config_of(layout: Layout, zero: dict[str, object], **sections: object) -> Config:
    config = layout.config()
    zero = {"quantized_gradients": "int8", "quantization_block_size": 64, **zero}
    return config.model_copy(update={"zero": config.zero.model_copy(update=zero), **sections})


@EVERY_RUN
def test_layouts_train_alike_and_keep_their_copies_equal(layout, zero):
    exact = run_in_threads(layout.config(), layout.grid, 3)[-1]

    def work(rank):
        context = thread_context(world, layout.grid, rank, node_size=replicas_per_node(config.zero))
        engine = verification_engine(config, training_plan, context)
        state, found = TrainState(), []
        for _ in range(3):
            step = training_plan.at(state.progress)
            result = engine.train_step(micro_batches(config, context, step), state.progress, Timers())
            state = state.after(step, result.skipped)
            found.append(result.losses.labelled()["lm loss"])
        assert CopyCheck(engine.optimizer, context).compare().differences == ()
        return found

    config, world = config_of(layout, zero), ThreadWorld(layout.world_size)
    training_plan = training_plan_of(config, layout.dp)
    first, *others = world.run(work)
    assert others == [first] * (layout.world_size - 1)
    expected = [each["lm loss"] for each in exact.losses]
    assert first == pytest.approx(expected, rel=0.02)
    assert first != expected


@EVERY_RUN
def test_training_resumes_bit_for_bit(tmp_path, layout, zero):
    folder = str(tmp_path)
    config = config_of(layout, zero, checkpoint=CheckpointConfig(save=folder, load=folder))
    world, training_plan = ThreadWorld(layout.world_size), training_plan_of(config, layout.dp)

    def train(engine, context, state, steps):
        for _ in range(steps):
            step = training_plan.at(state.progress)
            result = engine.train_step(micro_batches(config, context, step), state.progress, Timers())
            state = state.after(step, result.skipped)
        everything = engine.optimizer.full_state()
        return state, [(s.name, {k: t.clone() for k, t in kinds.items()}) for s, kinds in everything]

    def work(rank):
        context = thread_context(world, layout.grid, rank, node_size=replicas_per_node(config.zero))
        engine = verification_engine(config, training_plan, context)
        state, _ = train(engine, context, TrainState(), 2)
        snapshots = Snapshots(config, training_plan, engine, context, VOCABULARY, config.training.seed)
        snapshots.save(state)
        snapshots.saver.close()
        _, straight = train(engine, context, state, 2)
        resumed = resume(config, context, VOCABULARY, partial(verification_engine, context=context))
        return straight, train(resumed.engine, context, resumed.state, 2)[1]

    for straight, resumed in world.run(work):
        assert [name for name, _ in straight] == [name for name, _ in resumed]
        for (name, want), (_, got) in zip(straight, resumed, strict=True):
            assert all(torch.equal(want[kind], got[kind]) for kind in want), name


@pytest.mark.parametrize(("multiple", "alike"), [(1, False), (128, True)])
def test_aligned_slices_have_the_same_blocks_on_any_number_of_ranks(multiple, alike):
    """Where slices are multiples of a block, blocks lie where one slice would have them: so do the codes."""
    settings = make_policy(3, persistence_threshold=0, weight_codes=Quantization("int8", 64))

    def work(context):
        model = nn.Linear(20, 20, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.linspace(-1, 1, 400).cos().cumsum(0).view(20, 20))
        units = module_units(model)
        store = build_store(units, settings, context, multiple=multiple)
        with DataParallel(units, store, settings, context).gathered():
            return model.weight.clone()

    two, three = in_threads(2, work), in_threads(3, work)
    assert all(torch.equal(weight, two[0]) for weight in two)
    assert all(torch.equal(weight, two[0]) == alike for weight in three)
