"""Nothing that a pickle names is called, and nothing is opened without leave."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import random
import signal
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from megazero.errors import CheckpointError, ConfigError, DamagedCheckpointError
from megazero.formats.megatron.reader import ImportOptions, MegatronReader
from megazero.formats.pickles import Inert, PositionEmbedding, load_pickle
from tests.formats.megatron.samples import GPT2, VOCAB, Layout, random_weights, save_megatron
from tests.tables import over_table


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@over_table("zipped", [True, False])
@over_table(
    ("function", "named"),
    [(os.mkdir, "posix.mkdir"), (eval, "builtins.eval"), (torch.hub.load, "torch.hub.load")],
)
def test_what_a_pickle_names_is_not_called(tmp_path, function, named, zipped):
    path, mark = tmp_path / "a.pt", tmp_path / "called"
    argument = f"__import__('os').mkdir({str(mark)!r})" if function is eval else str(mark)
    torch.save({"args": Hostile(function, argument)}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=f"names {named}, which was not called") as error:
        load_pickle(path)
    assert str(path) in str(error.value)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Hostile(os.mkdir, str(mark))))
    assert mark.exists()  # the sample does what it says


def test_nothing_is_opened_without_leave(tmp_path, monkeypatch):
    save_megatron(tmp_path, GPT2, random_weights(GPT2), Layout())
    monkeypatch.setattr(torch, "load", lambda *a, **k: pytest.fail("opened"))
    monkeypatch.setattr(Path, "open", lambda *a, **k: pytest.fail("opened"))
    with pytest.raises(
        ConfigError, match="`--trust-pickle` must be given .* pickles, which can name any function"
    ):
        MegatronReader(tmp_path, ImportOptions(vocab_size=VOCAB))


def test_nothing_stays_allowed(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"args": argparse.Namespace(hidden_size=8)}, path)
    before = set(torch.serialization.get_safe_globals())
    assert load_pickle(path)["args"].hidden_size == 8
    assert set(torch.serialization.get_safe_globals()) == before


def test_what_checkpoints_have_beside_weights_is_read_as_inert(tmp_path):
    path = tmp_path / "a.pt"
    known = {
        "rng_state": [{"random_rng_state": random.getstate(), "np_rng_state": np.random.get_state()}],
        "scalar": np.float64(0.5),
        "extra": io.BytesIO(b"text"),
        "space": SimpleNamespace(a=1),
        "signal": signal.SIGTERM,
        "path": Path("a"),
        "args": argparse.Namespace(params_dtype=torch.bfloat16, lr=1e-4, split="9,1", data=["a", "b"]),
    }
    torch.save(known, path)
    found = load_pickle(path)
    assert found["args"] == known["args"]
    assert found["rng_state"][0]["random_rng_state"] == known["rng_state"][0]["random_rng_state"]
    assert [type(found[name]) for name in ("extra", "space", "signal", "path")] == [Inert] * 4


def test_a_signal_that_is_stored_by_its_own_name(tmp_path):
    """Python 3.11.2 stores it so, 3.11.7 does not."""
    data = b"\x80\x02}X\x01\0\0\0scsignal\nSIGTERM\ns."
    assert type(load_pickle(_save_pickle(tmp_path / "a.pt", data))["s"]) is Inert


def test_classes_that_are_not_installed(tmp_path):
    """Stand-ins replace them. Enums are stored by value, or by `getattr` with their name."""
    names = ["megatron.core.transformer.enums.AttnBackend", "megatron.enums.PositionEmbeddingType"]
    (backend, positions) = (f"c{name.rpartition('.')[0]}\n{name.rpartition('.')[2]}\n" for name in names)
    by_value = (
        b"\x80\x02}(X\x01\0\0\0a"
        + backend.encode()
        + b"K\x01\x85RX\x01\0\0\0p"
        + positions.encode()
        + b"K\x01\x85Ru."
    )
    by_name = (
        b"\x80\x02}(X\x01\0\0\0pc__builtin__\ngetattr\n" + positions.encode() + b"X\x05\0\0\0alibi\x86Ru."
    )
    save = lambda data: _save_pickle(tmp_path / "a.pt", data)  # noqa: E731
    found = load_pickle(save(by_value))
    assert (type(found["a"]), found["p"]) == (Inert, PositionEmbedding.rotary)
    assert load_pickle(save(by_name)) == {"p": PositionEmbedding.alibi}


def test_getattr_reaches_nothing(tmp_path):
    """The stand-in for `getattr` gives members of one enum only."""
    data = b"\x80\x02cbuiltins\ngetattr\ncargparse\nNamespace\nX\x08\0\0\0__init__\x86R."
    assert type(load_pickle(_save_pickle(tmp_path / "a.pt", data))) is Inert


def test_a_class_can_be_declared_unneeded(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"a": random.Random(1)}, path)
    with pytest.raises(CheckpointError, match="--inert-class random.Random"):
        load_pickle(path)
    assert type(load_pickle(path, ["random.Random"])["a"]) is Inert


@over_table("content", [b"", b"not a pickle", b"PK\x03\x04 cut", b"\x80\x02}", b"\x80\x02\xff."])
def test_damaged_files_are_named(tmp_path, content):
    path = tmp_path / "a.pt"
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=str(path)) as error:
        load_pickle(path)
    assert "weights_only" not in str(error.value)  # torch advises to load it without restrictions


def test_every_cut_of_a_file_is_an_error_of_ours(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"model": {"weight": torch.zeros(4)}}, path)
    whole = path.read_bytes()
    for size in range(0, len(whole), 37):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=str(path)):
            load_pickle(path)


def _save_pickle(path: Path, data: bytes) -> Path:
    """Write bytes as the pickle in a file of `torch.save`."""
    torch.save({}, path)
    writer = torch._C.PyTorchFileWriter(str(path))
    writer.write_record("data.pkl", data, len(data))
    writer.write_record("byteorder", b"little", 6)
    writer.write_end_of_file()
    return path


def test_what_others_have_allowed_is_not_called(tmp_path):
    """A library may allow classes for the whole process; that stays in force, but not in `load_pickle`."""
    torch.save({"a": random.Random(1)}, tmp_path / "a.pt")
    with torch.serialization.safe_globals([random.Random]):
        before = torch.serialization.get_safe_globals()
        assert type(load_pickle(tmp_path / "a.pt", ["random.Random"])["a"]) is Inert
        assert set(torch.serialization.get_safe_globals()) == set(before)
        with pytest.raises(CheckpointError, match="names random.Random, which was not called"):
            load_pickle(tmp_path / "a.pt")


def test_too_little_memory_does_not_make_a_file_damaged(tmp_path, monkeypatch):
    """The message once said to copy the file again. No message repeats torch's advice to trust it."""
    path = tmp_path / "a.pt"
    torch.save({"w": torch.ones(2)}, path)
    failures = [
        (MemoryError("9 GB"), "there is too little"),
        (RuntimeError("unable to mmap 80 bytes: Cannot allocate memory (12)"), "there is too little"),
        (RuntimeError("unexpected end"), "copy it again"),
        (pickle.UnpicklingError("set `weights_only` to False. WeightsUnpickler error: Bad op\n"), "Bad op"),
    ]
    for failure, said in failures:
        monkeypatch.setattr(torch, "load", Mock(side_effect=failure))
        with pytest.raises(CheckpointError, match=said) as refusal:
            load_pickle(path)
        assert isinstance(refusal.value, DamagedCheckpointError) == (said != "there is too little")
        assert "weights_only" not in str(refusal.value)
