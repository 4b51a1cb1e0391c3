"""`megazero checkpoint convert`: whole tensors, few files, and still a checkpoint."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors import safe_open

from megazero.checkpoint.folder import latest_iteration
from megazero.checkpoint.part import Key
from megazero.checkpoint.reader import CheckpointReader
from megazero.commands.checkpoint import main
from megazero.commands.checkpoint.convert import ConvertOptions, convert
from megazero.config.resolve import parse_config
from megazero.errors import CheckpointError
from megazero.mpu.launch import Launch
from megazero.train.pretraining import pretrain
from tests.checkpoint.faulty_disk import FaultyDisk, Full
from tests.commands.checkpoint.samples import SMALL, TENSORS, UP, flip, save

NAMES = "model.safetensors.index.json"


def opened_by_name(folder) -> dict[str, torch.Tensor]:
    """The weights, as a program does that knows Hugging Face's index and the safetensors library alone."""
    index = json.loads((folder / NAMES).read_text())
    found = {}
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, framework="pt") as tensors:
            found[name] = tensors.get_tensor(name)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    return found


def test_shards_become_whole_tensors(tmp_path, capsys):
    save(tmp_path / "a", 3, ranks=2)
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    folder = tmp_path / "b" / "iter_0000003"
    assert f"wrote  {folder}: 3 tensors in 2 files" in capsys.readouterr().out
    assert sorted(os.listdir(folder)) == [
        "index.json",
        "manifest.json",
        "model-00001-of-00001.safetensors",
        NAMES,
        "optimizer-00001-of-00001.safetensors",
        "state.json",
    ]
    assert NAMES in CheckpointReader(folder).manifest.files
    weights = opened_by_name(folder)
    assert weights.keys() == {key.name for key in TENSORS if key.kind == "weight"}
    assert all(torch.equal(weights[key.name], TENSORS[key]) for key in TENSORS if key.kind == "weight")
    assert latest_iteration(tmp_path / "b") == 3
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert main(["verify", str(tmp_path / "b")]) == 0


def test_a_training_goes_on_from_it_bit_for_bit(run, tmp_path):
    assert main(["convert", str(run / "iter_0000002"), str(tmp_path / "b"), "--shard-size", "20KB"]) == 0
    folder = tmp_path / "b" / "iter_0000002"
    assert len([name for name in os.listdir(folder) if name.startswith("model-")]) > 3
    flags = [*SMALL.split(), "--load", str(tmp_path / "b"), "--save", str(tmp_path / "c")]
    state = pretrain(parse_config(flags, world_size=1).config, Launch())
    assert state.iteration == 4
    assert main(["diff", str(run), str(tmp_path / "c")]) == 0


def test_weights_alone_in_bf16_start_a_training(run, tmp_path, capsys):
    flags = ["--weights-only", "--dtype", "bf16"]
    assert main(["convert", str(run), str(tmp_path / "b"), *flags]) == 0
    folder = tmp_path / "b" / "iter_0000004"
    before, after = CheckpointReader(run / "iter_0000004"), CheckpointReader(folder)
    assert set(after.shapes) == {key for key in before.shapes if key.kind == "weight"}
    assert all(torch.equal(after.tensor(key), before.tensor(key).bfloat16()) for key in after.shapes)
    assert after.facts["converted"] == {"megazero": "0.1.0", "dtype": "bfloat16", "weights_only": True}
    argv = [
        *SMALL.split(),
        "--train-iters",
        "1",
        "--load",
        str(tmp_path / "b"),
        "--save",
        str(tmp_path / "c"),
    ]
    more = ["--override-opt_param-scheduler"]
    with pytest.raises(CheckpointError, match="must hold optimizer state"):
        pretrain(parse_config([*argv, *more], world_size=1).config, Launch())
    assert pretrain(parse_config([*argv, "--finetune"], world_size=1).config, Launch()).iteration == 1


def test_what_is_there_is_not_replaced(run, capsys):
    assert main(["convert", str(run), str(run)]) == 1
    assert "must not hold iteration 4 yet" in capsys.readouterr().err
    assert main(["verify", str(run)]) == 0


@pytest.mark.parametrize("size", ["0", "five", "5XB"])
def test_a_size_that_is_none(run, tmp_path, size):
    assert main(["convert", str(run), str(tmp_path / "b"), "--shard-size", size]) == 2
    assert not (tmp_path / "b").exists()


def test_a_weight_beyond_the_dtype_is_refused_and_leaves_nothing(tmp_path, capsys):
    save(tmp_path / "a", tensors={Key("w"): torch.tensor([1.0, 7e4])})
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--dtype", "fp16"]) == 1
    assert "`w` must fit into torch.float16, but has magnitudes up to 70000" in capsys.readouterr().err
    assert os.listdir(tmp_path / "b") == [".lock"]
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--dtype", "bf16"]) == 0


def test_damage_is_not_carried_over(tmp_path, capsys):
    folder = save(tmp_path / "a", tensors={UP: torch.zeros(1000, 30)})
    flip(folder / "model-00001-of-00001.safetensors", 5000)
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "has hash" in capsys.readouterr().err
    assert os.listdir(tmp_path / "b") == [".lock"]


def test_a_full_disk_leaves_nothing(run, tmp_path):
    reader = CheckpointReader(run / "iter_0000004")
    with pytest.raises(CheckpointError, match="must be written"):
        convert(reader, tmp_path / "b", ConvertOptions(), FaultyDisk(Full(100_000)))
    assert os.listdir(tmp_path / "b") == [".lock"]
