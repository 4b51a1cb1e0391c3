"""Quantized folders in transformers: equal logits bit for bit to the model that the numbers make."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megazero.formats.hf.coded import decoded
from megazero.formats.hf.folder import TensorFolder
from megazero.formats.hf.packed import Compression
from megazero.mpu.context import solo_context
from megazero.quantize.blocks import BlockModel
from megazero.quantize.job import quantize
from megazero.quantize.recipe import Recipe
from tests.formats.hf.descendants import SAMPLES
from tests.quantize.samples import quantized

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
TOKENS = torch.randint(64, (2, 13), generator=torch.Generator().manual_seed(5))


def logits(folder: Path, **more) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **more).eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    with torch.no_grad():
        return model(TOKENS).logits


def as_floats(folder: Path, out: Path) -> Path:
    """The same model as a folder without codes."""
    config = json.loads((folder / "config.json").read_text())
    compression = Compression.of(config)
    del config["quantization_config"]
    files = TensorFolder(folder)
    stored = decoded(compression, files.tensors)
    floats = {
        name: part.rows(slice(0, part.shape[0] if part.shape else 1)).view(part.shape)
        for name, part in stored.items()
    }
    files.close()
    out.mkdir()
    save_file(floats, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(config))
    return out


def dequantizing():
    return transformers.CompressedTensorsConfig(dequantize=True)


@pytest.mark.parametrize("scheme", ["W4", "W8"])
def test_logits_are_those_of_the_numbers(llama, scheme, tmp_path):
    quantized(llama, tmp_path / "q", Recipe.of(scheme, "gptq", 16 if scheme == "W4" else 0))
    expected = logits(as_floats(tmp_path / "q", tmp_path / "f"))
    assert torch.equal(logits(tmp_path / "q"), expected)
    assert torch.equal(logits(tmp_path / "q", quantization_config=dequantizing()), expected)
    assert not torch.equal(logits(tmp_path / "q"), torch.zeros_like(expected))


def test_scales_in_bf16_and_several_files(llama, tmp_path):
    recipe = Recipe.of("W4", "gptq", 16, torch.bfloat16)
    report = quantized(llama, tmp_path / "q", recipe, max_shard_bytes=5_000)
    index = json.loads((tmp_path / "q" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    assert index["metadata"]["total_size"] == report.sizes[1] + 14 * 16  # 14 shapes
    expected = logits(as_floats(tmp_path / "q", tmp_path / "f"))
    assert expected.dtype == torch.bfloat16
    assert torch.equal(logits(tmp_path / "q"), expected)


def test_rounded_inputs_are_near(llama, tmp_path):
    quantized(llama, tmp_path / "q", Recipe.of("W8A8", "smoothquant"))
    expected = logits(as_floats(tmp_path / "q", tmp_path / "f"))
    assert torch.equal(logits(tmp_path / "q", quantization_config=dequantizing()), expected)
    rounded = logits(tmp_path / "q")
    assert 0 < (rounded - expected).abs().max() < 0.1 * expected.std()


def test_a_tied_table_stays_a_table(gpt2, tmp_path):
    quantized(gpt2, tmp_path / "q", Recipe.of("W4", "awq", 16))
    assert torch.equal(logits(tmp_path / "q"), logits(as_floats(tmp_path / "q", tmp_path / "f")))


# Stacked experts, fused matrices, norms less 1, mixers, latent attention; all others at night.
QUICK = ("qwen3-moe", "phi3", "deepseek-v3")
REFUSED = re.compile("falcon|mamba2|gpt-oss")
NAMES = [name for name in SAMPLES if not REFUSED.match(name)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in NAMES]
)
def test_folders_of_every_class_become_folders_that_load(name, tmp_path):
    SAMPLES[name].build().save_pretrained(tmp_path / "hf")
    with BlockModel.opened(str(tmp_path / "hf"), torch.device("cpu")) as model:
        quantize(
            model,
            Recipe.of("W8", "rtn"),
            (None, None),
            tmp_path / "q",
            solo_context(),
            tell=lambda line: None,
        )
    expected = logits(as_floats(tmp_path / "q", tmp_path / "f"))
    assert torch.equal(logits(tmp_path / "q"), expected)
    assert torch.equal(logits(tmp_path / "q", quantization_config=dequantizing()), expected)
    whole = logits(tmp_path / "hf")
    assert (expected - whole).abs().median() < 0.05 * whole.std()
    classes = [
        json.loads((tmp_path / kind / "config.json").read_text())["architectures"] for kind in ("hf", "q")
    ]
    assert classes[0] == classes[1]
