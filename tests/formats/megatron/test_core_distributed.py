"""Megatron-Core's own distributed checkpoints are read, and it loads ours, optimizer state included."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from megazero.checkpoint.part import WEIGHT, Key
from megazero.checkpoint.reader import CheckpointReader
from megazero.formats.megatron.convert import import_megatron
from megazero.formats.megatron.export import ExportOptions, export_megatron
from megazero.formats.megatron.reader import ImportOptions, MegatronReader
from tests.formats.megatron.core_distributed import FOLDERS, MODELS, STEPS
from tests.formats.megatron.core_models import PADDED
from tests.source_tree import ROOT
from tests.tables import over_table

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")
OPTIONS = ImportOptions(trust_pickle=True, vocab_size=PADDED, with_optimizer=True)


def run(*words: object) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.formats.megatron.core_distributed"]
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
    ran = subprocess.run(
        [*command, *map(str, words)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr[-3000:]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("core") / "saved"
    out.mkdir()
    run("save", out)
    return out


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(saved, tmp_path, name):
    """From Core's checkpoint to megazero's and back, every weight and moment keeps its bits."""
    with MegatronReader(saved / name, OPTIONS) as reader:
        ours = import_megatron(reader, tmp_path / "ours")
    read = CheckpointReader(ours)
    assert read.manifest.iteration == 7
    assert (read.facts["updates"], read.facts["state"]["consumed_samples"]) == (STEPS, 28)
    kinds = {key.kind for key in read.shapes}
    assert kinds == {WEIGHT, "exp_avg", "exp_avg_sq"} | (
        {"router"} if name in ("experts", "latent-further-experts") else set()
    )
    expected = torch.load(saved / f"{name}.pt")
    ours, theirs = ("latent_up", "linear_kv_up_proj") if "latent" in name else ("qkv", "linear_qkv")
    qkv = Key(f"layers.1.attention.{ours}.weight", "exp_avg")
    stored = next(
        v
        for n, v in expected.items()
        if n.startswith("exp_avg/") and f"layers.1.self_attention.{theirs}.w" in n
    )
    assert torch.equal(read.tensor(qkv).reshape(stored.shape), stored)

    written = export_megatron(read, tmp_path / "back", ExportOptions(with_optimizer=True))
    run("load", written.folder, name, tmp_path / "loaded.pt")
    loaded = torch.load(tmp_path / "loaded.pt")
    assert (loaded["step"], loaded["iteration"], loaded["samples"]) == (STEPS, 7, 28)
    assert loaded["tensors"].keys() == expected.keys()
    assert all(torch.equal(loaded["tensors"][n], tensor) for n, tensor in expected.items())


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("core") / "folders"
    out.mkdir()
    run("folders", out)
    return out


@over_table("shared", [False, True])
@over_table("name", FOLDERS)
def test_folders_of_ranks(folders, tmp_path, name, shared):
    """From a folder of ranks to Core's distributed form, every weight and moment keeps its bits."""
    with MegatronReader(folders / (f"{name}-shared" if shared else name), OPTIONS) as reader:
        read = CheckpointReader(import_megatron(reader, tmp_path / "ours"))
    assert (read.facts["updates"], read.facts["state"]["consumed_samples"]) == (STEPS, 28)
    written = export_megatron(read, tmp_path / "back", ExportOptions(with_optimizer=True))
    run("load", written.folder, name, tmp_path / "loaded.pt")
    loaded, expected = torch.load(tmp_path / "loaded.pt")["tensors"], torch.load(folders / f"{name}.pt")
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[n], tensor) for n, tensor in expected.items())
