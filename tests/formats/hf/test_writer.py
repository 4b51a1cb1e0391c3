"""Writing for transformers: it loads what was written, bit for bit, and what is there is whole or absent."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from megazero.checkpoint.disk import Disk
from megazero.checkpoint.naming import Table
from megazero.checkpoint.part import Key
from megazero.errors import CheckpointError
from megazero.formats.hf.config_json import TokenIds, architecture_of
from megazero.formats.hf.reader import HFReader
from megazero.formats.hf.writer import ModelFiles, write_hf
from megazero.spec.resolve import model_spec
from tests.formats.hf.samples import (
    GPT2,
    LLAMA,
    MODELS,
    VOCAB,
    MemorySource,
    config_for,
    logits_of,
    random_weights,
    their_tensors,
    write_folder,
)
from tests.tables import over_table

TOKENS = torch.randint(VOCAB, (2, 17), generator=torch.Generator().manual_seed(5))
EXTRAS = ModelFiles(TokenIds(1, 2))


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder."""
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_it_and_generates(name, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr("megazero.formats.hf.stream.CHUNK", 500)
    source = random_weights(MODELS[name])
    for key, tensor in source.tensors.items():
        if "norm.weight" in key.name:
            tensor += 1.0
    written = write_hf(source, MODELS[name], VOCAB, tmp_path / "out", max_shard_bytes=30_000, extras=EXTRAS)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    model.eval()
    assert type(model).__name__ == written.architecture
    assert [len(report[kind]) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")] == [0, 0, 0]
    expected = logits_of(source, MODELS[name], TOKENS)
    torch.testing.assert_close(model(TOKENS).logits.detach(), expected, atol=1e-5, rtol=0)
    assert expected.std() > 0.2

    start = TOKENS[:, :5]
    generated = model.generate(start, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
    greedy = TOKENS[:, :5]
    for _ in range(4):
        following = logits_of(source, MODELS[name], greedy)[:, -1].argmax(-1)
        greedy = torch.cat([greedy, following[:, None]], 1)
    assert torch.equal(generated, greedy)


@over_table("dtype", [torch.float32, torch.float16, torch.bfloat16])
@over_table("name", MODELS)
def test_theirs_to_ours_to_theirs_is_bit_equal(name, dtype, tmp_path):
    tensors = their_tensors(MODELS[name], dtype)
    config = config_for(MODELS[name], torch_dtype=str(dtype).removeprefix("torch."))
    folder = write_folder(tmp_path / "in", config, tensors)
    with HFReader(folder) as reader:
        found = reader.description
        write_hf(
            reader,
            found.model,
            found.vocab_size,
            tmp_path / "out",
            dtype=dtype,
            extras=ModelFiles(found.tokens),
        )
    back = loaded(tmp_path / "out")
    assert back.keys() == tensors.keys()
    assert all(back[key].dtype == dtype and torch.equal(back[key], tensors[key]) for key in tensors)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config


def test_shards_are_filled_in_order_and_indexed(tmp_path):
    written = write_hf(random_weights(LLAMA), LLAMA, VOCAB, tmp_path / "out", max_shard_bytes=20_000)
    table = Table.of(architecture_of(LLAMA).rules, model_spec(LLAMA), VOCAB)
    sizes = {link.theirs: 4 * math.prod(link.their_shape) for link in table.links}
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(sizes.values())}
    assert sorted(index["weight_map"]) == sorted(sizes)
    shards = sorted(set(index["weight_map"].values()))
    assert shards == [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    assert shards == sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    for shard in shards:
        with safe_open(tmp_path / "out" / shard, "pt") as file:
            names = file.keys()
            assert file.metadata() == {"format": "pt"}
            assert sorted(names) == sorted(n for n, place in index["weight_map"].items() if place == shard)
            assert sum(sizes[name] for name in names) <= 20_000
    # Each begins where the one before had no room.
    order = [index["weight_map"][link.theirs] for link in table.links]
    assert order == sorted(order)
    assert {name: (tmp_path / "out" / name).stat().st_size for name, _ in written.files} == dict(
        written.files
    )
    assert {path.name for path in (tmp_path / "out").iterdir()} == dict(written.files).keys()
    assert written.parameters == sum(sizes.values()) // 4


def test_a_tensor_larger_than_a_shard_has_its_own(tmp_path):
    write_hf(random_weights(GPT2), GPT2, VOCAB, tmp_path / "out", max_shard_bytes=1)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == len(index["weight_map"]) == 28


def test_special_tokens_and_other_files_are_written(tmp_path):
    extras = ModelFiles(TokenIds(5, (6, 7), 0), (("tokenizer.json", b"{}"),))
    write_hf(random_weights(GPT2), GPT2, VOCAB, tmp_path / "out", extras=extras)
    tokens = {"bos_token_id": 5, "eos_token_id": [6, 7], "pad_token_id": 0}
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == tokens
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert tokens.items() <= config.items()
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == b"{}"


def test_what_float16_cannot_hold_is_refused(tmp_path):
    source = random_weights(GPT2)
    source.tensors[Key("layers.1.mlp.down.bias")][3] = 7e4
    with pytest.raises(CheckpointError, match=r"`layers.1.mlp.down.bias` must be finite as float16"):
        write_hf(source, GPT2, VOCAB, tmp_path / "out", dtype=torch.float16)
    assert os.listdir(tmp_path) == []
    write_hf(source, GPT2, VOCAB, tmp_path / "out", dtype=torch.bfloat16)


def test_weights_that_are_not_the_model_s_are_refused(tmp_path):
    source = random_weights(GPT2)
    tensors = {key.name: tensor for key, tensor in source.tensors.items()}
    tensors["layers.2.mlp.up.bias"] = tensors.pop("layers.1.mlp.up.bias")
    tensors["final_norm.bias"] = torch.zeros(41)
    with pytest.raises(CheckpointError) as refusal:
        write_hf(MemorySource(tensors), GPT2, VOCAB, tmp_path / "out")
    assert str(refusal.value) == (
        "the weights must be those of the model, but layers.1.mlp.up.bias is missing; final_norm.bias has "
        "shape [41], not [42]; layers.2.mlp.up.bias is unknown to transformers"
    )
    assert os.listdir(tmp_path) == []


def test_optimizer_states_are_left_out(tmp_path):
    source = random_weights(GPT2)
    source.tensors[Key("final_norm.bias", "exp_avg")] = torch.zeros(42)
    assert write_hf(source, GPT2, VOCAB, tmp_path / "out").tensors == 28


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dtype": torch.int8}, "`dtype` must be one of float32, float16, bfloat16"),
        ({"max_shard_bytes": 0}, "positive"),
    ],
)
def test_settings_without_sense_are_refused(changed, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        write_hf(random_weights(GPT2), GPT2, VOCAB, tmp_path / "out", **changed)


def test_what_is_there_is_never_overwritten(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    write_hf(random_weights(GPT2), GPT2, VOCAB, out)
    before = {path: path.read_bytes() for path in out.iterdir()}
    for taken in (out, out / "config.json"):
        with pytest.raises(CheckpointError, match="must be new or an empty folder"):
            write_hf(random_weights(GPT2), GPT2, VOCAB, taken)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="must be new or an empty folder"):
        write_hf(random_weights(GPT2), GPT2, VOCAB, tmp_path / "link")
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    assert sorted(os.listdir(tmp_path)) == ["link", "out"]


def test_a_folder_that_may_not_be_looked_into_is_refused_in_words(tmp_path, monkeypatch):
    def closed(path):
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os, "listdir", closed)
    with pytest.raises(CheckpointError, match=r"out` must be written, but cannot be: .*Permission denied"):
        write_hf(random_weights(GPT2), GPT2, VOCAB, tmp_path / "out")


class FullDisk(Disk):
    """A disk that refuses its n-th new file."""

    def __init__(self, left: int):
        self.left = left

    def create(self, path: Path):
        self.left -= 1
        if self.left < 0:
            raise OSError(28, "No space left on device", str(path))
        return super().create(path)


@over_table("files", range(4))
def test_a_full_disk_is_reported_and_leaves_nothing(files, tmp_path):
    with pytest.raises(CheckpointError, match=r"out` must be written, but cannot be: .*No space left"):
        write_hf(
            random_weights(GPT2),
            GPT2,
            VOCAB,
            tmp_path / "a" / "out",
            max_shard_bytes=50_000,
            disk=FullDisk(files),
        )
    assert os.listdir(tmp_path / "a") == []


def test_what_a_killed_run_left_is_cleared(tmp_path):
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "model.safetensors").write_bytes(b"half")
    write_hf(random_weights(GPT2), GPT2, VOCAB, tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"]


def test_a_source_is_asked_for_little_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("megazero.formats.hf.stream.CHUNK", 300)
    source = random_weights(GPT2)
    write_hf(source, GPT2, VOCAB, tmp_path / "bf16", dtype=torch.bfloat16)
    assert source.most <= 300
    # Only what lies in fp32 as in theirs is read at once, straight into its place.
    write_hf(source, GPT2, VOCAB, tmp_path / "fp32")
    assert source.most == VOCAB * 42


MEASURE = """
import sys
from pathlib import Path

import torch

from megazero.checkpoint.disk import Disk
from megazero.formats.hf import convert_from_hf, convert_to_hf
from megazero.formats.hf.config_json import TokenIds, config_of, architecture_of
from megazero.checkpoint.naming import Table
from megazero.checkpoint.tensor_file import Later, write_tensors
from megazero.config.tree.model import ModelConfig
from megazero.spec.resolve import model_spec
import json

MIB = 1 << 20
folder = Path(sys.argv[1])
model = ModelConfig(
    num_layers=8, hidden_size=768, num_attention_heads=12, seq_length=64, ffn_hidden_size=1536,
    position_embedding_type="rope", normalization="RMSNorm", activation="swiglu", add_bias_linear=False,
)
vocab = 60 * MIB // 4 // 768
links = Table.of(architecture_of(model).rules, model_spec(model), vocab).links
(folder / "hf").mkdir()
write_tensors(
    Disk(),
    folder / "hf" / "model.safetensors",
    [(l.theirs, Later(torch.float32, l.their_shape, lambda l=l: torch.ones(l.their_shape))) for l in links],
    hashed=False,
)
config = config_of(architecture_of(model), model, vocab, TokenIds(), "float32")
(folder / "hf" / "config.json").write_text(json.dumps(config))


def status(field):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) << 10


def growth(work):
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


total = sum(4 * torch.Size(l.their_shape).numel() for l in links)
import megazero.commands.checkpoint.hf, tokenizers  # what is imported on the way is not the conversion's
growths = [
    growth(lambda: convert_from_hf(folder / "hf", folder / "ours")),
    growth(lambda: convert_to_hf(folder / "ours", folder / "back")),
]
print(json.dumps({"total": total, "growths": growths}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux's memory accounts")
def test_memory_stays_near_the_largest_tensor(tmp_path):
    """The model has 200 MiB, its embedding 60 MiB; the export runs in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["total"] > 190 << 20
    limit = 1.5 * (60 << 20) + (24 << 20)
    assert max(found["growths"]) < limit, found
