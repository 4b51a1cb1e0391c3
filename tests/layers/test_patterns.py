"""Layers with block-sparse attention: what they see, on which ranks, and from which settings."""

from __future__ import annotations

import hashlib

import torch

from megazero.config.tree.model import ModelConfig
from megazero.layers.patterns import pattern_of
from megazero.layers.sparse_layouts import layout_of
from megazero.models.batch import Batch
from megazero.mpu.solo_group import SoloGroup
from megazero.mpu.thread_group import ThreadWorld
from megazero.ops.attention import attention
from megazero.spec.parts import SightSpec
from megazero.spec.resolve import model_spec
from tests.inference.samples import build
from tests.tables import over_table

# Of 12 blocks of 2 tokens; every key that a mode has acts in one of these.
MODES = {
    "fixed": {"sparse_attention": "fixed", "sparse_num_local_blocks": 3},
    "fixed, two global": {"sparse_attention": "fixed", "sparse_num_global_blocks": 2},
    "fixed, patterns": {
        "sparse_attention": "fixed",
        "sparse_different_layout_per_head": True,
        "sparse_num_different_global_patterns": 4,
    },
    "variable": {
        "sparse_attention": "variable",
        "sparse_local_window_blocks": (1, 2),
        "sparse_global_block_indices": (3,),
        "sparse_global_block_end_indices": (6,),
        "sparse_num_random_blocks": 1,
    },
    "bigbird": {"sparse_attention": "bigbird", "sparse_num_random_blocks": 2},
    "bigbird, by head": {
        "sparse_attention": "bigbird",
        "sparse_num_random_blocks": 1,
        "sparse_different_layout_per_head": True,
    },
    "bslongformer": {"sparse_attention": "bslongformer", "sparse_global_block_indices": (0, 7)},
    "local window": {"sparse_attention": "local_sliding_window"},
}


def model(mode: str = "fixed", **changes) -> ModelConfig:
    shape = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 24}
    settings = {**shape, "sparse_block": 2, "init_method_std": 0.4, **MODES[mode], **changes}
    return ModelConfig(**settings)


def sight(config: ModelConfig) -> SightSpec:
    return model_spec(config).layers[0].attention.sight


def shares(config: ModelConfig, layer: int, ranks: int) -> list[torch.Tensor]:
    """The layouts of each of the tensor-parallel ranks."""
    world, members = ThreadWorld(ranks), tuple(range(ranks))
    found = [pattern_of(sight(config), layer, world.group("tp", r, members)).layout for r in members]
    return [layout.blocks for layout in found if layout is not None]


@over_table("ranks", [1, 2, 4])
@over_table("mode", MODES)
def test_a_rank_has_its_heads_of_the_whole_list(mode, ranks):
    """Patterns rotate over all heads, and random blocks are drawn by a head's number among all."""
    whole = layout_of(sight(model(mode)).sparse, 1, causal=True).expand(4, -1, -1)
    found = [blocks.expand(4 // ranks, -1, -1) for blocks in shares(model(mode), 1, ranks)]
    assert torch.equal(torch.cat(found), whole)


def digest(layout: torch.Tensor) -> str:
    return hashlib.sha256(layout.numpy().tobytes()).hexdigest()[:16]


def test_random_blocks_are_a_function_of_seed_layer_and_head():
    """A run that goes on, on any ranks and in another version, must draw these again."""
    config = model("bigbird, by head")
    assert digest(layout_of(sight(config).sparse, 0, causal=True)) == "97d5ade7c83eac7e"
    others = [
        layout_of(sight(config).sparse, 1, causal=True),
        layout_of(sight(config.model_copy(update={"sparse_seed": 1})).sparse, 0, causal=True),
    ]
    layouts = [layout_of(sight(config).sparse, 0, causal=True), *others]
    assert len({digest(layout) for layout in layouts}) == 3
    assert len({digest(head.clone()) for head in layouts[0]}) == 4


def test_models_of_other_layouts_live_beside_each_other():
    """DeepSpeed keeps one layout by length for all models of a process."""
    one, other = model("fixed"), model("bslongformer")
    tokens = torch.arange(24).unsqueeze(0)
    alone = [build(config)(Batch(tokens)) for config in (one, other)]
    both = [build(config) for config in (one, other)]
    assert all(torch.equal(m(Batch(tokens)), a) for m, a in zip(both * 2, alone * 2, strict=True))
    assert not torch.equal(*alone)


@over_table("mode", MODES)
@torch.no_grad()
def test_no_token_sees_a_later_one(mode):
    """The layouts themselves leak: a block has its own later tokens, and two global ones see each other."""
    gpt, tokens = build(model(mode)), torch.arange(24).unsqueeze(0)
    before = gpt(Batch(tokens))
    for place in range(1, 24):
        changed = tokens.clone()
        changed[:, place:] += 20
        after = gpt(Batch(changed))
        assert torch.equal(after[:place], before[:place])
        assert not torch.equal(after[place], before[place])


@over_table("mode", MODES)
def test_a_shorter_sequence_is_the_beginning_of_a_longer_one(mode):
    gpt, tokens = build(model(mode)), torch.arange(24).unsqueeze(0)
    with torch.no_grad():
        whole = gpt(Batch(tokens))
        for length in (5, 13, 22):
            torch.testing.assert_close(gpt(Batch(tokens[:, :length])), whole[:length])


KEYS = {
    "sparse_block": 4,
    "sparse_num_local_blocks": 2,
    "sparse_num_global_blocks": 2,
    "sparse_horizontal_global_attention": True,
    "sparse_num_random_blocks": 3,
    "sparse_seed": 9,
    "sparse_local_window_blocks": (3,),
    "sparse_global_block_indices": (2,),
    "sparse_num_sliding_window_blocks": 5,
}
ACTS = {
    "fixed": {
        "sparse_block",
        "sparse_num_local_blocks",
        "sparse_num_global_blocks",
        "sparse_horizontal_global_attention",
    },
    "variable": {
        "sparse_block",
        "sparse_horizontal_global_attention",
        "sparse_num_random_blocks",
        "sparse_seed",
        "sparse_local_window_blocks",
        "sparse_global_block_indices",
    },
    "bigbird": {
        "sparse_block",
        "sparse_num_global_blocks",
        "sparse_num_random_blocks",
        "sparse_seed",
        "sparse_num_sliding_window_blocks",
    },
    "bslongformer": {"sparse_block", "sparse_global_block_indices", "sparse_num_sliding_window_blocks"},
    "local window": {"sparse_block", "sparse_num_sliding_window_blocks"},
}


@over_table("mode", ACTS)
def test_a_key_acts_where_it_is_taken(mode):
    """Elsewhere the rules refuse it: tests/config/test_sparse.py."""
    for key, value in KEYS.items():
        changes = {"sparse_global_block_end_indices": ()} if mode == "variable" else {}
        config = model(mode, family="bert", **changes)
        changed = config.model_copy(update={key: value})
        differs = not torch.equal(
            layout_of(sight(config).sparse, 0, causal=False),
            layout_of(sight(changed).sparse, 0, causal=False),
        )
        assert differs == (key in ACTS[mode]), key


def expected(config: ModelConfig, layer: int, q, k, v):
    """Attention by the formula, over the tokens of the blocks that the layer sees."""
    length = len(q)
    seen = layout_of(sight(config).sparse, layer, causal=True).repeat_interleave(config.sparse_block, 1)
    seen = seen.repeat_interleave(config.sparse_block, 2)[:, :length, :length].tril()
    scores = torch.einsum("sbnd,tbnd->bnst", q, k) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("bnst,tbnd->sbnd", weights, v).flatten(2)


@over_table("length", [24, 21])
@over_table("mode", MODES)
def test_results_and_gradients_are_those_of_the_formula(mode, length):
    """Also where the sequence ends within a block."""
    torch.manual_seed(0)
    config = model(mode)
    pattern = pattern_of(sight(config), 1, SoloGroup())
    inputs = [torch.randn(length, 2, 4, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    weight = torch.randn(length, 2, 32, dtype=torch.float64)

    def run(result):
        return [result, *torch.autograd.grad((result * weight).sum(), inputs)]

    found = run(attention(*inputs, causal=True, pattern=pattern))
    for ours, theirs in zip(found, run(expected(config, 1, *inputs)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_packed_documents_are_seen_by_blocks_of_their_row():
    torch.manual_seed(0)
    config = model("bslongformer")
    pattern = pattern_of(sight(config), 0, SoloGroup())
    q, k, v = (torch.randn(24, 2, 4, 8, dtype=torch.float64) for _ in range(3))
    ids = torch.tensor([[0] * 7 + [1] * 17, [0] * 16 + [1] * 5 + [-1] * 3])
    seen = (
        layout_of(sight(config).sparse, 0, causal=True).repeat_interleave(2, 1).repeat_interleave(2, 2).tril()
    )
    seen = seen & (ids.unsqueeze(2) == ids.unsqueeze(1)).unsqueeze(1)
    scores = torch.einsum("sbnd,tbnd->bnst", q, k) / 8**0.5
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    right = torch.einsum("bnst,tbnd->sbnd", weights, v).flatten(2)
    found = attention(q, k, v, causal=True, pattern=pattern, document_ids=ids)
    torch.testing.assert_close(found, right)


@over_table("block", [16, 64, 128])
@over_table("mode", MODES)
def test_blocks_of_any_size_with_padding(mode, block):
    """Both ways, in fp32, where the sequence ends within a block and samples before it."""
    torch.manual_seed(0)
    config = model(mode, family="bert", seq_length=12 * block, sparse_block=block)
    pattern, length = pattern_of(sight(config), 0, SoloGroup()), 5 * block - 3
    inputs = [torch.randn(length, 2, 4, 8, requires_grad=True) for _ in range(3)]
    kept = torch.arange(length) < torch.tensor([[length], [3 * block + 1]])
    seen = (
        layout_of(sight(config).sparse, 0, causal=False)
        .repeat_interleave(block, 1)
        .repeat_interleave(block, 2)
    )
    seen = seen[:, :length, :length] & (kept.unsqueeze(2) == kept.unsqueeze(1)).unsqueeze(1)
    scores = torch.einsum("sbnd,tbnd->bnst", *inputs[:2]) / 8**0.5
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    right = torch.einsum("bnst,tbnd->sbnd", weights, inputs[2]).flatten(2)
    ids = torch.where(kept, 0, -1)
    found = attention(*inputs, causal=False, pattern=pattern, document_ids=ids)
    pairs = zip(
        [found, *torch.autograd.grad(found.square().sum(), inputs)],
        [right, *torch.autograd.grad(right.square().sum(), inputs)],
        strict=True,
    )
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
