"""DeepSpeed's `ops.sparse_attention`: its classes give its numbers, on models of transformers too."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megazero.deepspeed.config.settings import read_settings
from megazero.deepspeed.config.user import DeepSpeedConfig
from megazero.deepspeed.legacy.sparse.attention import BertSparseSelfAttention, SparseSelfAttention
from megazero.deepspeed.legacy.sparse.configs import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)
from megazero.deepspeed.legacy.sparse.products import MatMul, Softmax
from megazero.deepspeed.legacy.sparse.utils import SparseAttentionUtils as Utils
from megazero.errors import ConfigError
from megazero.ops.attention import attention
from tests.tables import over_table

CONFIGS = {
    "dense": DenseSparsityConfig(2, 4),
    "fixed": FixedSparsityConfig(2, 4, True, 4, 1, "bidirectional", True, 2),
    "fixed, one way": FixedSparsityConfig(2, 4, num_global_blocks=2, attention="unidirectional"),
    "variable": VariableSparsityConfig(2, 4, True, 1, [1, 2], [3], [5]),
    "bigbird": BigBirdSparsityConfig(2, 4, True, attention="unidirectional"),
    "bslongformer": BSLongformerSparsityConfig(2, 4, False, 3, [0, 5]),
    "local": LocalSlidingWindowSparsityConfig(2, 4, 3),
}


def picture(layout):
    return " ".join("".join(map(str, row)) for row in layout.tolist())


def test_layouts_are_deepspeeds():
    layout = FixedSparsityConfig(4).make_layout(96)
    assert (layout.shape, layout.dtype) == ((4, 6, 6), torch.int64)
    assert {picture(head) for head in layout} == {"111101 111101 111101 111101 000111 000111"}
    assert picture(LocalSlidingWindowSparsityConfig(1).make_layout(64)[0]) == "1000 1100 0110 0011"
    assert picture(BigBirdSparsityConfig(1, num_random_blocks=0).make_layout(128)[0]).startswith(
        "11111111 11100000 11110000"
    )
    layout = FixedSparsityConfig(4, 16, True, num_different_global_patterns=4).make_layout(64)
    assert [picture(head) for head in layout] == ["1111 1111 1111 1111"] * 4


def test_random_layouts_differ_by_layer_and_are_the_same_again():
    first, again, other = (
        BigBirdSparsityConfig(2, 4, True, layer=layer).make_layout(128) for layer in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])


def test_a_layout_of_ones_own():
    class Diagonal(SparsityConfig):
        def __init__(self, num_heads):
            super().__init__(num_heads, 4, False)

        def make_layout(self, seq_len):
            layout = self.setup_layout(seq_len)
            layout[0].fill_diagonal_(1)
            return self.check_and_propagate_first_head_layout(layout)

    x = torch.randn(1, 2, 8, 4)
    found = SparseSelfAttention(Diagonal(2), max_seq_length=16)(x, x, x)
    half = x[:, :, 4:]
    torch.testing.assert_close(found[:, :, 4:], (half @ half.mT / 2).softmax(-1) @ half)


def test_the_blocks_are_one_object_until_the_layout_changes(monkeypatch):
    """What attention has found out about a layout it keeps by that object."""
    seen = []

    def watched(*parts, pattern, **how):
        seen.append(pattern.layout)
        return attention(*parts, pattern=pattern, **how)

    monkeypatch.setattr("megazero.deepspeed.legacy.sparse.attention.attention", watched)
    layer = SparseSelfAttention(LocalSlidingWindowSparsityConfig(2, 4, 1), max_seq_length=16)
    x = torch.randn(1, 2, 16, 4)
    narrow = layer(x, x, x)
    torch.testing.assert_close(layer(*[x[:, :, :8]] * 3), narrow[:, :, :8])
    assert seen[0] is seen[1]
    other = SparseSelfAttention(LocalSlidingWindowSparsityConfig(2, 4, 3), max_seq_length=16)
    layer.load_state_dict(other.state_dict())
    assert torch.equal(layer(x, x, x), other(x, x, x))
    assert not torch.equal(layer(x, x, x), narrow)


REFUSED = {
    "must be a multiple of the block": lambda: FixedSparsityConfig(2).make_layout(40),
    "`num_local_blocks` must": lambda: FixedSparsityConfig(2, num_global_blocks=3),
    "`different_layout_per_head` must": lambda: FixedSparsityConfig(2, num_different_global_patterns=2),
    "`num_different_global_patterns` must": lambda: FixedSparsityConfig(
        2, 16, True, num_different_global_patterns=5
    ),
    "with `horizontal_global_attention`": lambda: VariableSparsityConfig(
        2, attention="unidirectional", horizontal_global_attention=True
    ),
    "`attention` must be unidirectional or": lambda: BigBirdSparsityConfig(2, attention="causal"),
    "`global_block_end_indices` must": lambda: BSLongformerSparsityConfig(
        2, global_block_indices=[0, 3], global_block_end_indices=[1, 3]
    ),
    "`num_sliding_window_blocks` must": lambda: LocalSlidingWindowSparsityConfig(2).make_layout(32),
    "`attn_mask_mode` must": lambda: SparseSelfAttention(FixedSparsityConfig(2), attn_mask_mode="or"),
    "`max_seq_length` .2048.": lambda: SparseSelfAttention(FixedSparsityConfig(2)).get_layout(4096),
    "only self-attention is sparse": lambda: SparseSelfAttention(FixedSparsityConfig(2))(
        *(torch.zeros(1, 4, 16, 8) for _ in range(3))
    ),
    "`mode` must be": lambda: MatMul(torch.ones(1, 1, 1), 4, "ddd"),
    "`bert` or a `roberta`": lambda: Utils.extend_position_embedding(torch.nn.Linear(1, 1), 8),
}


@over_table("says", REFUSED)
def test_what_does_not_fit_is_refused(says):
    with pytest.raises(ValueError, match=says):
        REFUSED[says]()


def expected(config, q, k, v, rpe=None, key_padding=None, attn=None):
    """By the formula, over a dense mask; masks as they are added to the scores."""
    size, longest = config.block, config.make_layout(48)
    seen = longest.repeat_interleave(size, 1).repeat_interleave(size, 2)[:, : q.shape[2], : q.shape[2]] != 0
    if getattr(config, "attention", "") == "unidirectional":
        seen = seen.tril()
    scores = q @ k.mT / q.shape[-1] ** 0.5
    for added in (rpe, key_padding, attn):
        scores = scores if added is None else scores + added
    return scores.masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num() @ v


@over_table("length", [48, 36])
@over_table("name", CONFIGS)
def test_attention_is_the_formula_with_both_kinds_of_masks(name, length):
    torch.manual_seed(0)
    config = CONFIGS[name]
    q, k, v = inputs = [
        torch.randn(3, 2, length, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)
    ]
    rpe = torch.randn(2, length, length, dtype=torch.float64)
    kept = (torch.arange(length) < torch.tensor([[length], [length - 5], [9]])).double()
    attn = (torch.rand(length, length) > 0.1).double()
    hidden = kept.log()[:, None, None]
    plain = SparseSelfAttention(config, max_seq_length=48)
    other = SparseSelfAttention(config, "mul", "add", 48)
    weight = torch.randn_like(q)
    for found, right in (
        (plain(q, k, v), expected(config, q, k, v)),
        (
            plain(q, k, v, rpe, -1e4 * (1 - kept), attn),
            expected(config, q, k, v, rpe, -1e4 * (1 - kept[:, None, None]), attn.log()),
        ),
        (other(q, k, v, None, kept, attn), expected(config, q, k, v, None, hidden, attn)),
    ):
        pairs = zip(
            [found, *torch.autograd.grad((found * weight).sum(), inputs)],
            [right, *torch.autograd.grad((right * weight).sum(), inputs)],
            strict=True,
        )
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs.nan_to_num())


@over_table("name", CONFIGS)
def test_products_are_attention(name):
    """As DeepSpeed's module composes them: sdd with a transposed key, softmax, dsd."""
    torch.manual_seed(0)
    config = CONFIGS[name]
    layout, size = config.make_layout(48), config.block
    q, k, v = (torch.randn(3, 2, 48, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = torch.ones(48, 48, dtype=torch.float64)
    if getattr(config, "attention", "") == "unidirectional":
        mask = mask.tril()
    padding = torch.zeros(3, 48, dtype=torch.float64)
    padding[1, 40:] = -1e4
    rpe = torch.randn(2, 48, 48, dtype=torch.float64)
    scores = MatMul(layout, size, "sdd", trans_b=True)(q, k)
    assert scores.shape == (3, int(layout.sum()), size, size)
    weights = Softmax(layout, size)(scores, 8**-0.5, rpe, padding, mask, "add", "mul")
    found = MatMul(layout, size, "dsd")(weights, v)
    right = SparseSelfAttention(config, max_seq_length=48)(q, k, v, rpe, padding, mask)
    torch.testing.assert_close(found, right)
    for ours, theirs in zip(
        torch.autograd.grad(found.sum(), (q, k, v)), torch.autograd.grad(right.sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@over_table("trans_b", [False, True])
@over_table("trans_a", [False, True])
@over_table("mode", ["sdd", "dsd", "dds"])
def test_products_with_transposed_matrices(mode, trans_a, trans_b):
    torch.manual_seed(0)
    layout = VariableSparsityConfig(2, 4, True, 1, [1, 2], [3]).make_layout(24)
    dense, sparse = MatMul(layout, 4, "sdd"), layout.repeat_interleave(4, 1).repeat_interleave(4, 2)
    whole = torch.randn(2, 2, 24, 24) * sparse
    blocks = whole.unflatten(3, (6, 4)).unflatten(2, (6, 4)).movedim(3, 4)
    heads, rows, columns = layout.nonzero().unbind(1)
    values = blocks[:, heads, rows, columns]
    assert torch.equal(dense(whole, torch.eye(24).expand(2, 2, 24, 24)), values)
    a, b = (torch.randn(2, 2, 24, 24) for _ in range(2))
    left, right = (whole if mode == "dsd" else a), (whole if mode == "dds" else b)
    product = (left.mT if trans_a else left) @ (right.mT if trans_b else right)
    given = (values if mode == "dsd" else a), (values if mode == "dds" else b)
    found = MatMul(layout, 4, mode, trans_a, trans_b)(*given)
    if mode == "sdd":
        product = product.unflatten(3, (6, 4)).unflatten(2, (6, 4)).movedim(3, 4)[:, heads, rows, columns]
    torch.testing.assert_close(found, product, rtol=1e-4, atol=1e-5)


def test_a_row_of_which_nothing_is_left_gives_zeros():
    """In DeepSpeed it is 0 / 0."""
    x = torch.randn(1, 2, 8, 4)
    attend = SparseSelfAttention(LocalSlidingWindowSparsityConfig(2, 4, 1), "mul", max_seq_length=8)
    found = attend(x, x, x, key_padding_mask=torch.tensor([[0.0] * 4 + [1.0] * 4]))
    assert not found[:, :, :4].any()
    assert found[:, :, 4:].isfinite().all()
    scores = Softmax(torch.ones(1, 1, 1), 4)(
        torch.zeros(1, 1, 4, 4), key_padding_mask=torch.zeros(1, 4) - torch.inf
    )
    assert not scores.any()


def test_berts_attention():
    torch.manual_seed(0)
    layer = BertSparseSelfAttention(
        SimpleNamespace(hidden_size=16, num_attention_heads=2), FixedSparsityConfig(2, 4)
    )
    x, mask = torch.randn(2, 32, 16), torch.zeros(2, 32)
    mask[1, 28:] = -10000.0
    q, k, v = (layer.transpose_for_scores(part(x)) for part in (layer.query, layer.key, layer.value))
    right = layer.sparse_self_attention(q, k, v, key_padding_mask=mask).transpose(1, 2).reshape(2, 32, 16)
    torch.testing.assert_close(layer(x, mask), right)


def small(kind, **settings):
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32}
    shape |= {"vocab_size": 60, "max_position_embeddings": 16 + 2 * (kind == "Roberta"), **settings}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**shape)
    return getattr(transformers, f"{kind}ForMaskedLM")(config).eval()


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_positions_are_repeated_to_the_last_one(kind):
    """DeepSpeed repeats the table a whole number of times: 40 from 16 would have 32."""
    model, first = small(kind), 2 if kind == "Roberta" else 0
    before = next(iter(model.children())).embeddings.position_embeddings.weight.detach().clone()
    assert Utils.extend_position_embedding(model, 40) is model
    after = next(iter(model.children())).embeddings.position_embeddings.weight
    assert torch.equal(after[:first], before[:first])
    assert torch.equal(after[first:], before[first:].repeat(3, 1)[:40])
    assert model.config.max_position_embeddings == 40 + first
    assert model(torch.full((1, 40), 5)).logits.shape == (1, 40, 60)
    with pytest.raises(ValueError, match="`max_position` must be above 40"):
        Utils.extend_position_embedding(model, 40)


@over_table("attention", ["eager", "sdpa"])
@over_table("kind", ["Bert", "Roberta"])
def test_a_model_of_transformers_becomes_sparse(kind, attention):
    """With a dense layout it computes what it did, padding included; with another one it trains."""
    ids = torch.arange(4, 36).view(1, 32).repeat(2, 1)
    mask = (torch.arange(32) < torch.tensor([[32], [21]])).long()
    model = small(kind, attn_implementation=attention)
    Utils.extend_position_embedding(model, 32)
    dense = model(ids, attention_mask=mask).logits
    Utils.replace_model_self_attention_with_sparse_self_attention(model, 32, DenseSparsityConfig(2, 4))
    torch.testing.assert_close(
        model(ids, attention_mask=mask).logits[mask.bool()], dense[mask.bool()], rtol=1e-4, atol=1e-5
    )
    config = BigBirdSparsityConfig(2, 4, True)
    Utils.replace_model_self_attention_with_sparse_self_attention(model.train(), 32, config)
    layers = next(iter(model.children())).encoder.layer
    layouts = [layer.attention.self.sparse_self_attention.master_layout for layer in layers]
    assert not torch.equal(*layouts)
    loss = model(ids, attention_mask=mask, labels=ids).loss
    loss.backward()
    assert all(layer.attention.self.query.weight.grad.any() for layer in layers)


def test_batches_are_padded_to_blocks_and_back():
    ids = torch.arange(10).view(2, 5)
    ones, embedding = torch.ones(2, 5, dtype=torch.long), torch.nn.Embedding(12, 3)
    vectors = embedding(ids)
    pad, *found = Utils.pad_to_block_size(4, ids, ones, ones, ids, vectors, 11, embedding)
    tokens, mask, types, positions, embeds = found
    assert pad == 3
    assert tokens[0].tolist() == positions[0].tolist() == [0, 1, 2, 3, 4, 11, 11, 11]
    assert mask.tolist() == types.tolist() == [[1] * 5 + [0] * 3] * 2
    assert torch.equal(embeds, torch.cat([vectors, embedding(torch.full((2, 3), 11))], 1))
    assert torch.equal(Utils.unpad_sequence_output(pad, embeds), vectors)
    assert Utils.pad_to_block_size(5, ids, None, None, None, None, 0, None) == (0, ids, *[None] * 4)
    assert Utils.unpad_sequence_output(0, embeds) is not None
    assert Utils.unpad_sequence_output(0, embeds).shape == embeds.shape


def test_a_tokenizer_cuts_later():
    tokenizer = SimpleNamespace(model_max_length=512, init_kwargs={})
    assert Utils.update_tokenizer_model_max_length(tokenizer, 4096) is tokenizer
    assert (tokenizer.model_max_length, tokenizer.init_kwargs) == (4096, {"model_max_length": 4096})


SECTION = {"train_batch_size": 1, "sparse_attention": {"block": 4, "num_local_blocks": 2}}


def test_a_script_reads_the_section_with_the_defaults_of_its_mode():
    assert DeepSpeedConfig(SECTION).sparse_attention == {
        "mode": "fixed",
        "block": 4,
        "different_layout_per_head": False,
        "num_local_blocks": 2,
        "num_global_blocks": 1,
        "attention": "bidirectional",
        "horizontal_global_attention": False,
        "num_different_global_patterns": 1,
    }
    other = {"train_batch_size": 1, "sparse_attention": {"mode": "BSLongformer"}}
    assert DeepSpeedConfig(other).sparse_attention["global_block_indices"] == [0]
    assert DeepSpeedConfig({"train_batch_size": 1}).sparse_attention is None
    kept = {key: value for key, value in DeepSpeedConfig(SECTION).sparse_attention.items() if key != "mode"}
    assert FixedSparsityConfig(2, **kept).make_layout(16).shape == (2, 4, 4)


def test_a_section_is_refused_where_nothing_is_sparse():
    """DeepSpeed's engine never looked at it, and trained a dense model."""
    with pytest.raises(ConfigError, match="the model must have a `SparseSelfAttention`"):
        read_settings(SECTION, 1, torch.nn.Linear(1, 1))
    assert read_settings(SECTION, 1, SparseSelfAttention(FixedSparsityConfig(2), max_seq_length=64))
    assert read_settings({**SECTION, "sparse_attention": {"mode": "dense"}}, 1, torch.nn.Linear(1, 1))
