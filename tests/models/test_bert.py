"""BERT against its formulas: logits, losses, and what padding, packing and uneven counts must not change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megazero.config.tree.model import ModelConfig
from megazero.layers.collectives import gather_features
from megazero.layers.initialize import initialize
from megazero.layers.placement import Placement
from megazero.models.bert import BERT
from megazero.models.bert_batch import BertBatch, BertCollate
from megazero.models.chunk import Slice
from megazero.mpu.context import ParallelContext, solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.param_spec import spec_of
from megazero.mpu.rng import derive_key
from megazero.mpu.thread_group import ThreadWorld
from megazero.ops import attention as front
from megazero.ops.counter_random import normal
from megazero.ops.dispatch import everything
from megazero.ops.native import available
from megazero.spec.resolve import model_spec
from tests.models.bert_samples import VOCABULARY, samples, widened
from tests.models.hf_weights import global_gradients, global_weights
from tests.models.plain_bert import PlainBert
from tests.tables import over_table

CPU = torch.device("cpu")
WIDTH = 24
SHAPE = ModelConfig(
    family="bert",
    num_layers=2,
    hidden_size=24,
    num_attention_heads=4,
    seq_length=2 * WIDTH,
    ffn_hidden_size=40,
    norm_epsilon=3e-4,
    init_method_std=0.15,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
POST = {"apply_residual_connection_post_layernorm": True}
VARIANTS = {
    "pre-norm": {},
    "post-norm": POST,
    "original": {**POST, "activation": "gelu_exact"},
    "one-head": {"bert_binary_head": False},
    "one-head-post-norm": {**POST, "bert_binary_head": False, "bert_head_activation": "gelu"},
    "tanh-head-untied": {"bert_head_activation": "gelu", "untie_embeddings_and_output_weights": True},
}


@torch.no_grad()
def build(context: ParallelContext, dtype: torch.dtype = torch.float32, sp: bool = False, **changes) -> BERT:
    """Random everywhere, also where initial weights are ones and zeros, or a swap of two would not show."""
    placement = Placement.of(context, dtype, sequence_parallel=sp)
    model = BERT(Slice(model_spec(SHAPE.model_copy(update=changes)), (VOCABULARY, 64), placement))
    initialize(model, 11, context.place)
    for parameter in model.parameters():
        spec = spec_of(parameter)
        if spec.init.kind != "normal":
            parameter += spec.shard(
                normal(derive_key(11, "noise", spec.name), spec.shape, 0.2), context.place
            )
    return model


def plain(config: ModelConfig) -> PlainBert:
    return PlainBert(
        config.num_layers,
        config.num_attention_heads,
        config.apply_residual_connection_post_layernorm,
        config.activation == "gelu_exact",
        config.bert_head_activation == "gelu_exact",
        config.bert_binary_head,
        config.norm_epsilon,
    )


def batch_of(arrays, **settings) -> BertBatch:
    return BertCollate(VOCABULARY, CPU, **settings)(arrays, tuple(range(len(arrays["lengths"]))))


UNEVEN = samples([WIDTH, 3, 11, 8, 17], [7, 1, 0, 3, 5], WIDTH)


@over_table(("tp", "sp", "packed"), [(1, False, False), (4, True, True)])
@over_table("variant", VARIANTS)
def test_logits_losses_and_gradients_are_those_of_the_formulas(variant, tp, sp, packed):
    """In float64, with the vocabulary padded and sliced; the formulas see each sample alone."""
    config = SHAPE.model_copy(update=VARIANTS[variant])
    world = ThreadWorld(tp)

    def work(rank: int):
        context = thread_context(world, ProcessGrid(tp=tp), rank)
        model = build(context, torch.float64, sp, **VARIANTS[variant])
        batch = batch_of(UNEVEN, packed=packed)
        logits, order = model(batch)
        words = gather_features(logits, context.tp)[:, 0, :VOCABULARY]
        sums = model.run(batch).terms
        (sums["lm"] / 16 + sums.get("sop", 0) / 5).backward()
        for parameter in model.parameters():
            if spec_of(parameter).partial_grad:  # each rank saw its own rows
                context.tp.all_reduce(parameter.grad).wait()
        weights, gradients = (f(model, context.groups) for f in (global_weights, global_gradients))
        return words.detach(), order, sums, weights, gradients

    words, order, sums, weights, gradients = world.run(work)[-1]
    weights = {name: each.requires_grad_() for name, each in weights.items()}
    formulas = plain(config)
    lm, sop = formulas.losses(weights, UNEVEN)
    (lm / 16 + sop / 5).backward()
    expected_words, expected_order = [], []
    for row, length in enumerate(UNEVEN["lengths"].tolist()):
        text = (torch.from_numpy(UNEVEN[name][row, :length]) for name in ("tokens", "token_types"))
        each, one = formulas.logits(weights, formulas.hidden(weights, *text))
        expected_words.append(each[np.flatnonzero(UNEVEN["loss_mask"][row])])
        expected_order.append(one)
    torch.testing.assert_close(words, torch.cat(expected_words).detach(), rtol=1e-9, atol=1e-9)
    assert words.std() > 0.3
    assert sums["lm"].item() == pytest.approx(lm.item(), rel=1e-6)
    hits = (words.argmax(1).numpy() == UNEVEN["labels"][UNEVEN["loss_mask"] == 1]).sum()
    assert sums["lm_accuracy"].item() == hits
    assert sums["padding"].item() == 5 * WIDTH - UNEVEN["lengths"].sum()
    if config.bert_binary_head:
        found = torch.stack(expected_order)
        torch.testing.assert_close(order.detach(), found.detach(), rtol=1e-9, atol=1e-9)
        assert sums["sop"].item() == pytest.approx(sop.item(), rel=1e-6)
        assert sums["sop_accuracy"].item() == (found.argmax(1).numpy() == UNEVEN["is_random"]).sum()
    else:
        assert order is None
        assert not {"sop", "sop_accuracy"} & sums.keys()
    assert gradients.keys() == weights.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, weights[name].grad, rtol=1e-5, atol=1e-7, msg=name)


# Those for a GPU have tests of their own.
NOT_HERE = ("varlen", "cuda", "flex", "cuda_by_mask", "planned")
IMPLEMENTATIONS = [row.name for row in front.ATTENTION.implementations if row.name not in NOT_HERE]


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request, monkeypatch):
    """Attention computed in this way, whatever the table would choose."""
    if "native" in request.param and not available():
        pytest.skip("the compiled kernels are not built")
    rows = {each.name: each for each in front.ATTENTION.implementations}
    chosen = replace(rows[request.param], serves=everything)
    table = (rows["reference"],) if request.param == "reference" else (chosen, rows["reference"])
    monkeypatch.setattr(front.table, "ATTENTION", replace(front.ATTENTION, implementations=table))
    return request.param


@torch.no_grad()
def test_padding_reaches_no_real_position(implementation):
    """Neither how much of it there is nor what it says (Megatron-LM#791, #952)."""
    model, arrays = build(solo_context()), samples([5, 3, 7], [2, 1, 3], WIDTH)
    alone = [
        model.hidden(batch_of({k: v[i : i + 1] for k, v in arrays.items()}, multiple=1))[:, 0]
        for i in range(3)
    ]
    for multiple in (1, 8, WIDTH):
        batch = batch_of(arrays, multiple=multiple)
        noise = torch.from_numpy(np.random.default_rng(multiple).integers(0, VOCABULARY, batch.tokens.shape))
        outside = batch.places.documents.ids == -1
        kinds = torch.where(outside, noise % 2, batch.places.token_types)
        scrambled = replace(
            batch,
            tokens=torch.where(outside, noise, batch.tokens),
            places=replace(batch.places, token_types=kinds),
        )
        hidden, words = model.hidden(scrambled), model(scrambled)
        for sample, expected in enumerate(alone):
            torch.testing.assert_close(hidden[: len(expected), sample], expected, rtol=1e-5, atol=1e-5)
        for found, expected in zip(words, model(batch), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_sample_of_three_tokens_among_long_ones_has_finite_gradients(implementation):
    """Rows of padding see padding alone: nowhere does a softmax of nothing make a NaN."""
    model = build(solo_context())
    sums = model.run(batch_of(samples([WIDTH, 3], [4, 1], WIDTH), multiple=WIDTH)).terms
    (sums["lm"] + sums["sop"]).backward()
    for parameter in model.parameters():
        assert parameter.grad.isfinite().all()
        assert parameter.grad.any()


def gradients_of(model: BERT, batch: BertBatch) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    model.zero_grad()
    sums = model.run(batch).terms
    (sums["lm"] + sums["sop"]).backward()
    values = {name: each.item() for name, each in sums.items()}
    return values, {spec_of(each).name: each.grad.clone() for each in model.parameters()}


def test_packing_changes_neither_losses_nor_gradients():
    model = build(solo_context())
    arrays = samples([WIDTH, 3, 11, 8, 17, 5, 5, 1], [7, 1, 0, 3, 5, 2, 5, 1], WIDTH)
    loose, tight = batch_of(arrays), batch_of(arrays, packed=True)
    assert (len(loose.tokens), len(tight.tokens)) == (8, 4)
    expected, found = gradients_of(model, loose), gradients_of(model, tight)
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=2e-6)


def test_columns_left_out_change_nothing_not_even_what_is_dropped():
    model = build(solo_context(), hidden_dropout=0.3, attention_dropout=0.3)
    arrays = samples([15, 3, 11], [6, 1, 4], WIDTH)
    narrow = batch_of(arrays, seed=5)
    wide = batch_of(widened(arrays, 2 * WIDTH), seed=5, multiple=2 * WIDTH)
    assert (narrow.tokens.shape, wide.tokens.shape) == ((3, 16), (3, 2 * WIDTH))
    expected, found = gradients_of(model, wide), gradients_of(model, narrow)
    assert found[0] | {"padding": 0} == pytest.approx(expected[0] | {"padding": 0}, rel=1e-6)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=2e-6)
    undropped, _ = gradients_of(model, batch_of(arrays))
    assert abs(undropped["lm"] - found[0]["lm"]) > 0.1


def test_nothing_to_restore_trains_the_rest_without_a_nan():
    model = build(solo_context())
    sums, gradients = gradients_of(model, batch_of(samples([9, 3], [0, 0], WIDTH)))
    assert (sums["lm"], sums["lm_accuracy"]) == (0.0, 0.0)
    assert sums["sop"] > 0
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    assert not gradients["head.bias"].any()
    assert gradients["pooler.weight"].any()


def test_only_what_is_read_goes_through_the_head(monkeypatch):
    model, seen = build(solo_context()), {}
    for name in ("dense", "norm", "pooler"):
        getattr(model.head, name).register_forward_hook(
            lambda module, args, out, name=name: seen.update({name: out.shape[:-1].numel()})
        )
    model(batch_of(UNEVEN))
    assert seen == {"dense": 16, "norm": 16 + 5, "pooler": 5}


def test_the_parameters_of_the_345m_are_as_many_as_published():
    shape = ModelConfig(
        family="bert", num_layers=24, hidden_size=1024, num_attention_heads=16, seq_length=512
    )
    placement = Placement.of(solo_context(), torch.float32)
    model = BERT(Slice(model_spec(shape), (30522, 30592), replace(placement, device=torch.device("meta"))))
    assert sum(p.numel() for p in model.parameters()) == 336_297_858


def test_initial_values_and_weight_decay_of_what_bert_adds():
    model = BERT(Slice(model_spec(SHAPE), (VOCABULARY, 64), Placement.of(solo_context(), torch.float32)))
    found = {spec_of(p).name: spec_of(p) for p in model.parameters()}
    wide, ones, zeros = ("normal", 0.15, True), ("ones", 0.0, False), ("zeros", 0.0, False)
    expected = {
        "embedding.token_type.weight": wide,
        "head.dense.weight": wide,
        "head.dense.bias": zeros,
        "head.norm.weight": ones,
        "head.norm.bias": zeros,
        "head.bias": zeros,
        "pooler.weight": wide,
        "pooler.bias": zeros,
        "binary_head.weight": wide,
        "binary_head.bias": zeros,
    }
    assert {
        name: (found[name].init.kind, found[name].init.std, found[name].weight_decay) for name in expected
    } == expected
    assert found["head.bias"].shape == (VOCABULARY,)


def test_terms_are_both_losses_and_what_is_told_beside_them():
    for binary, expected in (
        (True, [("lm", 1), ("sop", 1), ("lm_accuracy", 0), ("sop_accuracy", 0), ("padding", 0)]),
        (False, [("lm", 1), ("lm_accuracy", 0), ("padding", 0)]),
    ):
        model = build(solo_context(), bert_binary_head=binary)
        assert [(term.name, term.coefficient) for term in model.terms] == expected
