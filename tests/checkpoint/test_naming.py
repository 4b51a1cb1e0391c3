"""The notation of rules, and that the families' tables cover both sides."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from megazero.checkpoint.box import Box, gaps_or_overlaps
from megazero.checkpoint.naming import Table, TensorLink, TensorRule, cut, groups_of
from megazero.checkpoint.part import Key
from megazero.formats.hf.config_json import architecture_of
from megazero.spec.resolve import model_spec
from tests.formats.hf.samples import GPT2, LLAMA, MODELS, VOCAB, parameter_specs
from tests.models.hf_weights import decoder_model
from tests.tables import over_table


def table_of(name: str) -> Table:
    model = MODELS[name]
    return Table.of(architecture_of(model).rules, model_spec(model), VOCAB)


@over_table(
    ("text", "groups"),
    [
        ("h", (("h",),)),
        ("v h", (("v",), ("h",))),
        ("h (s g d)", (("h",), ("s", "g", "d"))),
        ("(g s d) h", (("g", "s", "d"), ("h",))),
        ("(c f)", (("c", "f"),)),
        ("(a b) c (d e) f", (("a", "b"), ("c",), ("d", "e"), ("f",))),
    ],
)
def test_patterns_are_groups_of_letters(text, groups):
    assert groups_of(text) == groups


def test_a_fused_transposed_weight_is_seen_as_ours():
    """Our tensor is [g, s, d, h] = [2, 3, 1, 2], theirs [h, s g d] = [2, 6], with literal values."""
    changes = {"num_layers": 1, "num_attention_heads": 2, "hidden_size": 2, "kv_channels": 1}
    model = GPT2.model_copy(update=changes)
    rule = TensorRule("{i}.qkv", "g s d h", "c_attn", "h (s g d)")
    (link,) = Table.of([rule], model_spec(model), 5).links
    assert link == TensorLink(
        Key("0.qkv"), (2, 3, 1, 2), Box.whole((2, 3, 1, 2)), "c_attn", ((3,), (1, 0, 2))
    )
    # columns: query of head 0, of head 1, keys, values
    theirs = torch.tensor([[1, 2, 3, 4, 5, 6], [10, 20, 30, 40, 50, 60]])
    assert link.as_ours(theirs).tolist() == [
        [[[1, 10]], [[3, 30]], [[5, 50]]],
        [[[2, 20]], [[4, 40]], [[6, 60]]],
    ]
    assert link.as_ours(theirs).data_ptr() == theirs.data_ptr()


def test_parts_of_a_fused_weight_are_several_of_theirs():
    """Two groups of two query heads with one key and value; heads of width 1."""
    model = LLAMA.model_copy(update={"num_attention_heads": 4, "kv_channels": 1, "hidden_size": 3})
    links = Table.of(architecture_of(LLAMA).rules, model_spec(model), 5).by_key[
        Key("layers.1.attention.qkv.weight")
    ]
    assert [(link.theirs.split(".")[-2], link.box, link.their_shape) for link in links] == [
        ("q_proj", Box((0, 0, 0, 0), (2, 2, 1, 3)), (4, 3)),
        ("k_proj", Box((0, 2, 0, 0), (2, 1, 1, 3)), (2, 3)),
        ("v_proj", Box((0, 3, 0, 0), (2, 1, 1, 3)), (2, 3)),
    ]


@over_table("name", MODELS)
def test_ours_are_the_parameters_of_our_model_each_element_once(name):
    table = table_of(name)
    assert {key.name: shape for key, shape in table.shapes.items()} == parameter_specs(MODELS[name])
    for key, links in table.by_key.items():
        assert gaps_or_overlaps(table.shapes[key], [link.box for link in links]) is None


@over_table("name", MODELS)
def test_theirs_are_the_parameters_of_transformers_model_each_once(name):
    pytest.importorskip("transformers")
    with torch.device("meta"):
        # Tied ones count once.
        theirs = {n: tuple(p.shape) for n, p in decoder_model(MODELS[name], VOCAB).named_parameters()}
    links = table_of(name).links
    assert len({link.theirs for link in links}) == len(links)
    assert {link.theirs: link.their_shape for link in links} == theirs


def test_tensors_come_layer_by_layer():
    layers = [link.theirs.split(".")[2] for link in table_of("llama").links if ".layers." in link.theirs]
    assert layers == sorted(layers)
    assert [table_of("llama").links[i].key.name for i in (0, -2, -1)] == [
        "embedding.word.weight",
        "final_norm.weight",
        "head.weight",
    ]


@over_table(
    ("take", "their_dims"),
    [(None, "h (s g d)"), (None, "(g s d) h"), (("s", slice(0, -2)), "(g s d) h"), (None, "(d g) (h s)")],
)
def test_rows_of_every_box_hold_it_and_are_seen_as_ours(take, their_dims):
    """A sweep over all boxes of our tensor."""
    changes = {"num_layers": 1, "kv_channels": 2, "hidden_size": 3, "num_attention_heads": 4}
    model = LLAMA.model_copy(update=changes)
    (link,) = Table.of([TensorRule("{i}", "g s d h", "x", their_dims, take)], model_spec(model), 5).links
    theirs = torch.arange(link.box.numel).view(link.their_shape)
    ours = link.as_ours(theirs)
    ranges = [[(a, b) for a in range(n) for b in range(a + 1, n + 1)] for n in link.box.shape]
    for spans in product(*ranges):
        box = Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))
        rows, covered = link.rows_of(box)
        assert covered.overlap(box) == box
        seen = link.as_ours(theirs[rows], covered)
        assert torch.equal(seen, ours[covered.slices])


def test_few_rows_are_read_for_one_head():
    """The key of one group is read without the rows of other groups."""
    (link,) = (x for x in table_of("llama").links if x.theirs.endswith("layers.0.self_attn.k_proj.weight"))
    assert link.box == Box((0, 3, 0, 0), (2, 1, 10, 36))  # after 3 queries
    rows, covered = link.rows_of(Box((1, 3, 4, 5), (1, 1, 2, 7)))
    assert rows == slice(14, 16)
    assert covered == Box((1, 3, 4, 0), (1, 1, 2, 36))


@over_table("limit", [1, 2, 3, 5, 8, 30, 100])
def test_a_cut_box_is_covered_by_small_parts(limit):
    whole = Box((1, 0, 2), (3, 4, 5))
    parts = list(cut(whole, (1, 0, 2), limit))
    assert all(part.numel <= limit for part in parts)
    assert gaps_or_overlaps((3, 4, 5), [part.shifted((-1, 0, -2)) for part in parts]) is None
    rows = list(cut(whole, (1,), limit))
    assert {part.shape[0::2] for part in rows} == {(3, 5)}  # only the named dim is cut
