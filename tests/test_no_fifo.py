"""Whatever names a file is refused at once where that is a FIFO or an endless device, with what it is."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from megazero.checkpoint.folder import LATEST, latest_iteration
from megazero.checkpoint.lock import LOCK, WriterLock
from megazero.checkpoint.manifest import INDEX, MANIFEST, STATE
from megazero.checkpoint.reader import CheckpointReader
from megazero.commands.checkpoint.megatron import main_import_megatron
from megazero.commands.moe_report.loads import read_loads
from megazero.config.resolve import parse_config
from megazero.config.user_function import user_function
from megazero.errors import CheckpointError, ConfigError, DamagedCheckpointError, DataError
from megazero.formats.hf.reader import HFReader
from megazero.formats.megatron.reader import ImportOptions, MegatronReader
from megazero.formats.pickles import load_pickle
from tests.checkpoint.forged import edit_manifest, make
from tests.formats.hf.samples import GPT2, VOCAB, config_for, their_tensors, write_folder

MODEL = "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --lr 1 "


@pytest.fixture(params=["fifo", "device"])
def other(request, tmp_path: Path) -> Path:
    """No file: reading it would not end. A test that tries is ended."""
    path = tmp_path / "other.yaml"
    if request.param == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")

    def late(number: int, frame: object) -> None:
        raise TimeoutError("something waits for a FIFO or reads a device")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(5)
    yield path
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def is_what(path: Path) -> str:
    return f"it is a {'FIFO' if path.is_fifo() else 'device'}, not a regular file"


def flags(*further: object) -> None:
    parse_config([*MODEL.split(), *map(str, further)], world_size=1)


@pytest.mark.parametrize("name", ["--config", "--deepspeed_config", "--curriculum-metrics"])
def test_settings(name, other):
    with pytest.raises(ConfigError) as caught:
        flags(name, other)
    assert is_what(other) in str(caught.value)
    assert "write its content to a file and name that" in str(caught.value)


def test_a_base_of_a_configuration(tmp_path, other):
    (tmp_path / "top.yaml").write_text(f"base: {other.name}\n")
    with pytest.raises(ConfigError, match=is_what(other)):
        flags("--config", tmp_path / "top.yaml")


def test_a_users_module(tmp_path, other):
    path = other.rename(tmp_path / "mine.py")
    with pytest.raises(ConfigError, match=is_what(path)):
        user_function(f"{path}:mine", "seqlen_custom_schedule", ConfigError)


def test_a_file_of_metrics(other):
    with pytest.raises(DataError, match=is_what(other)):
        read_loads(other)


def test_arguments_of_megatron(tmp_path, other, capsys):
    argv = [str(tmp_path), str(tmp_path / "out"), "--trust-pickle", "--megatron-args", str(other)]
    assert main_import_megatron(argv) == 2
    assert is_what(other) in capsys.readouterr().err


def test_a_file_of_megatron(tmp_path, other):
    with pytest.raises(DamagedCheckpointError, match=is_what(other)):
        load_pickle(other)
    rank = tmp_path / "iter_0000001" / "mp_rank_00"
    rank.mkdir(parents=True)
    other.rename(rank / "model_optim_rng.pt")
    with pytest.raises(CheckpointError, match="must hold files mp_rank_"):
        MegatronReader(rank.parent, ImportOptions(trust_pickle=True, vocab_size=9))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_hugging_face_folder(tmp_path, other, name):
    folder = write_folder(tmp_path / "hf", config_for(GPT2), their_tensors(GPT2))
    assert HFReader(folder).description.vocab_size == VOCAB
    (folder / name).unlink()
    other.rename(folder / name)
    with pytest.raises(CheckpointError, match="must be a"):
        HFReader(folder)


@pytest.mark.parametrize("name", [MANIFEST, INDEX, STATE, "model-00001-of-00001.safetensors"])
def test_a_checkpoint(tmp_path, other, name):
    folder = make(tmp_path / "run")
    if name != MANIFEST:  # its size is that of an empty file
        edit_manifest(folder, lambda manifest: manifest["files"].update({name: {"size": 0, "blocks": []}}))
    (folder / name).unlink()
    other.rename(folder / name)
    with pytest.raises(CheckpointError):
        CheckpointReader(folder).open(name)


def test_the_file_that_names_the_latest_and_the_lock(tmp_path, other):
    folder = make(tmp_path / "run").parent
    (folder / LATEST).unlink()
    os.link(other, folder / LATEST, follow_symlinks=False)
    with pytest.raises(CheckpointError):
        latest_iteration(folder)
    (folder / LOCK).unlink()
    other.rename(folder / LOCK)
    with pytest.raises((CheckpointError, OSError)):
        WriterLock(folder)
