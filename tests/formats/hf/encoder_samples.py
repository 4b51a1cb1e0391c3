"""Small BERTs for the tests of conversion, and what they compute for a padded batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megazero.checkpoint.part import Source
from megazero.checkpoint.shards import parts_of_parameters
from megazero.config.tree.model import ModelConfig
from megazero.layers.collectives import gather_features
from megazero.layers.placement import Placement
from megazero.models.bert import BERT
from megazero.models.bert_batch import BertBatch, BertCollate
from megazero.models.chunk import Slice
from megazero.mpu.context import thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from megazero.spec.resolve import model_spec
from tests.formats.hf.samples import VOCAB, their_tensors, write_folder

# Ragged on purpose: no two sizes alike, and nothing that is a default.
MEGATRON_BERT = ModelConfig(
    family="bert",
    num_layers=3,
    hidden_size=42,
    num_attention_heads=6,
    seq_length=31,
    ffn_hidden_size=74,
    norm_epsilon=3e-4,
    activation="gelu_exact",
    init_method_std=0.08,
    hidden_dropout=0.2,
    attention_dropout=0.3,
)
POST_NORM = {"apply_residual_connection_post_layernorm": True}
TANH = {"activation": "gelu", "bert_head_activation": "gelu"}
NO_HEAD = {"bert_binary_head": False, "bert_token_types": True}
UNTIED = {"untie_embeddings_and_output_weights": True}
BERTS: Mapping[str, ModelConfig] = {
    f"{norm}{suffix}": MEGATRON_BERT.model_copy(update={**places, **update})
    for norm, places in (("megatron", {}), ("bert", POST_NORM))
    for suffix, update in (
        ("", {}),
        ("-tanh-untied", {**TANH, **UNTIED}),
        ("-masked-lm", NO_HEAD),
        ("-masked-lm-tanh", {**NO_HEAD, **TANH}),
        ("-masked-lm-untied", {**NO_HEAD, **UNTIED}),
    )
}
WITHOUT_TYPES = MEGATRON_BERT.model_copy(update={"bert_binary_head": False})

LENGTHS = (17, 9, 31)
TYPES_TABLE = "bert.embeddings.token_type_embeddings.weight"


def random_input() -> tuple[Tensor, Tensor]:
    """Tokens and token types [3, 31] of samples of these lengths, padded."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(VOCAB, (len(LENGTHS), 31), generator=generator)
    real = torch.arange(31) < torch.tensor(LENGTHS)[:, None]
    return tokens, ((torch.arange(31) >= 6) & real).long()


def batch_of(tokens: Tensor, types: Tensor, lengths: Sequence[int]) -> BertBatch:
    """A batch in which every real token is masked, so that the head has an output for each."""
    count, width = tokens.shape
    real = np.arange(width) < np.array(lengths)[:, None]
    arrays = {
        "tokens": tokens.numpy(),
        "token_types": types.numpy(),
        "labels": np.where(real, 0, -1),
        "loss_mask": real.astype(np.float32),
        "lengths": np.array(lengths),
        "is_random": np.zeros(count, dtype=np.int64),
    }
    return BertCollate(VOCAB, torch.device("cpu"))(arrays, tuple(range(count)))


def outputs_of(
    source: Source, model: ModelConfig, tp: int = 1, padded: int = VOCAB
) -> tuple[Tensor, Tensor | None]:
    """megazero's logits of both heads on `tp` ranks: [real tokens, vocabulary], [samples, 2] or None."""
    world, batch = ThreadWorld(tp), batch_of(*random_input(), LENGTHS)

    def work(rank: int) -> tuple[Tensor, Tensor | None]:
        context = thread_context(world, ProcessGrid(tp=tp), rank)
        bert = BERT(Slice(model_spec(model), (VOCAB, padded), Placement.of(context, torch.float32)))
        with torch.no_grad():
            source.read(parts_of_parameters(bert.parameters(), context))
            logits, order = bert(batch)
            return gather_features(logits[:, 0], context.tp)[:, :VOCAB], order

    return world.run(work)[-1]


def their_outputs(theirs: torch.nn.Module) -> tuple[Tensor, Tensor | None]:
    """transformers' logits, in the shapes of `outputs_of`."""
    tokens, types = random_input()
    real = torch.arange(31) < torch.tensor(LENGTHS)[:, None]
    with torch.no_grad():
        found = theirs(input_ids=tokens, attention_mask=real.long(), token_type_ids=types)
    logits = found.prediction_logits if "prediction_logits" in found else found.logits
    return logits[real], found.get("seq_relationship_logits")


def assert_same_outputs(found, expected) -> None:
    """Assert that outputs are equal to 1e-5, and neither constant nor saturated."""
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=0)
    assert 0.2 < expected[0].std() < 30
    assert (found[1] is None) == (expected[1] is None)
    if found[1] is not None:
        torch.testing.assert_close(found[1], expected[1], atol=1e-5, rtol=0)
        assert (expected[1][0] - expected[1][1]).abs().max() > 1e-3


def bert_folder(folder: Path, model: ModelConfig, config: Mapping, **changed: Tensor) -> Path:
    """Write a folder of transformers with random weights, some of them changed."""
    return write_folder(folder, config, {**their_tensors(model), **changed})
