"""Paths of any class wherever a script names a file or a folder."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from megazero.config.deepspeed.load import load_ds_config
from megazero.deepspeed.config.settings import read_settings
from megazero.deepspeed.config.user import DeepSpeedConfig
from megazero.deepspeed.legacy import indexed
from megazero.deepspeed.legacy.inference.checkpoint import checkpoint_files
from megazero.deepspeed.legacy.inference.config import read_config
from megazero.deepspeed.models.recompute import configure
from megazero.deepspeed.reports.monitor import CSVConfig, csvMonitor
from megazero.deepspeed.zero.init import Init
from megazero.deepspeed.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from megazero.mpu.context import ParallelContext
from tests.deepspeed.user_models import on_ranks, start


class Named:
    """A path that is neither text nor one of pathlib's."""

    def __init__(self, path: Path):
        self._path = str(path)

    def __fspath__(self) -> str:
        return self._path


def test_files_of_settings(tmp_path):
    content = {"train_batch_size": 2, "zero_optimization": {"stage": 3}}
    (tmp_path / "ds.json").write_text(json.dumps(content))
    file, folder = Named(tmp_path / "ds.json"), Named(tmp_path)
    assert load_ds_config(file) == content
    assert DeepSpeedConfig(file).zero_optimization_stage == 3
    assert Init(config_dict_or_path=file).enabled
    configure(None, deepspeed_config=file)
    (tmp_path / "inference.json").write_text(json.dumps({"dtype": "fp32"}))
    assert read_config(Named(tmp_path / "inference.json"), {"base_dir": folder}).base_dir == str(tmp_path)
    offload = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": folder}}
    read = read_settings({"train_batch_size": 2, "zero_optimization": offload}, 1)
    assert read.offload.path == str(tmp_path)


def test_checkpoints(tmp_path):
    (tmp_path / "ds.json").write_text(
        '{"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}'
    )

    def work(context: ParallelContext):
        arguments = Namespace(deepspeed_config=Named(tmp_path / "ds.json"))
        engine = start(context, nn.Linear(2, 1), None, args=arguments)
        engine.save_checkpoint(Named(tmp_path / "saved"), tag=Named(Path("first")))
        engine.save_16bit_model(Named(tmp_path / "weights"), Named(Path("all.bin")))
        return engine.load_checkpoint(Named(tmp_path / "saved"))[0], engine.module.weight.detach().clone()

    loaded, weight = on_ranks(1, work)[0]
    assert os.fspath(loaded) == str(tmp_path / "saved" / "first")
    state = get_fp32_state_dict_from_zero_checkpoint(Named(tmp_path / "saved"))
    assert torch.equal(state["weight"], weight)
    weights = Named(tmp_path / "weights" / "all.bin")
    assert checkpoint_files(read_config(None, {"checkpoint": weights}).checkpoint) == [Path(weights)]


def test_monitors_and_datasets(tmp_path):
    monitor = csvMonitor(CSVConfig(enabled=True, output_path=Named(tmp_path), job_name="job"))
    monitor.write_events([("loss", 0.5, 1)])
    assert (tmp_path / "job" / "loss.csv").is_file()
    prefix = Named(tmp_path / "tokens")
    builder = indexed.make_builder(Named(tmp_path / "tokens.bin"), "mmap")
    builder.add_item(torch.tensor([3, 4]))
    builder.finalize(Named(tmp_path / "tokens.idx"))
    assert indexed.dataset_exists(prefix, "mmap")
    assert np.array_equal(indexed.make_dataset(prefix, "mmap")[0], [3, 4])
