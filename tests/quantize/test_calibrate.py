"""Sums over samples: what they hold, and that they are the same on any number of ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megazero.models.batch import Batch
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from megazero.quantize.calibrate import Moments, Stream, Watch, own_samples, summed
from tests.inference.samples import GPT2, LLAMA, build
from tests.inference.test_deepseek import V3
from tests.inference.test_experts import build as build_experts
from tests.tables import over_table

TOKENS = torch.randint(53, (3, 1, 12), generator=torch.Generator().manual_seed(1))


def stream() -> Stream:
    return Stream([Batch(tokens) for tokens in TOKENS])


def as_it_is(name, x, sizes):
    return x


def test_sums_over_tokens():
    x = torch.tensor([[1.0, -2.0], [0.0, 0.0], [3.0, 0.5]])
    both = Moments.of([x, torch.zeros(0, 2)]).plus(Moments.of([-x[:1], x[:1]]))
    gram, count = both.of_matrix(0)
    assert gram.tolist() == [[11.0, -2.5], [-2.5, 8.25]]  # of rows 1 -2, 3 .5, -1 2
    assert (count, both.of_matrix(1)[1]) == (3, 1)  # blank rows, with which experts are padded, do not count
    assert both.mean().tolist() == [5 / 3, 4.5 / 3]
    assert both.most().tolist() == [3.0, 2.0]


@over_table(
    ("samples", "sizes"),
    [
        (20, [20]),
        (20, [16, 4]),
        (20, [8, 8, 4]),
        (128, [8] * 16),
        (7, [4, 3]),
        (129, [64, 64, 1, 0]),
        (1000, [512, 488, 0]),
    ],
)
def test_ranks_share_every_sample_once_in_powers_of_2(samples, sizes):
    world = ThreadWorld(len(sizes))
    groups = [thread_context(world, ProcessGrid(dp=len(sizes)), rank).world for rank in range(len(sizes))]
    shares = [own_samples(samples, group) for group in groups]
    assert [len(share) for share in shares] == sizes
    assert [sample for share in shares for sample in share] == list(range(samples))


def test_sums_are_equal_bit_for_bit_on_any_number_of_ranks():
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(5, 4, generator=generator) * 10**i for i in torch.rand(52, generator=generator) * 6]

    def on(ranks: int) -> torch.Tensor:
        world = ThreadWorld(ranks)

        def work(rank):
            group = thread_context(world, ProcessGrid(dp=ranks), rank).world
            return summed((Moments.of([values[i]]) for i in own_samples(52, group)), 52, group)

        first, *others = world.run(work)
        assert others == [None] * (ranks - 1)
        return first.flat

    alone = on(1)
    torch.testing.assert_close(alone[0, :16].view(4, 4), sum(x.double().t() @ x.double() for x in values))
    assert not torch.equal(alone, sum(Moments.of([x]).flat for x in values))  # the order does show
    for ranks in (2, 3, 4, 7, 8):
        assert torch.equal(on(ranks), alone)


@torch.no_grad()
def test_weights_are_seen_in_the_order_of_their_use():
    """Weights that read one tensor come together; experts see rows of their own."""
    orders = {}
    for name, model in (
        ("llama", build(LLAMA)),
        ("v3", build(V3)),
        ("experts", build_experts("biased", solo_context())),
    ):
        watch = Watch(model.layers)
        stages = stream().order(model, watch)
        orders[name] = [
            [part.removeprefix("layers.0.") for part in stage] for stage in stages if "s.0" in stage[0]
        ]
    assert orders["llama"] == [
        ["attention.qkv.weight"],
        ["attention.out.weight"],
        ["mlp.up.weight"],
        ["mlp.down.weight"],
    ]
    assert orders["v3"][:3] == [
        ["attention.query_down.weight"],
        ["attention.query.weight"],
        ["attention.latent_down.weight"],
    ]
    assert orders["experts"][2:] == [
        ["mlp.experts.up.weight"],
        ["mlp.experts.down.weight"],
        ["mlp.shared.up.weight"],
        ["mlp.shared.down.weight"],
    ]


@torch.no_grad()
def test_the_inputs_are_those_of_the_layer():
    model = build(GPT2)
    watch, samples = Watch(model.layers), stream()
    seen = list(samples.moments(model, watch, "layers.0.attention.qkv.weight", range(1), as_it_is))
    for batch, moments in zip(samples.batches, seen, strict=True):
        hidden = model.embedding(batch.tokens, *reversed(model.inputs_of(batch)))
        x = model.layers[0].input_norm(hidden).flatten(0, 1).double()
        torch.testing.assert_close(moments.of_matrix(0)[0], x.t() @ x)


@torch.no_grad()
def test_experts_see_their_own_tokens():
    model = build_experts("softmax", solo_context())
    watch, samples = Watch(model.layers), stream()
    name, routed = "layers.0.mlp.experts.down.weight", []
    before = lambda at, x, sizes: (routed.append(sizes) if at == name.replace("down", "up") else None, x)[1]  # noqa: E731
    for moments in samples.moments(model, watch, name, range(4), before):
        counts = [moments.of_matrix(expert)[1] for expert in range(4)]
        assert counts == routed[-1]
        assert sum(counts) == 12 * 2
    part = next(iter(samples.moments(model, watch, name, range(2, 3), as_it_is)))
    assert part.of_matrix(0)[1] == routed[0][2]


@torch.no_grad()
def test_a_pass_ends_where_the_weight_is_reached():
    model = build(LLAMA)
    reached = []
    watch = Watch(model.layers)
    see = lambda name, x, sizes: (reached.append(name), x)[1]  # noqa: E731
    list(stream().moments(model, watch, "layers.0.mlp.up.weight", range(1), see))
    assert reached == ["layers.0.attention.qkv.weight", "layers.0.attention.out.weight"] * 3


@torch.no_grad()
def test_other_inputs_can_be_given_back():
    model = build(GPT2)
    expected = model(Batch(TOKENS[0]))
    watch = Watch(model.layers)
    watch.see = lambda name, x, sizes: F.relu(x)
    changed = model(Batch(TOKENS[0]))
    watch.see = None
    assert torch.equal(model(Batch(TOKENS[0])), expected)
    assert not torch.allclose(changed, expected)
