"""Codes in the words of compressed-tensors, and folders that are read or refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megazero.checkpoint.part import Key
from megazero.errors import CheckpointError
from megazero.formats.hf.packed import Compression, QuantizedWeight, words_of
from megazero.formats.hf.reader import HFReader
from tests.formats.hf.samples import LLAMA, config_for, their_tensors, write_folder
from tests.tables import over_table

DOWN = "model.layers.1.mlp.down_proj"


def weights(num_bits: int = 4, symmetric: bool = True, **more) -> dict:
    return {"num_bits": num_bits, "type": "int", "symmetric": symmetric, "strategy": "group", **more}


def section(form: str = "pack-quantized", **changed) -> dict:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights(**changed)}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": []}


def test_words_by_hand():
    """Code c of 4 bits is the digit c + 8, the first one lowest; a row that fills no word ends in zeros."""
    codes = torch.tensor([[-8, -7, -6, -5, -4, -3, -2, -1, 7, 0]], dtype=torch.int8)
    weight = QuantizedWeight(codes, torch.ones(1, 1), 4)
    assert weight.packed().tolist() == [[0x76543210, 0x8F]]
    bytes_ = QuantizedWeight(torch.tensor([[-128, 0, 127, -1]], dtype=torch.int8), torch.ones(1, 1), 8)
    assert bytes_.packed().tolist() == [[0x7FFF8000]]
    largest = QuantizedWeight(torch.full((1, 8), 7, dtype=torch.int8), torch.ones(1, 1), 4)
    assert largest.packed().tolist() == [[-1]]


@over_table(("bits", "columns"), [(4, 8), (4, 21), (8, 4), (8, 7)])
def test_words_are_those_of_compressed_tensors_and_can_be_read(bits, columns):
    pack = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    generator = torch.Generator().manual_seed(bits)
    half = 1 << bits - 1
    codes = torch.randint(-half, half, (5, columns), generator=generator).to(torch.int8)
    weight = QuantizedWeight(codes, torch.ones(5, 1), bits)
    assert torch.equal(weight.packed(), pack.pack_to_int32(codes, bits))
    assert weight.packed().shape[1] == words_of(columns, bits)
    again = QuantizedWeight.of_words(weight.packed(), weight.scales, columns, bits)
    assert torch.equal(again.codes, codes)


def test_numbers_are_codes_times_the_scales_of_their_groups():
    weight = QuantizedWeight(torch.tensor([[1, -2, 3, 4]], dtype=torch.int8), torch.tensor([[0.5, 2.0]]), 4)
    assert weight.group == 2
    assert weight.dequantized().tolist() == [[0.5, -1.0, 6.0, 8.0]]


def folder_of(path, form: str, bits: int = 4):
    """A Llama whose `down_proj` is stored as codes, and the weight that it is."""
    tensors = their_tensors(LLAMA)
    plain = tensors.pop(f"{DOWN}.weight")
    scales = plain.abs().unflatten(1, (2, -1)).amax(2) / (2**bits - 1) * 2
    codes = (
        (plain.unflatten(1, (2, -1)) / scales.unsqueeze(2))
        .round()
        .clamp(-(1 << bits - 1), (1 << bits - 1) - 1)
    )
    weight = QuantizedWeight(codes.flatten(1).to(torch.int8), scales, bits)
    tensors[f"{DOWN}.weight_scale"] = scales
    if form == "int-quantized":
        tensors[f"{DOWN}.weight"] = weight.codes
    else:
        tensors[f"{DOWN}.weight_packed"] = weight.packed()
        tensors[f"{DOWN}.weight_shape"] = torch.tensor(plain.shape)
    config = config_for(LLAMA, quantization_config=section(form, num_bits=bits))
    return write_folder(path, config, tensors), weight


@over_table(("form", "bits"), [("pack-quantized", 4), ("pack-quantized", 8), ("int-quantized", 8)])
def test_codes_are_read_as_the_numbers_that_they_are(form, bits, tmp_path):
    folder, weight = folder_of(tmp_path / f"{form}{bits}", form, bits)
    with HFReader(folder) as reader:
        assert torch.equal(reader.tensor(Key("layers.1.mlp.down.weight")), weight.dequantized())
        stored = reader._stored[f"{DOWN}.weight"]
        assert torch.equal(stored.cut(3, 9).quantized(slice(1, 4)).codes, weight.codes[4:7])


def test_damaged_folders_are_refused(tmp_path):
    folder, _ = folder_of(tmp_path / "a", "pack-quantized")
    tensors = load_file(folder / "model.safetensors")
    for name, wrong in (
        ("weight_scale", torch.ones(36, 3)),
        ("weight_packed", torch.zeros(36, 7, dtype=torch.int32)),
    ):
        save_file({**tensors, f"{DOWN}.{name}": wrong}, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match="must have a scale for each group of its 58 columns"):
            HFReader(folder)
    del tensors[f"{DOWN}.weight_scale"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="and scales None"):
        HFReader(folder)


@over_table(
    ("config", "says"),
    [
        ({"quant_method": "gptq", "bits": 4}, "must be of compressed-tensors"),
        ({"quant_method": "mxfp4"}, "must be of compressed-tensors"),  # gpt-oss, as OpenAI has published it
        (section(symmetric=False), "must have symmetric integers of 4 or 8 bits"),
        (section(num_bits=3), "must have symmetric integers of 4 or 8 bits"),
        (section("float-quantized"), "pack-quantized or int-quantized, but has 'float-quantized'"),
        ({**section(), "config_groups": {"a": {"weights": None}}}, "must have symmetric integers"),
        ({**section(), "config_groups": None}, "must be of compressed-tensors"),
        ("4 bits", "must be of compressed-tensors"),
    ],
)
def test_other_schemes_are_refused(config, says):
    with pytest.raises(ValueError, match=says):
        Compression.of({"quantization_config": json.loads(json.dumps(config))})


def test_a_folder_of_floats_has_no_scheme():
    assert Compression.of({}) is None
    assert Compression.of({"quantization_config": section(num_bits=8)}) == Compression(8, "pack-quantized")
