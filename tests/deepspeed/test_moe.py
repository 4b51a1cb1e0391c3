"""DeepSpeed's MoE layer under `megazero.initialize`: its formulas, and the same numbers on any ranks."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megazero
from megazero.deepspeed.optimizers.fused import FusedLamb
from megazero.errors import ConfigError
from megazero.moe.layer import MoE
from megazero.moe.utils import (
    is_moe_param,
    is_moe_param_group,
    split_params_into_different_moe_groups_for_optimizer,
)
from megazero.mpu.context import ParallelContext, solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from tests.deepspeed.user_models import (
    ADAMW,
    BUILDING,
    VOCABULARY,
    WIDTH,
    assert_same,
    batch,
    build,
    settings,
    start,
    train_engine,
    train_plain,
)

E = 4
EXPERTS = "deepspeed_moe.experts.deepspeed_experts"


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))


class Deaf(nn.Module):
    """An expert that gives each row times its scale, and leaves a bias to its caller."""

    def __init__(self, scale: float = 1.0):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return x * self.scale, None


def layer(wanted: list[list[float]], **options) -> tuple[MoE, Tensor]:
    """A layer of E scales 1, 10, 100, ..., and tokens whose logits are these."""
    experts = len(wanted[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these experts do start equal
        moe = MoE(experts, Deaf(), experts, min_capacity=0, **options).eval()
    with torch.no_grad():
        moe.router.weight.copy_(torch.eye(experts))
        for number, expert in enumerate(moe.experts):
            expert.scale.fill_(10.0**number)
    return moe, torch.tensor(wanted)


def share(out: Tensor, x: Tensor) -> list[float]:
    """What each token was multiplied by."""
    return [round(each, 4) for each in (out / x).mean(1).tolist()]


# Softmax of (ln 3, 0) is (3/4, 1/4).
LN3 = 1.0986123


def test_top_1_by_hand():
    # Tokens 0, 1 and 3 want expert 0, which has room for ceil(4 / 2) = 2.
    moe, x = layer([[LN3, 1e-9], [LN3, 1e-9], [1e-9, LN3], [LN3, 1e-9]], use_rts=False)
    out, l_aux, counts = moe(x)
    assert counts.tolist() == [3, 1]
    assert counts.dtype == torch.int64
    assert share(out, x) == [0.75, 0.75, 7.5, 0.0]
    # E sum f P = 2 (3/4 (3 * 3/4 + 1/4) / 4 + 1/4 (3 * 1/4 + 3/4) / 4)
    assert l_aux.item() == pytest.approx(2 * (0.75 * 0.625 + 0.25 * 0.375))
    assert l_aux.dtype == torch.float32


def test_an_unused_token_is_not_sent_and_takes_no_room():
    moe, x = layer([[LN3, 1e-9], [LN3, 1e-9], [1e-9, LN3], [LN3, 1e-9]], use_rts=False)
    out, l_aux, counts = moe(x, used_token=torch.tensor([1, 0, 1, 1]))
    assert counts.tolist() == [2, 1]
    assert share(out, x) == [0.75, 0.0, 7.5, 0.75]
    assert l_aux.item() == pytest.approx(2 * (0.5 * 0.625 + 0.25 * 0.375))


def test_top_2_fills_with_first_choices_and_weighs_what_is_left():
    # Logarithms of probabilities. Each expert has room for ceil(2 * 3 / 3 / 2) = 1.
    shares = [[0.6, 0.3, 0.1], [0.2, 0.7, 0.1], [0.5, 0.1, 0.4]]
    moe, x = layer(torch.tensor(shares).log().tolist(), k=2, capacity_factor=9.0, eval_capacity_factor=0.5)
    out, l_aux, counts = moe(x)
    assert counts.tolist() == [3, 2, 1]
    # Token 0 has its first expert; its second is full of token 1's first. Token 2 comes too late for its
    # first, and is alone with its second. Each has one left, of weight 1.
    assert share(out, x) == [1.0, 10.0, 100.0]
    # f of first choices alone: 2/3, 1/3, 0; P: 1.3/3, 1.1/3, 0.6/3
    assert l_aux.item() == pytest.approx(3 * (2 / 3 * 1.3 / 3 + 1 / 3 * 1.1 / 3))
    moe, _ = layer(torch.tensor(shares).log().tolist(), k=2, drop_tokens=False)
    expected = [(6 + 30) / 9, (2 + 70) / 9, (5 + 400) / 9]
    assert share(moe(x)[0], x) == pytest.approx(expected, abs=1e-3)


def test_top_3_keeps_the_most_probable():
    shares = [[0.5, 0.3, 0.15, 0.05], [0.6, 0.1, 0.1, 0.2]]
    moe, x = layer(torch.tensor(shares).log().tolist(), k=3, eval_capacity_factor=0.5)
    out, l_aux, counts = moe(x)
    assert counts.tolist() == [2, 2, 1, 1]  # of equal ones, the lower number is chosen
    # Room for one each: expert 0 takes token 1 (0.6), expert 1 token 0 (0.3); 2 and 3 have one.
    assert share(out, x) == pytest.approx(
        [(10 * 0.3 + 100 * 0.15) / 0.45, (0.6 + 1000 * 0.2) / 0.8], abs=1e-3
    )
    chosen, probable = [2 / 2, 2 / 2, 1 / 2, 1 / 2], [1.1 / 2, 0.4 / 2, 0.25 / 2, 0.25 / 2]
    assert l_aux.item() == pytest.approx(4 / 3 * sum(f * p for f, p in zip(chosen, probable, strict=True)))


def test_no_token_one_token_and_none_that_is_used():
    moe = MoE(WIDTH, mlp(), E, k=2)
    for x, used, tokens in (
        (torch.zeros(0, WIDTH), None, 0),
        (torch.randn(1, WIDTH), None, 1),
        (torch.randn(5, WIDTH), torch.zeros(5), 0),
    ):
        out, l_aux, counts = moe(x.requires_grad_(), used_token=used)
        (out.sum() + l_aux).backward()
        assert counts.sum().item() == 2 * tokens
        assert out.shape == x.shape
        assert int((out != 0).any(1).sum()) == tokens
        assert (l_aux.item() > 0) == (tokens > 0)
        assert all(expert[0].weight.grad.isfinite().all() for expert in moe.experts)


@pytest.mark.parametrize("training", [True, False])
def test_capacity_has_a_factor_for_each_mode_and_a_floor(training):
    x = torch.tensor([[1.0, 0.0]] * 10)
    for least, expected in ((0, {True: 8, False: 3}), (4, {True: 8, False: 4}), (99, {True: 10, False: 10})):
        moe = MoE(2, mlp_of(2), 2, capacity_factor=1.5, eval_capacity_factor=0.6, min_capacity=least)
        with torch.no_grad():
            moe.router.weight.copy_(torch.eye(2))
        out, _, counts = moe.train(training)(x)
        assert counts.tolist() == [10, 0]
        assert int((out != 0).any(1).sum()) == expected[training]


def mlp_of(width: int) -> nn.Module:
    return nn.Linear(width, width)


def taken(moe: MoE, x: Tensor) -> list[int]:
    return (moe(x)[0] != 0).any(1).nonzero().flatten().tolist()


def test_tokens_are_dropped_at_random_and_a_recomputation_drops_the_same():
    with BUILDING:
        torch.manual_seed(3)
        moe = MoE(2, mlp_of(2), 2, capacity_factor=0.5)
        with torch.no_grad():
            moe.router.weight.copy_(torch.eye(2))
        x = torch.tensor([[1.0, 0.0]] * 40)
        found = [taken(moe, x) for _ in range(3)]
        assert [len(each) for each in found] == [10, 10, 10]
        assert found[0] != found[1]
        assert list(range(10)) not in found
        state = torch.get_rng_state()
        once = taken(moe, x)
        torch.set_rng_state(state)  # what torch.utils.checkpoint does before it computes again
        assert taken(moe, x) == once
        assert taken(moe.eval(), x) == taken(moe, x)


def test_noise_acts_in_training_alone():
    with BUILDING:
        x = torch.full((300, 2), 1.0)
        x[:, 1] = 1.001
        for noise in ("Jitter", "RSample"):
            moe = MoE(2, mlp_of(2), 2, noisy_gate_policy=noise, drop_tokens=False)
            with torch.no_grad():
                moe.router.weight.copy_(torch.eye(2))
            assert moe.eval()(x)[2].tolist() == [0, 300]
            counts = moe.train()(x)[2]
            assert 100 < int(counts[0]) < 200, noise
        moe = MoE(2, mlp_of(2), 2, use_rts=False, drop_tokens=False)
        state = torch.get_rng_state()
        moe(x)
        assert torch.equal(torch.get_rng_state(), state)


def test_the_second_expert_is_sampled():
    with BUILDING:
        x = torch.tensor([[3.0, 1.0, 0.999]] * 300)
        for sampling, least in ((True, 100), (False, 0)):
            moe = MoE(3, mlp_of(3), 3, k=2, drop_tokens=False, top2_2nd_expert_sampling=sampling)
            with torch.no_grad():
                moe.router.weight.copy_(torch.eye(3))
            counts = moe(x)[2].tolist()
            assert counts[0] == 300
            assert least <= counts[2] <= 2 * least


def test_experts_differ_and_follow_from_the_seed_alone():
    def weights(ep_size: int, seed: int) -> list[Tensor]:
        with BUILDING:
            torch.manual_seed(seed)
            given = mlp()
            moe = MoE(WIDTH, given, E, ep_size)
            after = torch.rand(())
        return [*(expert[0].weight.detach() for expert in moe.experts), given[0].weight, after]

    first = weights(1, 0)
    for i, one in enumerate(first[:-1]):
        assert not any(torch.equal(one, other) for other in first[:i])
        assert float(one.detach().std()) == pytest.approx(float(first[4].detach().std()), rel=0.3)
    assert all(torch.equal(a, b) for a, b in zip(first, weights(4, 0), strict=True))
    assert not torch.equal(first[0], weights(1, 1)[0])


def test_experts_built_within_init_have_the_same_values():
    torch.manual_seed(0)
    expected = MoE(WIDTH, mlp(), E, use_residual=True).state_dict()
    torch.manual_seed(0)
    with megazero.zero.Init(mpu=solo_context()):
        moe = MoE(WIDTH, mlp(), E, use_residual=True)
    with megazero.zero.GatheredParameters(list(moe.parameters())):
        assert all(torch.equal(value, expected[name]) for name, value in moe.state_dict().items())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_routes_in_fp32(precision):
    def work(context: ParallelContext):
        config = settings(2, 1, optimizer=ADAMW, **{precision: {"enabled": True}})
        model = build(mixed(2))
        engine = start(context, model, config)
        record = train_engine(engine, context, range(2))
        out, l_aux, _ = model.first(torch.ones(3, WIDTH, dtype=model.head.weight.dtype))
        return record.losses, out.dtype, l_aux.dtype

    model = build(mixed(1))
    expected = train_plain(model, adamw(model), ranks=2, accumulation=1, steps=2).losses
    for losses, *dtypes in on_experts(2, 2, work):
        assert losses == pytest.approx(expected, rel=0.03)
        assert dtypes == [{"bf16": torch.bfloat16, "fp16": torch.float16}[precision], torch.float32]


def test_experts_that_cannot_differ_are_told():
    with pytest.warns(UserWarning, match="all 3 experts start with the same values"):
        MoE(2, Deaf(), 3)


def test_a_residual_layer_mixes_with_the_module_itself():
    dense = mlp_of(2)
    moe = MoE(2, dense, 2, use_residual=True, drop_tokens=False)
    assert moe.mlp is dense
    x = torch.randn(5, 3, 2)
    plain = MoE(2, mlp_of(2), 2, drop_tokens=False)
    plain.load_state_dict({k: v for k, v in moe.state_dict().items() if k.startswith("deepspeed_moe")})
    mix = moe.coefficient(x).softmax(-1)
    out, l_aux, _ = moe(x)
    torch.testing.assert_close(out, mix[..., :1] * plain(x)[0] + mix[..., 1:] * dense(x))
    assert torch.equal(l_aux, plain(x)[1])


def test_a_bias_beside_the_output_is_added():
    class Leaves(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return F.linear(x, self.weight), self.bias

    torch.manual_seed(0)
    moe = MoE(2, Leaves(2, 2), 1, drop_tokens=False)
    x = torch.randn(4, 2)
    expert = moe.experts["0"]
    torch.testing.assert_close(moe(x)[0], F.linear(x, expert.weight, expert.bias))


class Mixed(nn.Module):
    """A model with two MoE layers, one of them residual; like the tutorials', it adds up their losses."""

    options: ClassVar[dict[str, Any]] = {"k": 1, "use_rts": False, "min_capacity": 0}
    ep_size = 1

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first = MoE(WIDTH, mlp(), E, self.ep_size, **self.options)
        self.second = MoE(WIDTH, mlp(), 2 * E, self.ep_size, use_residual=True, **self.options)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        out, first, _ = self.first(x)
        x = x + out
        out, second, _ = self.second(x)
        logits = self.head(x + out)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.1 * (first + second)


def mixed(ep_size: int, **options) -> type[Mixed]:
    return type("Mixed", (Mixed,), {"ep_size": ep_size, "options": {**Mixed.options, **options}})


def on_experts(count: int, ep: int, work, **sizes) -> list:
    """`work` on each of `count` data-parallel ranks, of which `ep` share experts, as threads."""
    grid = ProcessGrid(dp=count, ep=ep, **sizes)
    world = ThreadWorld(grid.world_size, timeout=30.0)
    return world.run(lambda rank: work(thread_context(world, grid, rank)))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


KINDS = (
    {},
    {"k": 2, "top2_2nd_expert_sampling": False, "capacity_factor": 0.7},
    {"k": 3, "drop_tokens": False},
)


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_and_ep_size_trains_as_plain_torch(stage, number):
    # Every stage with every size, and each of them with every kind.
    ep, options = (1, 2, 4)[number], KINDS[(number + stage) % 3]

    def work(context: ParallelContext):
        engine = start(context, build(mixed(ep, **options)), settings(stage, 2, optimizer=ADAMW))
        return train_engine(engine, context, range(2))

    model = build(mixed(1, **options))
    expected = train_plain(model, adamw(model), ranks=4, accumulation=2, steps=2)
    for record in on_experts(4, ep, work):
        assert_same(record, expected)


def test_tensor_parallel_ranks_hold_copies():
    def work(context: ParallelContext):
        engine = start(context, build(mixed(2)), settings(2, 1, optimizer=ADAMW))
        return train_engine(engine, context, range(2))

    model = build(mixed(1))
    expected = train_plain(model, adamw(model), ranks=2, accumulation=1, steps=2)
    for record in on_experts(2, 2, work, tp=2):
        assert_same(record, expected)


@pytest.mark.parametrize("stage", [0, 3])
def test_lamb_measures_each_expert_by_itself(stage):
    told = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}

    def work(context: ParallelContext):
        config = settings(stage, 1, optimizer={"type": "Lamb", "params": told})
        return train_engine(start(context, build(mixed(2)), config), context, range(2))

    model = build(mixed(1))
    expected = train_plain(model, FusedLamb(model.parameters(), **told), ranks=4, accumulation=1, steps=2)
    for record in on_experts(4, 2, work):
        assert_same(record, expected)


@pytest.mark.parametrize(("stage", "ep"), [(0, 2), (2, 4), (3, 1), (3, 2), (3, 4)])
def test_all_tokens_to_one_expert(stage, ep):
    def make(size: int) -> nn.Module:
        model = build(mixed(size, drop_tokens=False))
        with torch.no_grad():  # of equal logits the lowest number wins
            model.first.router.weight.zero_()
            model.second.router.weight.zero_()
        return model

    def work(context: ParallelContext):
        engine = start(context, make(ep), settings(stage, 1, optimizer=ADAMW))
        return train_engine(engine, context, range(1))

    model = make(1)
    expected = train_plain(model, adamw(model), ranks=4, accumulation=1, steps=1)
    for record in on_experts(4, ep, work):
        assert_same(record, expected)


def test_each_rank_holds_its_experts_alone():
    def work(context: ParallelContext):
        model = build(mixed(2))
        before = sum(param.numel() for param in model.first.experts.parameters())
        engine = start(context, model, settings(0, optimizer=ADAMW))
        held = sum(param.numel() for param in model.first.experts.parameters())
        full = {
            name for name in engine.module_state_dict() if name.startswith("first.deepspeed_moe.experts.")
        }
        return model.first.experts.numbers, before / held, sorted({name.split(".")[4] for name in full})

    every = ["0", "1", "2", "3"]
    assert on_experts(4, 2, work) == [((0, 1), 2, every), ((2, 3), 2, every)] * 2


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("ep", [1, 2])
def test_a_model_built_within_init_is_the_same(stage, ep):
    def work(context: ParallelContext):
        with BUILDING:
            torch.manual_seed(0)
            whole = mixed(ep)()
        with megazero.zero.Init(mpu=context):
            model = mixed(ep)()
        with megazero.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            if context.rank == 0:
                model.load_state_dict(whole.state_dict())
        engine = start(context, model, settings(stage, 1, optimizer=ADAMW))
        return train_engine(engine, context, range(2))

    model = build(mixed(1))
    expected = train_plain(model, adamw(model), ranks=2, accumulation=1, steps=2)
    for record in on_experts(2, ep, work):
        assert_same(record, expected)


@pytest.mark.parametrize(
    ("saved", "loaded"), [((3, 4, 2), (0, 4, 4)), ((0, 4, 4), (2, 2, 1)), ((2, 1, 1), (3, 4, 2))]
)
def test_a_checkpoint_loads_at_any_ep_size(tmp_path, saved, loaded):
    def state(engine) -> dict:
        return {spec.name: kinds for spec, kinds in engine.optimizer.shards.full_state()}

    def save(context: ParallelContext):
        engine = start(context, build(mixed(saved[2])), settings(saved[0], optimizer=ADAMW))
        train_engine(engine, context, range(2))
        engine.save_checkpoint(tmp_path)
        return state(engine), engine.module_state_dict()

    def load(context: ParallelContext):
        engine = start(context, build(mixed(loaded[2]), seed=7), settings(loaded[0], optimizer=ADAMW))
        engine.load_checkpoint(tmp_path)
        return state(engine), engine.module_state_dict()

    def joined(found: list) -> dict:
        return {name: kinds for states, _ in found for name, kinds in states.items()}

    before, after = on_experts(saved[1], saved[2], save), on_experts(loaded[1], loaded[2], load)
    expected, found = joined(before), joined(after)
    assert len(expected) == len(list(build(mixed(1)).parameters()))
    assert found.keys() == expected.keys()
    for name, kinds in expected.items():
        assert kinds.keys() == {"weight", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(found[name][kind], value) for kind, value in kinds.items()), name
    for _, weights in after:
        assert weights.keys() == before[0][1].keys()
        assert all(torch.equal(weights[name], value) for name, value in before[0][1].items())


def test_continuing_equals_not_stopping(tmp_path):
    def whole(context: ParallelContext):
        engine = start(context, build(mixed(2)), settings(2, optimizer=ADAMW))
        train_engine(engine, context, range(2))
        engine.save_checkpoint(tmp_path)
        return train_engine(engine, context, range(2, 4))

    def resumed(context: ParallelContext):
        engine = start(context, build(mixed(2), seed=7), settings(2, optimizer=ADAMW))
        engine.load_checkpoint(tmp_path)
        return train_engine(engine, context, range(2, 4))

    for expected, found in zip(on_experts(2, 2, whole), on_experts(2, 2, resumed), strict=True):
        assert (found.losses, found.norms) == (expected.losses, expected.norms)
        assert all(torch.equal(found.weights[name], value) for name, value in expected.weights.items())


def test_experts_are_gathered_from_their_own_replicas():
    def work(context: ParallelContext):
        model = build(mixed(2))
        engine = start(context, model, settings(3, optimizer=ADAMW))
        mine = list(model.first.experts.parameters())
        with megazero.zero.GatheredParameters(
            mine, modifier_rank=context.grid.place(context.rank).index("ep")
        ):
            mine[0].fill_(context.rank)
        return {
            name: float(value.flatten()[0])
            for name, value in engine.module_state_dict().items()
            if name in (f"first.{EXPERTS}.0.0.weight", f"first.{EXPERTS}.2.0.weight")
        }

    expected = {f"first.{EXPERTS}.0.0.weight": 0.0, f"first.{EXPERTS}.2.0.weight": 1.0}
    assert on_experts(4, 2, work) == [expected] * 4


def _noisy_rank(rank: int, world_size: int) -> list[tuple[list, list, list]]:
    found = []
    for ep in (1, 2):
        noise = {"use_rts": True, "capacity_factor": 0.6, "noisy_gate_policy": "Jitter"}
        model = build(mixed(ep, **noise))
        torch.manual_seed(5)
        engine = megazero.initialize(model=model, config=settings(3, 2, optimizer=ADAMW))[0]
        record = train_engine(engine, engine.context, range(2))
        assert len(model.first.experts.numbers) == E // ep
        found.append((record.losses, record.norms, record.weights[f"first.{EXPERTS}.3.0.weight"].tolist()))
    return found


@pytest.mark.gloo
def test_noise_does_not_depend_on_ep_size_in_real_processes(pool):
    for (losses, norms, weight), (others, other_norms, other) in pool.run(_noisy_rank, 2):
        assert others == pytest.approx(losses, rel=1e-5)
        assert other_norms == pytest.approx(norms, rel=1e-5)
        torch.testing.assert_close(torch.tensor(other), torch.tensor(weight), rtol=1e-4, atol=1e-5)


def test_groups_of_the_tutorials():
    model = build(mixed(2))
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "parameters", "lr": 3e-3}
    )
    assert [(group["name"], is_moe_param_group(group), group["lr"]) for group in groups] == [
        ("parameters", False, 3e-3),
        ("ep_size_2", True, 3e-3),
    ]
    experts = {id(param) for each in (model.first, model.second) for param in each.experts.parameters()}
    assert {id(param) for param in groups[1]["params"]} == experts
    assert {id(param) for param in model.parameters() if is_moe_param(param)} == experts
    assert len(groups[0]["params"]) + len(groups[1]["params"]) == len(list(model.parameters()))
    largest = 3 * WIDTH * WIDTH + 3 * WIDTH
    parts = split_params_into_different_moe_groups_for_optimizer(groups[1:], max_group_size=largest)[1:]
    assert all(sum(param.numel() for param in part["params"]) <= largest for part in parts)
    assert [id(p) for part in parts for p in part["params"]] == [id(p) for p in groups[1]["params"]]


class CifarNet(nn.Module):
    """The network of DeepSpeed's MoE tutorial, on small images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, stride=2)
        self.fc1 = nn.Linear(36, 16)
        self.moe_layer_list = nn.ModuleList(
            MoE(
                hidden_size=16,
                expert=nn.Linear(16, 16),
                num_experts=n_e,
                ep_size=2,
                use_residual=n_e == 2,
                k=1,
                min_capacity=0,
                noisy_gate_policy="RSample",
            )
            for n_e in (2, 4)
        )
        self.fc2 = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(F.relu(self.conv(x)).flatten(1)))
        for each in self.moe_layer_list:
            x, _, _ = each(x)
        return self.fc2(x)


@pytest.mark.parametrize("stage", [0, 2])
def test_the_tutorials_script_learns(stage):
    def work(context: ParallelContext):
        net = build(CifarNet)
        parameters = {"params": [p for p in net.parameters()], "name": "parameters"}  # noqa: C416
        engine, _, _, _ = megazero.initialize(
            model=net,
            model_parameters=split_params_into_different_moe_groups_for_optimizer(parameters),
            config=settings(stage, optimizer={"type": "Adam", "params": {"lr": 1e-2}}),
            mpu=context,
        )
        losses = []
        generator = torch.Generator().manual_seed(context.rank)
        for _ in range(25):
            labels = torch.randint(0, 3, (16,), generator=generator)
            images = torch.randn(16, 3, 8, 8, generator=generator) * 0.3
            images[torch.arange(16), labels] += 1.0  # the class is the channel that is bright
            loss = F.cross_entropy(engine(images), labels)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        return losses

    for losses in on_experts(2, 2, work):
        assert losses[-1] < losses[0] - 0.4


def test_it_is_found_under_deepspeeds_names():
    found = megazero.__getattr__("moe")  # what an import of megazero alone gives
    assert found.layer.MoE is MoE
    assert found.utils.is_moe_param is is_moe_param
    assert "moe" in dir(megazero)


REFUSED = [
    ({"num_experts": [4, 8]}, "`num_experts` must be one number for one layer, but is .4, 8.; for a pyramid"),
    ({"num_experts": 6, "ep_size": 4}, r"`num_experts` must be a multiple of `ep_size` \(4\), but is 6"),
    ({"num_experts": 2, "k": 3}, r"`k` must be at most `num_experts` \(2\), but is 3"),
    ({"ep_size": 0}, "`ep_size` must be a whole number of at least 1, but is 0"),
    ({"capacity_factor": 0.0}, "`capacity_factor` must be above 0, but is 0.0"),
    ({"min_capacity": -1}, "`min_capacity` must be at least 0, but is -1"),
    ({"noisy_gate_policy": "Loud"}, "`noisy_gate_policy` must be Jitter, RSample or None, but is Loud"),
    ({"enable_expert_tensor_parallelism": True}, "`enable_expert_tensor_parallelism` must be False"),
    ({"expert": nn.BatchNorm1d(WIDTH)}, "`expert` must have no buffers, .* running_mean"),
    ({"expert": 3}, "`expert` must be a torch.nn.Module, but is a int"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_what_cannot_be_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        MoE(**{"hidden_size": WIDTH, "expert": nn.Linear(WIDTH, WIDTH), **given})


def test_an_expert_cannot_hold_experts_or_slices():
    with pytest.raises(ConfigError, match="`expert` must not have experts in it"):
        MoE(2, MoE(2, mlp_of(2)))
    sliced = mlp_of(2)
    sliced.weight.tensor_model_parallel = True
    with pytest.raises(ConfigError, match="`expert` must have whole weights, but weight are sliced"):
        MoE(2, sliced)
    with pytest.raises(ConfigError, match="`used_token` must have one entry for each of the 6 tokens"):
        MoE(2, mlp_of(2))(torch.zeros(3, 2, 2), used_token=torch.ones(3))
    with pytest.raises(ConfigError, match=r"`hidden_states` must have `hidden_size` \(2\) .* shape \(3, 4\)"):
        MoE(2, mlp_of(2))(torch.zeros(3, 4))


def test_options_without_effect_are_told():
    with pytest.warns(UserWarning, match="`use_tutel` changes nothing here"):
        MoE(2, mlp_of(2), use_tutel=True)
    with pytest.warns(UserWarning, match="`noisy_gate_policy` RSample acts for k = 1 alone, and k is 2"):
        MoE(2, mlp_of(2), 2, k=2, noisy_gate_policy="RSample")


def test_layers_must_agree_among_themselves_and_with_the_ranks():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = MoE(2, mlp_of(2), 4, ep_size=2), MoE(2, mlp_of(2), 4, ep_size=4)

    with pytest.raises(ConfigError, match="`ep_size` must be the same in all MoE layers .* 2 in a, 4 in b"):
        start(solo_context(), Two(), settings(optimizer=ADAMW))
    with pytest.raises(ConfigError, match=r"`ep_size` must be the size of the axis ep .* \(1\), but is 2"):
        start(solo_context(), build(mixed(2)), settings(optimizer=ADAMW))
    with pytest.raises(ConfigError, match=r"`ep_size` must divide the number of data-parallel ranks \(1\)"):
        start(None, build(mixed(2)), settings(optimizer=ADAMW))


def test_evaluation_and_batches_of_other_sizes_on_each_rank():
    def work(context: ParallelContext):
        engine = start(context, build(mixed(2, drop_tokens=False)), settings(3, optimizer=ADAMW))
        tokens, labels = batch(0, 0, 0)
        engine.eval()
        rows = 1 + context.rank
        with torch.no_grad():
            return float(engine(tokens[:1, :rows], labels[:1, :rows]))

    model = build(mixed(1, drop_tokens=False)).eval()
    tokens, labels = batch(0, 0, 0)
    expected = [model(tokens[:1, :rows], labels[:1, :rows]).item() for rows in (1, 2)]
    assert on_experts(2, 2, work) == pytest.approx(expected, rel=1e-5)


def test_a_model_with_experts_can_be_converted():
    """`Module.to` once called the layer's own `_apply`, which ran the experts, and so failed."""
    model = nn.Sequential(MoE(WIDTH, mlp(), 2)).to(torch.float64)
    assert {param.dtype for param in model.parameters()} == {torch.float64}
