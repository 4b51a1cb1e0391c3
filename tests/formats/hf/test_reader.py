"""A Hugging Face folder as a `Source`: the same function, any part of it, or a refusal that says why."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megazero.checkpoint.box import Box
from megazero.checkpoint.part import Key, Part
from megazero.config.resolve import parse_config
from megazero.config.tree.model import ModelConfig
from megazero.errors import CheckpointError, DamagedCheckpointError
from megazero.formats.hf.reader import HFReader
from tests.formats.hf.model_flags import model_flags
from tests.formats.hf.samples import (
    GPT2,
    LLAMA,
    MISTRAL,
    MODELS,
    QWEN2,
    TIED,
    VOCAB,
    config_for,
    logits_of,
    random_weights,
    their_tensors,
    write_folder,
)
from tests.models.hf_weights import decoder_model
from tests.tables import over_table

TOKENS = torch.randint(VOCAB, (2, 17), generator=torch.Generator().manual_seed(5))


@pytest.mark.fast
@over_table(
    ("name", "tp", "padded"),
    [*((name, 1, VOCAB) for name in MODELS), ("gpt2", 2, 128), ("llama", 2, 110), ("llama-tied", 1, 128)],
)
def test_what_transformers_saved_computes_the_same(name, tp, padded, tmp_path):
    pytest.importorskip("transformers")
    theirs = decoder_model(MODELS[name], VOCAB)
    torch.manual_seed(3)
    for parameter in theirs.parameters():
        parameter.data += 0.15 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path, max_shard_size="40KB" if tp == 2 else "5GB")
    with HFReader(tmp_path) as reader:
        settings = reader.model_settings()
        assert settings.pop("vocab_size") == VOCAB
        found = ModelConfig(**settings)
        reader.check_model(MODELS[name], VOCAB)
        logits = logits_of(reader, found, TOKENS, tp, padded)
    expected = theirs(TOKENS).logits.detach()
    assert 0.3 < expected.std() < 30  # neither dead nor saturated
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


@over_table("model", [MISTRAL, QWEN2], ids=["mistral", "qwen2"])
@over_table("width", [30, 31, 32768])
def test_a_window_is_one_if_it_hides_something(model, width, tmp_path):
    """Qwen2's window is often as wide as its positions, which `window_within_positions` refuses as a flag.

    There are 31 positions. A window of 30 hides the first token from the last one alone.
    """
    pytest.importorskip("transformers")
    theirs = decoder_model(model.model_copy(update={"window_size": (width - 1, 0)}), VOCAB)
    theirs.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["sliding_window"] == width
    tokens = torch.randint(VOCAB, (2, 31), generator=torch.Generator().manual_seed(6))
    with HFReader(tmp_path) as reader:
        read = reader.description.model
        logits = logits_of(reader, read, tokens)
    assert {*read.windows} - {None} == ({(29, 0)} if width == 30 else set())
    torch.testing.assert_close(logits, theirs(tokens).logits.detach(), atol=1e-5, rtol=0)
    flags = [
        word for line in model_flags(read.model_copy(update={"vocab_size": VOCAB})) for word in line.split()
    ]
    flags += ["--micro-batch-size", "1", "--lr", "1e-3", "--train-iters", "1", "--mock-data"]
    assert parse_config(flags).config.model.windows == read.windows


@pytest.mark.parametrize("name", ["gpt2", "llama-biases"])
def test_every_part_is_that_of_the_whole(name, tmp_path, monkeypatch):
    """Reads random boxes of all tensors in small chunks, some into strided memory."""
    monkeypatch.setattr("megazero.formats.hf.reader.CHUNK", 100)
    draw = random.Random(4)
    expected = random_weights(MODELS[name]).tensors
    folder = write_folder(tmp_path, config_for(MODELS[name]), their_tensors(MODELS[name]))
    with HFReader(folder) as reader:
        assert reader.shapes == {key: tuple(tensor.shape) for key, tensor in expected.items()}
        parts = []
        for key, shape in reader.shapes.items():
            for _ in range(4):
                spans = [sorted(draw.sample(range(n + 1), 2)) for n in shape]
                box = Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))
                memory = torch.full([*reversed(box.shape), 2], torch.nan)[..., 0].permute(
                    *range(len(shape) - 1, -1, -1)
                )
                parts.append(Part(key, shape, box, memory))
        reader.read(parts)
        for part in parts:
            assert torch.equal(part.tensor, expected[part.key][part.box.slices]), part.key
        for key, tensor in expected.items():
            assert torch.equal(reader.tensor(key), tensor)


@over_table("stored", [torch.float16, torch.bfloat16, torch.float64])
@over_table("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_are_converted(stored, wanted, tmp_path):
    tensors = their_tensors(GPT2, stored)
    with HFReader(write_folder(tmp_path, config_for(GPT2), tensors)) as reader:
        key = Key("layers.1.mlp.up.weight")
        memory = torch.empty(reader.shapes[key], dtype=wanted)
        reader.read([Part(key, reader.shapes[key], Box.whole(reader.shapes[key]), memory)])
        assert torch.equal(memory, tensors["transformer.h.1.mlp.c_fc.weight"].t().to(wanted))
        assert reader.tensor(key).dtype == stored


def test_only_what_is_needed_is_read(tmp_path, monkeypatch):
    """One group's key is read by its rows; no file is memory-mapped or read at once."""
    from megazero.checkpoint.blocks import BlockFile

    folder = write_folder(tmp_path, config_for(LLAMA), their_tensors(LLAMA))
    with HFReader(folder) as reader:
        sizes = []
        real = BlockFile.read_into
        monkeypatch.setattr(
            BlockFile,
            "read_into",
            lambda self, memory, at: (sizes.append(len(memory)), real(self, memory, at)),
        )
        box = Box((1, 3, 0, 0), (1, 1, 10, 36))
        key = Key("layers.0.attention.qkv.weight")
        reader.read([Part(key, reader.shapes[key], box, torch.empty(box.shape))])
        assert sizes == [10 * 36 * 4]


def test_a_bare_model_and_its_buffers_are_understood(tmp_path):
    """The first GPT-2 files have no prefix, and masks stored as tensors."""
    tensors = {name.removeprefix("transformer."): t for name, t in their_tensors(GPT2).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 31, 31)
    tensors["h.1.attn.masked_bias"] = torch.tensor(-1e4)
    with HFReader(write_folder(tmp_path, config_for(GPT2), tensors)) as reader:
        expected = random_weights(GPT2).tensors
        assert all(torch.equal(reader.tensor(key), tensor) for key, tensor in expected.items())


def test_a_tied_head_may_be_stored_but_must_be_the_embedding(tmp_path, monkeypatch):
    monkeypatch.setattr("megazero.formats.hf.reader.CHUNK", 100)
    tied = LLAMA.model_copy(update=TIED)
    tensors = their_tensors(tied)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    HFReader(write_folder(tmp_path, config_for(tied), tensors)).close()
    tensors["lm_head.weight"][-1, -1] += 1
    with pytest.raises(
        CheckpointError, match=r"lm_head.weight differs from model.embed_tokens.weight, although `tie_word"
    ):
        HFReader(write_folder(tmp_path, config_for(tied), tensors))
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].clone()
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        HFReader(write_folder(tmp_path, config_for(tied), tensors))


def test_an_untied_head_must_be_stored(tmp_path):
    folder = write_folder(tmp_path, config_for(LLAMA), their_tensors(LLAMA.model_copy(update=TIED)))
    with pytest.raises(CheckpointError, match=r"they lack lm_head.weight"):
        HFReader(folder)


def test_tensors_must_be_exactly_those_of_the_config(tmp_path):
    tensors = their_tensors(GPT2)
    del tensors["transformer.h.1.ln_1.bias"]
    tensors["transformer.h.2.ln_1.bias"] = torch.ones(42)
    tensors["transformer.wpe.weight"] = torch.ones(30, 42)
    tensors["transformer.ln_f.bias"] = torch.ones(42, dtype=torch.int32)
    with pytest.raises(CheckpointError) as refusal:
        HFReader(write_folder(tmp_path, config_for(GPT2), tensors))
    assert str(refusal.value) == (
        f"the tensors in `{tmp_path}` must be those that its config.json describes, but they lack "
        "transformer.h.1.ln_1.bias; also hold transformer.h.2.ln_1.bias; "
        "hold transformer.wpe.weight as torch.float32 [30, 42] instead of floats [31, 42]; "
        "hold transformer.ln_f.bias as torch.int32 [42] instead of floats [42]"
    )


def test_odd_names_are_printed_in_letters(tmp_path):
    tensors = {**their_tensors(GPT2), "\x1b[31m\n": torch.ones(1), "y" * 999: torch.ones(1)}
    with pytest.raises(CheckpointError) as refusal:
        HFReader(write_folder(tmp_path, config_for(GPT2), tensors))
    assert str(refusal.value).endswith(f"they also hold '\\x1b[31m\\n', {'y' * 200}")


def test_a_config_of_billions_of_layers_is_refused_at_once(tmp_path):
    folder = write_folder(tmp_path, config_for(GPT2, n_layer=2**31), their_tensors(GPT2))
    with pytest.raises(CheckpointError, match="2147483648 layers cannot be in 28 tensors"):
        HFReader(folder)


def test_another_model_is_refused_with_every_field(tmp_path):
    with HFReader(write_folder(tmp_path, config_for(GPT2), their_tensors(GPT2))) as reader:
        reader.check_model(GPT2, VOCAB)
        with pytest.raises(CheckpointError) as refusal:
            reader.check_model(GPT2.model_copy(update={"norm_epsilon": 1e-5}), 100)
        assert "`norm_epsilon` is 0.0003, not 1e-05; `vocab_size` is 101, not 100" in str(refusal.value)
    HFReader.for_model(tmp_path, GPT2, VOCAB).close()
    with pytest.raises(CheckpointError, match="`norm_epsilon` is 0.0003, not 1e-05"):
        HFReader.for_model(tmp_path, GPT2.model_copy(update={"norm_epsilon": 1e-5}), VOCAB)


@pytest.fixture
def sharded(tmp_path) -> Path:
    """Two shards and their index."""
    tensors = their_tensors(GPT2)
    names = sorted(tensors)
    shards = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for file, inside in shards.items():
        save_file({name: tensors[name] for name in inside}, tmp_path / file)
    places = {name: file for file, inside in shards.items() for name in inside}
    (tmp_path / "config.json").write_text(json.dumps(config_for(GPT2)))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return tmp_path


def change_index(folder: Path, **changed: str | None) -> None:
    path = folder / "model.safetensors.index.json"
    places = {**json.loads(path.read_text())["weight_map"], **changed}
    path.write_text(json.dumps({"weight_map": {k: v for k, v in places.items() if v is not None}}))


def test_shards_are_one_model_also_through_links(sharded):
    (sharded / "blobs").mkdir()
    (sharded / "a.safetensors").rename(sharded / "blobs" / "1f")
    (sharded / "a.safetensors").symlink_to("blobs/1f")
    with HFReader(sharded) as reader:
        expected = random_weights(GPT2).tensors
        assert all(torch.equal(reader.tensor(key), tensor) for key, tensor in expected.items())


@pytest.mark.parametrize(
    "name", ["../a.safetensors", "/etc/passwd", "x/a.safetensors", "..", "", "a\\b", "a\0b"]
)
def test_an_index_names_files_beside_it(sharded, name):
    change_index(sharded, **{"transformer.wte.weight": name})
    with pytest.raises(CheckpointError, match=r"index.json`: `weight_map` must name files beside it"):
        HFReader(sharded)


@pytest.mark.parametrize(
    ("name", "shown"), [("n" * 300, "n" * 200), ("\ud800", r"\\ud800"), ("a\x1b[2J", r"a\\x1b\[2J")]
)
def test_an_index_may_name_what_no_file_can_be_called(sharded, name, shown):
    """A name of 300 characters once ended in a traceback of ENAMETOOLONG."""
    change_index(sharded, **{"transformer.wte.weight": name})
    with pytest.raises(
        CheckpointError, match=rf"index.json` must name files that are there, but {shown} is missing"
    ):
        HFReader(sharded)


def test_an_index_and_its_shards_agree(sharded):
    change_index(sharded, **{"transformer.wte.weight": "a.safetensors"})
    with pytest.raises(
        CheckpointError, match=r"is in a.safetensors, but they differ in transformer.wte.weight"
    ):
        HFReader(sharded)
    change_index(sharded, **{"transformer.wte.weight": None})
    with pytest.raises(
        CheckpointError, match=r"is in b.safetensors, but they differ in transformer.wte.weight"
    ):
        HFReader(sharded)
    change_index(sharded, **{"transformer.wte.weight": "c.safetensors"})
    with pytest.raises(
        CheckpointError, match=r"must name files that are there, but c.safetensors is missing"
    ):
        HFReader(sharded)


@pytest.mark.parametrize("content", ['{"weight_map": {"a": 1}}', "{}", '{"weight_map": []}'])
def test_an_ill_formed_index_is_refused(sharded, content):
    (sharded / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match="`weight_map` must map tensors to files"):
        HFReader(sharded)


def test_pickles_are_not_opened(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_for(GPT2)))
    with pytest.raises(CheckpointError, match=r"must hold model.safetensors or model.safetensors.index.json"):
        HFReader(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"pytorch_model.bin, which can run code.*`save_pretrained` it again"
    ):
        HFReader(tmp_path)


@over_table("size", [0, 5, 100, -4])
def test_a_cut_file_is_refused_by_name(tmp_path, size):
    folder = write_folder(tmp_path, config_for(GPT2), their_tensors(GPT2))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(DamagedCheckpointError, match="model.safetensors"):
        HFReader(folder)
