"""transformers' T5 there and back: the same logits, the same bits, or a refusal; on any layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megazero.checkpoint.shards import parts_of_parameters
from megazero.config.tree.model import ModelConfig
from megazero.errors import CheckpointError
from megazero.formats.hf.config_json import TokenIds, architecture_of
from megazero.formats.hf.convert import convert_from_hf, convert_to_hf
from megazero.formats.hf.reader import HFReader
from megazero.formats.hf.writer import ModelFiles, write_hf
from megazero.layers.placement import Placement
from megazero.models.chunk import Slice
from megazero.models.pairs.t5 import T5
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from megazero.spec.resolve import model_spec
from tests.formats.hf.samples import VOCAB, config_for, random_weights, their_tensors, write_folder
from tests.formats.hf.test_writer import loaded
from tests.models.pairs.hf_t5 import t5_model, t5_shape
from tests.models.pairs.test_hf_parity import batch_of
from tests.tables import over_table

T5S = {
    "1.1": t5_shape(vocab_size=VOCAB),
    "1.0": t5_shape(vocab_size=VOCAB, activation="relu", untie_embeddings_and_output_weights=False),
}


def ours_on(source, model: ModelConfig, tp: int = 1) -> torch.Tensor:
    """Logits [t, b, v] of megazero's model with a source's weights, on `tp` ranks."""
    world, grid = ThreadWorld(tp), ProcessGrid(tp=tp)

    def work(rank: int) -> torch.Tensor:
        context = thread_context(world, grid, rank) if tp > 1 else solo_context()
        padded = -(-VOCAB // tp) * tp
        t5 = T5(Slice(model_spec(model), (VOCAB, padded), Placement.of(context, torch.float32)))
        source.read(parts_of_parameters(t5.parameters(), context))
        with torch.no_grad():
            return t5(batch_of(model))

    return torch.cat(world.run(work), -1)[..., :VOCAB]


def theirs_on(model, shape: ModelConfig) -> torch.Tensor:
    batch = batch_of(shape)
    with torch.no_grad():
        return (
            model(
                input_ids=batch.tokens,
                attention_mask=batch.mask[:, 0, 0].long(),
                decoder_input_ids=batch.decoder.tokens,
            )
            .logits.transpose(0, 1)
            .contiguous()
        )


@over_table("name", T5S)
@over_table("tp", [1, 2])
def test_what_transformers_saved_computes_the_same(name, tp, tmp_path):
    theirs = t5_model(T5S[name])
    if name == "1.1":  # whose fresh head gives logits of 25, which fp32 rounds by as much as the bound
        theirs.lm_head.weight.data.mul_(0.2)
    theirs.save_pretrained(tmp_path)
    with HFReader(tmp_path) as reader:
        settings = reader.model_settings()
        assert settings["vocab_size"] == VOCAB
        reader.check_model(T5S[name], VOCAB)
        mine = ours_on(reader, ModelConfig(**{**settings, "seq_length": 24, "t5_decoder_seq_length": 16}), tp)
    torch.testing.assert_close(mine, theirs_on(theirs, T5S[name]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", T5S)
def test_transformers_loads_it_whole_and_computes_the_same(name, tmp_path):
    import transformers

    source = random_weights(T5S[name])
    for key, tensor in source.tensors.items():
        if "norm.weight" in key.name:
            tensor += 1.0
    extras = ModelFiles(TokenIds(eos=1, pad=0))
    written = write_hf(source, T5S[name], VOCAB, tmp_path / "out", max_shard_bytes=30_000, extras=extras)
    auto = getattr(transformers, written.auto)
    theirs, report = auto.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(theirs).__name__ == written.architecture == "T5ForConditionalGeneration"
    assert [len(report[kind]) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")] == [0, 0, 0]
    logits = theirs_on(theirs.eval(), T5S[name])
    torch.testing.assert_close(ours_on(source, T5S[name]), logits, rtol=1e-5, atol=1e-5)


@over_table("dtype", [torch.float32, torch.bfloat16])
@over_table("name", T5S)
def test_theirs_to_ours_to_theirs_is_bit_equal(name, dtype, tmp_path):
    config = config_for(T5S[name], torch_dtype=str(dtype).removeprefix("torch."))
    tensors = their_tensors(T5S[name], dtype)
    write_folder(tmp_path / "hf", config, tensors)
    imported = convert_from_hf(tmp_path / "hf", tmp_path / "run")
    exported, _ = convert_to_hf(tmp_path / "run", tmp_path / "back", dtype=dtype, max_shard_bytes=20_000)
    assert exported.architecture == imported.description.architecture.name == config["architectures"][0]
    back = loaded(tmp_path / "back")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[key], tensors[key]) for key in tensors)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config


def test_the_names_are_all_of_transformers_own(tmp_path):
    for name, model in T5S.items():
        theirs = {key for key in t5_model(model).state_dict() if not key.endswith("embed_tokens.weight")}
        theirs -= {"lm_head.weight"} if name == "1.0" else set()
        assert theirs == their_tensors(model).keys()


@over_table(
    ("changed", "reason"),
    [
        ({"t5_style": "megatron"}, "`t5_style` must be google, but is megatron"),
        ({"position_embedding_type": "learned_absolute"}, "`position_embedding_type` must be relative"),
        ({"num_query_groups": 2}, "the number of key/value heads must equal the number of query heads"),
        ({"activation": "swiglu"}, "`activation` must be relu or geglu, but is swiglu"),
    ],
)
def test_what_transformers_cannot_express_is_refused(changed, reason):
    with pytest.raises(CheckpointError, match=reason):
        architecture_of(T5S["1.1"].model_copy(update=changed))


@over_table(
    ("changed", "reason"),
    [
        ({"is_encoder_decoder": False}, "`is_encoder_decoder` must be True, but is False"),
        ({"feed_forward_proj": "gated-silu"}, "`feed_forward_proj` must be one of relu, gated-gelu"),
        ({"relative_attention_max_distance": 4}, "`relative_attention_max_distance` more than half of that"),
        ({"relative_attention_num_buckets": 3}, "`relative_attention_num_buckets` must be at least 4"),
    ],
)
def test_what_ours_cannot_express_is_refused(changed, reason, tmp_path: Path):
    model = T5S["1.1"]
    write_folder(tmp_path, config_for(model, **changed), their_tensors(model))
    with pytest.raises(CheckpointError, match=reason):
        HFReader(tmp_path)


def test_a_tied_head_that_is_not_scaled_is_refused_with_the_cause(tmp_path):
    tensors = their_tensors(T5S["1.1"])
    del tensors["lm_head.weight"]  # as transformers 5 saves a T5 1.1 that it has made
    write_folder(tmp_path, config_for(T5S["1.1"]), tensors)
    with pytest.raises(
        CheckpointError, match="the head is tied to the embedding, but `scale_decoder_outputs` is"
    ):
        HFReader(tmp_path)
