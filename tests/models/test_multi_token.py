"""The prediction of further tokens, against a plain reference written here, and what a batch shifts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.config.tree.model import ModelConfig
from megazero.config.tree.recompute import RecomputeConfig
from megazero.layers.initialize import initialize
from megazero.layers.inputs import LayerInputs
from megazero.layers.placement import Placement
from megazero.layers.rotary import rotary_of
from megazero.layers.rows import Rows
from megazero.loss import LossTerm
from megazero.models.batch import Columns, TextCollate
from megazero.models.chunk import HEAD, Slice
from megazero.models.gpt import GPT
from megazero.mpu.context import solo_context
from megazero.mpu.param_spec import spec_of
from megazero.ops.attention import Documents
from megazero.spec.resolve import model_spec
from tests.tables import over_table

VOCAB = (29, 32)
CPU = torch.device("cpu")
SHAPE = ModelConfig(
    **{"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 7},
    **{"position_embedding_type": "rope", "normalization": "RMSNorm", "init_method_std": 0.3},
    **{"untie_embeddings_and_output_weights": True, "mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.4},
)
DICE = np.random.default_rng(3)
TEXT = DICE.integers(0, VOCAB[0], (2, 8))
ARRAYS = {
    "tokens": TEXT[:, :-1],
    "labels": TEXT[:, 1:],
    "loss_mask": (DICE.random((2, 7)) < 0.8).astype(np.float32),
    "document_ids": np.array([[0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 2, 2, 2, 2]], dtype=np.int32),
}


def gpt(config: ModelConfig, **recompute: Any) -> GPT:
    placement = Placement.of(solo_context(), torch.float64)
    model = GPT(Slice(model_spec(config), VOCAB, placement, RecomputeConfig(**recompute)))
    initialize(model, 5, solo_context().place)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.2)
    return model


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + SHAPE.norm_epsilon).sqrt() * weight


def plainly(model: GPT, arrays: dict[str, np.ndarray], depths: int) -> dict[str, float]:
    """The mean of each depth, position by position: nothing is shifted, and the head is a matrix."""
    tokens, labels = (torch.from_numpy(arrays[name]) for name in ("tokens", "labels"))
    mask = arrays.get("loss_mask", np.ones(tokens.shape))
    ids = arrays.get("document_ids", np.zeros(tokens.shape, dtype=np.int32))
    w = {spec_of(p).name: p.detach() for p in model.parameters()}
    b, s = tokens.shape
    rows = Rows(
        range(s),
        Documents(torch.from_numpy(ids)),
        rotary=rotary_of(model_spec(SHAPE).rotary, torch.arange(s)),
    )
    collate = TextCollate(VOCAB[0], CPU)
    hidden = rms(model.hidden(collate(arrays, (0, 1))), w["final_norm.weight"])
    means = {}
    for depth in range(1, depths + 1):
        name = f"layers.{SHAPE.num_layers + depth - 1}"
        joined = torch.zeros(s, b, 2 * SHAPE.hidden_size, dtype=torch.float64)
        for row in range(b):
            for at in range(s):
                inside = at + depth < s and ids[row, at + depth] == ids[row, at]
                word = w["embedding.word.weight"][tokens[row, at + depth] if inside else 0]
                left = rms(word, w[f"{name}.word_norm.weight"])
                joined[at, row] = torch.cat((left, rms(hidden[at, row], w[f"{name}.hidden_norm.weight"])))
        x, _ = model.further[depth - 1].layer(joined @ w[f"{name}.join.weight"].t(), LayerInputs(rows))
        hidden = rms(x, w[f"{name}.final_norm.weight"])
        total = counted = 0.0
        for row in range(b):
            for at in range(s):
                if at + depth < s and ids[row, at + depth] == ids[row, at]:
                    logits = hidden[at, row] @ w["head.weight"][: VOCAB[0]].t()
                    weight = mask[row, at + depth]
                    total += weight * F.cross_entropy(logits, labels[row, at + depth]).item()
                    counted += weight
        means[f"mtp_{depth}"] = total / counted
    return means


@over_table("documents", [False, True])
@over_table("recompute", [{}, {"granularity": "full"}, {"logits": True}])
def test_terms_equal_a_plain_reference(documents, recompute):
    arrays = {name: each for name, each in ARRAYS.items() if documents or name != "document_ids"}
    model = gpt(SHAPE, **recompute)
    batch = TextCollate(VOCAB[0], CPU, depths=2)(arrays, (0, 1))
    terms = model.run(batch).terms
    wanted = plainly(model, arrays, 2)
    assert {name: terms[name].item() / batch.counts[name] for name in wanted} == pytest.approx(wanted)
    alone = gpt(SHAPE.model_copy(update={"mtp_num_layers": None}))
    lm = alone.run(TextCollate(VOCAB[0], CPU)(arrays, (0, 1))).terms["lm"]
    torch.testing.assert_close(terms["lm"], lm)


def test_terms_are_weighed_together_and_named_by_depth():
    assert gpt(SHAPE).terms == (LossTerm("lm"), LossTerm("mtp_1", 0.2), LossTerm("mtp_2", 0.2))


def test_arrays_are_shifted_within_documents():
    """By hand: the first row's documents are its columns 0-2 and 3-6."""
    arrays = {
        "tokens": np.array([[10, 11, 12, 13, 14, 15, 16]]),
        "labels": np.array([[11, 12, 13, 14, 15, 16, 17]]),
        "loss_mask": np.array([[1, 0, 1, 1, 1, 1, 0.5]], dtype=np.float32),
        "document_ids": np.array([[0, 0, 0, 1, 1, 1, 1]], dtype=np.int32),
    }
    first, second = TextCollate(29, CPU, depths=2)(arrays, (0,)).ahead
    assert first.tokens.tolist() == [[11, 12, 0, 14, 15, 16, 0]]
    assert first.targets.labels.tolist() == [[12, 13, 0, 15, 16, 17, 0]]
    assert first.targets.weights.tolist() == [[0, 1, 0, 1, 1, 0.5, 0]]
    assert second.tokens.tolist() == [[12, 0, 0, 15, 16, 0, 0]]
    assert second.targets.labels.tolist() == [[13, 0, 0, 16, 17, 0, 0]]
    assert second.targets.weights.tolist() == [[1, 0, 0, 1, 0.5, 0, 0]]
    assert (first.targets.counted, second.targets.counted) == (3.5, 2.5)


def test_columns_of_a_rank_are_cut_after_the_shift():
    arrays = {"tokens": np.arange(8)[None], "labels": np.arange(1, 9)[None]}
    cut = [TextCollate(29, CPU, columns=Columns(rank, 2, True), depths=1)(arrays, (0,)) for rank in (0, 1)]
    assert [batch.ahead[0].tokens.tolist() for batch in cut] == [[[1, 2, 7, 0]], [[3, 4, 5, 6]]]
    assert [batch.counts["mtp_1"] for batch in cut] == [3.0, 4.0]


def test_more_depths_than_a_text_has_tokens_count_nothing():
    arrays = {"tokens": np.arange(2)[None], "labels": np.arange(1, 3)[None]}
    ahead = TextCollate(29, CPU, depths=3)(arrays, (0,)).ahead
    assert [each.targets.counted for each in ahead] == [1.0, 0.0, 0.0]


def test_the_last_stage_has_a_copy_of_the_embedding():
    placement = Placement.of(solo_context(), torch.float32)
    own = GPT(Slice(model_spec(SHAPE), VOCAB, placement, parts=(1, HEAD)))
    specs = {spec_of(p).name: spec_of(p) for p in own.parameters()}
    assert specs["further.word.weight"].tied_with == "embedding.word.weight"
    assert specs["head.weight"].tied_with is None
    tied = SHAPE.model_copy(update={"untie_embeddings_and_output_weights": False})
    shared = GPT(Slice(model_spec(tied), VOCAB, placement, parts=(1, HEAD)))
    assert shared.head is not None
    assert all(block.word is shared.head.weight for block in shared.further)
    assert [tie.parts for tie in GPT.ties(model_spec(SHAPE))] == [("embedding", "head")]
    assert GPT.ties(model_spec(SHAPE.model_copy(update={"mtp_num_layers": None}))) == ()


def test_a_layer_behind_the_last_is_like_it():
    shape = SHAPE.model_copy(
        update={
            **{"num_layers": 3, "num_experts": (4, 8), "moe_layer_freq": (0, 1, 1)},
            **{"window_size": (3, 0), "window_attn_skip_freq": (1, 1, 0)},
        }
    )
    assert list(shape.further_layers) == [3, 4]
    assert [shape.experts_at(layer) for layer in range(5)] == [0, 4, 8, 8, 8]
    assert [shape.window_at(layer) for layer in range(5)] == [(3, 0), (3, 0), None, None, None]
