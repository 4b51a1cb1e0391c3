"""Whole weights out of checkpoints, by the names and scripts that DeepSpeed's users know."""

from __future__ import annotations

import contextvars
import json
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from megazero.deepspeed.checkpoint import to_universal as universal
from megazero.deepspeed.surface import read_names
from megazero.deepspeed.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    convert_zero_checkpoint_to_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    get_optim_files,
    load_state_dict_from_zero_checkpoint,
    parse_size,
)
from megazero.errors import CheckpointError, ConfigError
from megazero.formats.deepspeed.files import get_zero_ckpt_name_for_rank
from megazero.formats.deepspeed.pickles import clone_tensors_for_torch_save
from megazero.mpu.context import ParallelContext
from tests.deepspeed.user_models import ADAMW, Encoder, Tied, build, on_ranks, settings, start, train_engine
from tests.source_tree import ROOT


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of two ranks at stage 3 in bf16, and its masters."""
    folder = tmp_path_factory.mktemp("saved")

    def work(context: ParallelContext):
        config = settings(3, optimizer=ADAMW, bf16={"enabled": True})
        engine = start(context, build(Encoder), config)
        train_engine(engine, context, range(2))
        engine.save_checkpoint(folder)
        state = engine.optimizer.shards.full_state()
        return {spec.name: kinds["weight"].clone() for spec, kinds in state}

    return folder, on_ranks(2, work)[0]


def test_all_names_are_there_in_fp32(saved):
    folder, masters = saved
    state = get_fp32_state_dict_from_zero_checkpoint(folder)
    assert state.keys() == Encoder().state_dict().keys()
    assert state["head.weight"] is state["embedding.weight"]
    for name, value in masters.items():
        assert torch.equal(state[name], value), name
    lazy = get_fp32_state_dict_from_zero_checkpoint(folder, "global_step2", lazy_mode=True)
    assert torch.equal(lazy["head.weight"], state["head.weight"])
    with pytest.raises(KeyError):
        lazy["none"]
    model = load_state_dict_from_zero_checkpoint(build(Encoder, seed=5), folder)
    assert torch.equal(model.embedding.weight, masters["embedding.weight"])
    assert model.head.weight is model.embedding.weight
    with pytest.warns(UserWarning, match=r"lacks weights of the model \(scale, "):
        load_state_dict_from_zero_checkpoint(Tied(), folder)


@pytest.mark.parametrize("safe", [False, True])
def test_files_are_cut_at_a_size_with_an_index(saved, tmp_path, safe):
    folder, masters = saved
    convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path, "2KB", safe)
    stem, suffix = ("model", ".safetensors") if safe else ("pytorch_model", ".bin")
    index = json.loads((tmp_path / f"{stem}{suffix}.index.json").read_text())
    found: dict[str, torch.Tensor] = {}
    for name in sorted(set(index["weight_map"].values())):
        part = load_file(tmp_path / name) if safe else torch.load(tmp_path / name, weights_only=True)
        assert {index["weight_map"][each] for each in part} == {name}
        assert sum(value.nbytes for value in part.values()) <= 2000
        found |= part
    assert len(set(index["weight_map"].values())) > 1
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in found.values())
    assert found.keys() == Encoder().state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in masters.items())


def test_one_file_and_other_types(saved, tmp_path):
    folder, masters = saved
    convert_zero_checkpoint_to_state_dict(folder, tmp_path, "bf16", safe_serialization=True)
    state = load_file(tmp_path / "model.safetensors")
    assert torch.equal(state["embedding.weight"], masters["embedding.weight"].bfloat16())
    assert state["seen"].dtype == torch.float32
    with pytest.raises(ConfigError, match="`dtype` must be one of fp32, .*, but is int3"):
        convert_zero_checkpoint_to_state_dict(folder, tmp_path, "int3")


def test_the_scripts_beside_a_checkpoint_run(saved, tmp_path, monkeypatch, capsys):
    folder, masters = saved
    words = [str(folder), str(tmp_path), "--dtype", "fp32", "-d"]
    monkeypatch.setattr(sys, "argv", ["zero_to_torch.py", *words])
    runpy.run_path(str(folder / "zero_to_torch.py"), run_name="__main__")
    assert "embedding.weight [11, 8]" in capsys.readouterr().out
    state = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert torch.equal(state["embedding.weight"], masters["embedding.weight"])
    text = (folder / "zero_to_fp32.py").read_text()
    assert text.count("\n") < 6
    compile(text, "zero_to_fp32.py", "exec")


def test_what_is_not_there_is_named(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(CheckpointError, match=r"latest` must name the checkpoint, .* has notes.txt; correct"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="must hold zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        get_optim_files(tmp_path)


def test_files_of_optimizers_are_in_the_order_of_their_numbers(tmp_path):
    names = [f"zero_{number}_optim_states.pt" for number in range(12)]
    for name in names:
        (tmp_path / name).write_text("")
    assert [Path(path).name for path in get_optim_files(tmp_path)] == names


def test_sizes_are_read():
    assert [parse_size(size) for size in (5, "7", "5GB", "1.5 KiB", "2m")] == [5, 7, 5 * 10**9, 1536, 2000000]
    for wrong in ("", "GB", "0", "-1", "5XB"):
        with pytest.raises(ConfigError, match="`max_shard_size` must be a size such as 5GB"):
            parse_size(wrong)


def test_a_conversion_to_universal_gives_the_same_files_and_says_why(saved, tmp_path, capsys):
    folder, _ = saved
    words = ["--input_folder", str(folder / "global_step2"), "--output_folder", str(tmp_path / "u")]
    universal.main(words)
    assert "nothing to convert" in capsys.readouterr().out
    universal.main(SimpleNamespace(input_folder=words[1], output_folder=str(tmp_path / "v")))
    files = sorted(path.name for path in (folder / "global_step2").rglob("*"))
    for output in ("u", "v"):
        assert sorted(path.name for path in (tmp_path / output).rglob("*")) == files
    with pytest.raises(CheckpointError, match="must hold a checkpoint"):
        universal.main(["--input_folder", str(tmp_path), "--output_folder", "u"])


def test_clones_hold_their_own_memory():
    base = torch.arange(100.0)
    found = clone_tensors_for_torch_save({"a": base[:2], "b": [(base[3:4], "x")]})
    assert found["a"].untyped_storage().nbytes() == 8
    assert found["b"][0][0].tolist() == [3.0]
    assert get_zero_ckpt_name_for_rank("d", 1, 2) == "d/zero_pp_rank_1_mp_rank_02_optim_states.pt"


def test_the_names_of_the_table_exist():
    rows = [row for row in read_names() if set(row.modules) & {"checkpointing", "utils.zero_to_fp32"}]
    assert len(rows) > 15
    for row in rows:
        assert callable(row.value()), row.name


def test_the_examples_of_the_page_run(tmp_path):
    text = (ROOT / "docs/deepspeed/checkpoints.md").read_text()
    config = settings(2, optimizer=ADAMW)
    names = {
        "model": torch.nn.Linear(3, 3),
        "config": config,
        "folder": tmp_path,
        "layer": torch.nn.Linear(3, 3),
        "hidden": torch.ones(2, 3),
    }
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) == 3
    for block in blocks:
        contextvars.copy_context().run(exec, block, names)
    assert names["hidden"].requires_grad
