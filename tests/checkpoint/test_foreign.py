"""Folders that are no run's: refused by name, not taken for a run that is to begin."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megazero.checkpoint.folder import LATEST, candidates
from megazero.deepspeed.checkpoint.tags import newest_tag
from megazero.errors import CheckpointError
from tests.checkpoint.forged import make
from tests.tables import over_table


@pytest.fixture
def folder(tmp_path) -> Path:
    """A checkpoint in a run's folder."""
    return make(tmp_path / "run")


FOREIGN = {
    "one checkpoint": ("run/iter_0000007", [], "is one checkpoint; name the folder above it"),
    "Hugging Face": ("hf", ["config.json", "model.safetensors"], "Hugging Face model; .* --load-hf"),
    "Hugging Face, sharded": ("hf", ["model.safetensors.index.json"], "Hugging Face model; .* --load-hf"),
    "Hugging Face, pickled": ("hf", ["pytorch_model.bin"], "Hugging Face model; .* --load-hf"),
    "Megatron": (
        "mlm",
        [f"{LATEST}=100", "iter_0000100/mp_rank_00/model_optim_rng.pt"],
        "iter_0000100` must be a run's folder, but is a checkpoint of Megatron; .* import-megatron",
    ),
    "Megatron, one iteration": ("mlm", ["mp_rank_00_000/model_optim_rng.pt"], "Megatron; .* import-megatron"),
    "Megatron, release": ("mlm", [f"{LATEST}=release", "release/x"], "'release'.* import-megatron"),
    "Megatron core": (
        "mcore",
        [
            f"{LATEST}=100",
            "iter_0000100/.metadata",
            "iter_0000100/__0_0.distcp",
            "iter_0000100/metadata.json",
            "iter_0000100/common.pt",
        ],
        "a checkpoint of Megatron; .* import-megatron",
    ),
    "DeepSpeed": ("ds", ["latest=global_step10", "global_step10/x.pt"], "of DeepSpeed .* import-megatron"),
    "DCP": ("dcp", [".metadata", "__0_0.distcp"], r"torch\.distributed\.checkpoint; convert"),
    "a file": (f"run/{LATEST}", [], "must be a folder to read, but is not: Not a directory; check the path"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_foreign_folders(folder, case):
    name, contents, message = FOREIGN[case]
    place = folder.parents[1] / name
    for each in contents:
        path, _, written = each.partition("=")
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(written)
    with pytest.raises(CheckpointError, match=message) as error:
        candidates(place)
    assert type(error.value) is CheckpointError
    assert str(place) in str(error.value)


@over_table("name", ["..", "../run", "a/../../b", "/etc", "", "a\0b", "x" * 2000])
def test_a_tag_leads_nowhere_else(tmp_path, name):
    (tmp_path / "latest").write_text(name)
    with pytest.raises(CheckpointError, match="latest"):
        newest_tag(tmp_path)


def test_a_folder_that_may_not_be_read(folder, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(
        CheckpointError, match=f"`{folder.parent}` must be a folder to read.*Permission denied"
    ):
        candidates(folder.parent)


@pytest.mark.parametrize("contents", [[], ["tensorboard/events", "run.log", "config.yaml", "config.json"]])
def test_a_folder_without_checkpoints_is_a_new_run(tmp_path, contents):
    for each in contents:
        (tmp_path / each).parent.mkdir(exist_ok=True)
        (tmp_path / each).touch()
    assert candidates(tmp_path).folders == candidates(tmp_path).remarks == ()
    assert candidates(tmp_path / "missing").folders == ()
