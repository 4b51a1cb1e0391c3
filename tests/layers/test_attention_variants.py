"""Windows, sinks, linear biases and softmax offsets of a layer: literal masks, and formulas written out."""

from __future__ import annotations

import math

import torch

from megazero.config.tree.model import ModelConfig
from megazero.layers.attention_cores import LocalCore
from megazero.layers.initialize import initialize
from megazero.layers.inputs import Attends, LayerInputs
from megazero.layers.patterns import OwnSlopes, alibi_slopes, pattern_of
from megazero.layers.placement import Placement
from megazero.layers.rows import Rows
from megazero.models.batch import Batch
from megazero.models.bert import BERT
from megazero.models.chunk import Slice
from megazero.models.gpt import GPT
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.solo_group import SoloGroup
from megazero.mpu.thread_group import ThreadWorld
from megazero.ops.attention import Documents, Pattern, Slopes, attention
from megazero.ops.attention.softmax_offset import with_softmax_offset
from megazero.spec.resolve import model_spec
from tests.ops.lse import attention_with_lse
from tests.tables import over_table

SHAPE = {"num_layers": 3, "hidden_size": 24, "num_attention_heads": 6, "seq_length": 7}
CORE = LocalCore(SoloGroup())


def seen(config: ModelConfig, documents: torch.Tensor | None = None, length: int = 6) -> list[str]:
    """Which embedded tokens each row of the first layer's attention depends on, by its gradients."""
    context = solo_context()
    kind = GPT if config.family == "gpt" else BERT
    model = kind(Slice(model_spec(config), (29, 29), Placement.of(context, torch.float64)))
    initialize(model, 3, context.place)
    x = torch.randn(length, 1, config.hidden_size, dtype=torch.float64, requires_grad=True)
    inputs = LayerInputs(Rows(range(length), None if documents is None else Documents(documents)))
    out, _ = model.layers[0].attention(x, inputs)
    rows = []
    for row in out:
        (grad,) = torch.autograd.grad(row.sum(), x, retain_graph=True)
        rows.append("".join("1" if touched else "." for touched in grad.abs().sum((1, 2)) > 0))
    return rows


def test_a_window_of_three_before_shows_four_tokens():
    """Megatron-LM's (3, 0); transformers' sliding_window = 3 shows three, which is (2, 0) here."""
    assert seen(ModelConfig(**SHAPE, window_size=(3, 0))) == [
        *("1.....", "11....", "111...", "1111..", ".1111.", "..1111"),
    ]
    assert seen(ModelConfig(**SHAPE, window_size=(2, -1))) == [
        *("1.....", "11....", "111...", ".111..", "..111.", "...111"),
    ]


def test_a_window_of_both_sides():
    """A BERT's; -1 has no limit."""
    bert = {**SHAPE, "family": "bert"}
    assert seen(ModelConfig(**bert, window_size=(1, 2))) == [
        *("111...", "1111..", ".1111.", "..1111", "...111", "....11"),
    ]
    assert seen(ModelConfig(**bert, window_size=(-1, 0)))[3] == "1111.."


def test_sinks_are_the_first_tokens_of_each_document():
    config = ModelConfig(**SHAPE, window_size=(1, 0), window_sink_tokens=1)
    assert seen(config) == ["1.....", "11....", "111...", "1.11..", "1..11.", "1...11"]
    ids = torch.tensor([[0, 0, 0, 5, 5, 5]])
    assert seen(config, ids) == ["1.....", "11....", "111...", "...1..", "...11.", "...111"]
    ids = torch.tensor([[4, 4, 5, 5, 5, 5]])
    assert seen(config, ids)[4:] == ["..111.", "..1.11"]


def test_which_layers_have_a_window():
    def windows(**settings):
        return ModelConfig(**{**SHAPE, "num_layers": 6}, **settings).windows

    assert windows(window_size=(3, -1)) == ((3, 0),) * 6
    # Counted from 1: the third and the sixth have none.
    assert windows(window_size=(3, 0), window_attn_skip_freq=3) == ((3, 0), (3, 0), None) * 2
    listed = (1, 0, 0, 1, 1, 0)
    assert [w is not None for w in windows(window_size=(3, 0), window_attn_skip_freq=listed)] == [
        flag == 1 for flag in listed
    ]
    assert windows(window_size=(-1, 0)) == windows() == ()
    config = ModelConfig(**SHAPE, window_size=(3, 0), window_attn_skip_freq=2, window_sink_tokens=2)
    assert (
        pattern_of(model_spec(config).layers[0].attention.sight, 0, SoloGroup()).window,
        pattern_of(model_spec(config).layers[0].attention.sight, 0, SoloGroup()).sinks,
    ) == ((3, 0), 2)
    assert pattern_of(model_spec(config).layers[1].attention.sight, 1, SoloGroup()).idle


def test_slopes_by_hand():
    assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(1) == [2.0**-8]
    # Those of 4 heads, and then the first and the third of 8.
    assert alibi_slopes(6) == [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]
    assert len(alibi_slopes(112)) == 112  # BLOOM's


@over_table("tp", [1, 2, 3, 6])
def test_slopes_are_a_slice_of_the_models(tp):
    world = ThreadWorld(tp)

    def work(rank: int) -> torch.Tensor:
        context = thread_context(world, ProcessGrid(tp=tp), rank)
        slopes = OwnSlopes.of(6, Placement.of(context, torch.float32))
        assert slopes.on(torch.device("cpu")) is slopes.on(torch.device("cpu"))
        return slopes.on(torch.device("cpu")).by_head

    assert torch.cat(world.run(work)).tolist() == alibi_slopes(6)


def test_slopes_made_for_a_generation_serve_a_training():
    """Tensors that are made in inference mode cannot be saved for backward."""
    config = ModelConfig(**SHAPE, position_embedding_type="alibi", hidden_dropout=0.0, attention_dropout=0.0)
    model = GPT(Slice(model_spec(config), (29, 29), Placement.of(solo_context(), torch.float32)))
    initialize(model, 3, solo_context().place)
    tokens = torch.arange(14).view(2, 7)
    with torch.inference_mode():
        model(Batch(tokens))
    model(Batch(tokens)).sum().backward()


def written_out(q, k, v, allowed, slopes=None, offset=None, places=None):
    """Attention with another column for the offset: [s, b, n d]."""
    scores = torch.einsum("sbnd,tbnd->bnst", q, k) / math.sqrt(q.shape[-1])
    if slopes is not None:
        scores = scores + slopes.view(-1, 1, 1) * places
    scores = scores.masked_fill(~allowed, -math.inf)
    if offset is not None:
        column = offset.view(-1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
    probs = scores.softmax(-1)[..., : k.shape[0]].nan_to_num(0.0)
    return torch.einsum("bnst,tbnd->sbnd", probs, v).flatten(2)


def tensors(*shapes):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True) for shape in shapes
    ]


@over_table("columns", [None, "two of each"])
@over_table("causal", [True, False])
def test_tokens_that_a_layer_was_left_with_keep_their_distances(causal, columns):
    """random-LTD gives a layer some tokens of each sequence, and BERT's last layer has few queries."""
    rows = Rows(range(12)).select(torch.tensor([[0, 1], [2, 4], [3, 5], [7, 6], [8, 9], [11, 10]]))
    wanted = None if columns is None else torch.tensor([[1, 0], [5, 3]])
    q, k, v = tensors(*[(6, 2, 4, 8)] * 3)
    slopes, offset = torch.tensor([0.5, 0.25, 0.1, 0.7]), torch.tensor([0.1, -2.0, 3.0, 0.4])
    places = torch.tensor([[0, 2, 3, 7, 8, 11], [1, 4, 5, 6, 9, 10]])
    queries = places if wanted is None else places.gather(1, wanted.t())
    after = (places[:, None, :] - queries[:, :, None]).unsqueeze(1)
    allowed = (after >= -4) & (after <= (0 if causal else 2))
    chosen = q if wanted is None else q[wanted, torch.arange(2)]
    expected = written_out(chosen, k, v, allowed, slopes, offset, after)
    inputs = LayerInputs(rows, wanted=wanted)
    attends = Attends(0, causal, pattern=Pattern((4, 2)))
    got = CORE(q, k, v, inputs, attends, Slopes(slopes), offset)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)
    grads = [torch.autograd.grad(x.sum(), (q, k, v)) for x in (got, expected)]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=0)


def test_an_offset_comes_once_after_parts_are_merged():
    """Its gradient too: one that came with each part would count as often as there are parts."""
    q, k, v = tensors((5, 2, 4, 8), (5, 2, 2, 8), (5, 2, 2, 8))
    (offset,) = tensors((4,))
    repeated = (x.repeat_interleave(2, 2) for x in (k, v))
    expected = written_out(q, *repeated, torch.ones(5, 5).tril().bool(), offset=offset)
    whole = with_softmax_offset(*attention_with_lse(q, k, v, causal=True), offset)

    mask = torch.ones(5, 5).tril().bool()
    parts = [
        attention_with_lse(q, k[run], v[run], causal=False, mask=mask[:, run])
        for run in (slice(0, 2), slice(2, 5))
    ]
    lse = torch.logsumexp(torch.stack([lse for _, lse in parts]), 0)
    merged = sum(
        (lse_of - lse).exp().permute(2, 0, 1).unsqueeze(-1) * out.view(5, 2, 4, 8) for out, lse_of in parts
    )
    wanted = torch.autograd.grad(expected.square().sum(), (q, k, v, offset))
    for got in (whole, with_softmax_offset(merged, lse, offset)):
        torch.testing.assert_close(got, expected)
        for mine, theirs in zip(
            torch.autograd.grad(got.square().sum(), (q, k, v, offset)), wanted, strict=True
        ):
            torch.testing.assert_close(mine, theirs)


def test_a_row_that_sees_nothing_gives_nothing():
    """All of its softmax is the offset's."""
    q, k, v = tensors(*[(3, 1, 2, 4)] * 3)
    (offset,) = tensors((2,))
    mask = torch.tensor([[True, False, False], [False, False, False], [True, True, False]])
    out, lse = attention_with_lse(q, k, v, causal=False, mask=mask)
    got = with_softmax_offset(out, lse, offset)
    assert torch.equal(got[1], torch.zeros(1, 8, dtype=torch.float64))
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(got.sum(), (q, k, v, offset)))


def test_an_offset_of_zero_adds_one():
    q, k, v = tensors(*[(3, 1, 2, 4)] * 3)
    plain, lse = attention_with_lse(q, k, v, causal=True)
    sums = lse.exp().permute(2, 0, 1).unsqueeze(-1)
    expected = plain.view(3, 1, 2, 4) * sums / (sums + 1)
    torch.testing.assert_close(with_softmax_offset(plain, lse, torch.zeros(2)), expected.flatten(2))
    assert torch.equal(attention(q, k, v, causal=True), plain)
