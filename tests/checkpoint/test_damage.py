"""Damage is found, the file is named, and the older checkpoint comes instead: the damage sweep, in small."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from megazero.checkpoint.blocks import FileRecord
from megazero.checkpoint.folder import LATEST, iteration_folder
from megazero.checkpoint.manifest import MANIFEST, dump_manifest
from megazero.checkpoint.reader import CheckpointReader, Verify
from megazero.errors import DamagedCheckpointError
from proofs.damage_sweep import (
    LAYOUTS,
    NEWEST,
    OLDER,
    PEERS,
    Damage,
    Run,
    compare,
    complete,
    continue_run,
    cuts,
    flipped,
    flips,
    make_run,
    read_everything,
    sweep,
    zeroes,
)
from tests.checkpoint.forged import TENSORS, make

SHARD = "model-00001-of-00001.safetensors"


def refusal(folder: Path, verify: Verify = Verify.FULL) -> str:
    """The reason why a checkpoint cannot be read; empty if it can."""
    try:
        reader = CheckpointReader(folder, verify=verify)
        for key in reader.shapes:
            reader.tensor(key)
    except DamagedCheckpointError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A checkpoint of less than 4 KB; each test undoes its change."""
    return make(tmp_path_factory.mktemp("small"))


def test_every_bit_of_a_manifest_counts(tmp_path):
    path = tmp_path / MANIFEST
    data = dump_manifest(100, {"index.json": FileRecord(3, ("0123456789abcdef",))})
    for bit in range(8 * len(data)):
        path.write_bytes(flipped(data, bit))
        assert f"{path}` must be as it was written" in refusal(tmp_path), bit


def test_every_length_of_every_file_counts(small):
    for path in small.iterdir():
        data = path.read_bytes()
        try:
            for verify in Verify:
                for length in range(0, len(data), 1 if path.name == SHARD else 29):
                    path.write_bytes(data[:length])
                    assert path.name in refusal(small, verify), length
                path.write_bytes(data + b"\n")
                assert path.name in refusal(small, verify)
        finally:
            path.write_bytes(data)


def test_every_byte_of_a_tensor_file_counts(small):
    path = small / SHARD
    data = path.read_bytes()
    try:
        for byte in range(len(data)):
            path.write_bytes(flipped(data, 8 * byte + byte % 8))
            assert SHARD in refusal(small), byte
    finally:
        path.write_bytes(data)


def test_a_checkpoint_of_another_iteration_under_this_name(small, tmp_path):
    shutil.copytree(small, tmp_path / "iter_0000008")
    assert "iter_0000008` must be iter_0000007 by its manifest.json" in refusal(tmp_path / "iter_0000008")
    shutil.copytree(small, tmp_path / small.name)
    reader = CheckpointReader(tmp_path / small.name)
    assert all(torch.equal(reader.tensor(key), tensor) for key, tensor in TENSORS.items())


def test_what_the_manifest_does_not_list_is_not_looked_at(small, tmp_path):
    shutil.copytree(small, tmp_path / small.name)
    (tmp_path / small.name / "model-00002-of-00002.safetensors").write_bytes(b"rubbish")
    reader = CheckpointReader(tmp_path / small.name)
    assert {key: tuple(t.shape) for key, t in TENSORS.items()} == dict(reader.shapes)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    """A run of four ranks with two checkpoints."""
    return make_run(replace(LAYOUTS[0], layers=1), tmp_path_factory.mktemp("run"), 32)


def test_all_kinds_of_damage(run):
    said: list[str] = []
    found = sweep(run, 40, 1, random.Random(5), said.append)
    assert said == []
    assert {kind: each["cases"] for kind, each in found.items()} == {
        "bit flipped": 40,
        "4 KiB zeroed": 4,
        "cut or lengthened": found["cut or lengthened"]["cases"],
        "missing": 15,
        "duplicated": 24,
        "swapped": 12,
        "of another step": 14,
        "folder of another step": 1,
        "name of the newest": 22,
    }
    assert found["cut or lengthened"]["cases"] > 100
    for kind, each in found.items():
        assert complete(each), kind
        assert each["right"] >= 1, kind


def test_the_sweep_would_tell(run):
    """The sweep reports undetected damage, and a load of the wrong checkpoint."""
    nothing = Damage("nothing", {}, ("x",))
    assert read_everything(run, nothing).trouble == "was read without an error"
    assert "resumed from [3] instead of one of (1,)" in continue_run(run, ("loaded",), (OLDER,))
    assert "no remark names the file" in continue_run(run, ("nowhere",), (NEWEST,))
    swapped = Run(**{**vars(run), "digests": {NEWEST: run.digests[OLDER]}})
    assert continue_run(swapped, ("loaded",), (NEWEST,)) == "resumed with other bits than were saved"
    assert continue_run(run, ("loaded",), (NEWEST,)) == ""


def test_damage_that_the_sweep_does():
    files = {"a": bytes(range(256)) * 40, "b": b"xyz"}
    for changes in islice(flips(files, random.Random(1)), 20):
        ((name, data),) = changes.items()
        differing = [x ^ y for x, y in zip(data, files[name], strict=True) if x != y]
        assert len(differing) == 1
        assert bin(differing[0]).count("1") == 1
    for changes in islice(zeroes(files, random.Random(1)), 20):
        ((name, data),) = changes.items()
        assert len(data) == len(files[name])
        assert data != files[name]
    assert [len(data) for each in cuts({"b": b"xyz"}) for data in each.values()] == [0, 1, 2, 4, 6]


def test_two_damaged_checkpoints_are_no_new_run(run):
    shards = [name for name in run.files if "optimizer-00002" in name]
    assert len(shards) == 2
    lost = Damage("both", {name: run.files[name][:-1] for name in shards}, ())
    with run.with_damage(lost):
        trouble = continue_run(run, (), ())
    assert "DamagedCheckpointError at the resume: `load` must hold a whole checkpoint" in trouble
    assert all(name.split("/")[1] in trouble for name in shards)


def test_without_its_name_the_newest_comes(run):
    with run.with_damage(Damage("no name", {LATEST: None}, ())):
        assert continue_run(run, ("loaded",), (NEWEST,)) == ""


def test_sizes_alone_do_not_show_a_flip(run):
    """`--verify-checkpoint size` gives this up for speed."""
    name = "model-00001-of-00004.safetensors"
    data = run.newest[name]
    with run.with_damage(run.damaged("flip", {name: flipped(data, 8 * len(data) - 1)})):
        folder = iteration_folder(run.directory, NEWEST)
        reader = CheckpointReader(folder, verify=Verify.SIZE)
        assert {key: reader.tensor(key).shape for key in reader.shapes} == dict(reader.shapes)
        assert name in refusal(folder)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_others_do_not_notice(tmp_path, peer):
    found = compare(peer, 5, tmp_path / "peer", random.Random(3))
    assert sum(found.values()) == 5
    assert found["silently wrong"] >= 4
