"""What is no file among the files of a run: one sentence at once, for nobody will ever write that FIFO."""

from __future__ import annotations

import json
import os
import socket
import warnings
from pathlib import Path

import numpy as np
import pytest

from megazero.config.tasks import LabelColumn, Task
from megazero.data.gpt_dataset import GPTDataset, GPTSettings
from megazero.data.indexed.reader import open_indexed
from megazero.data.labelled.files import read_labelled
from megazero.data.tokenizers.build import TokenizerSpec, build_tokenizer
from megazero.data_efficiency.analyzed import dataset_of
from megazero.data_efficiency.metric_index import MetricIndex
from megazero.data_efficiency.row_writer import write_rows
from megazero.errors import DataError
from tests.data.corpora import write_golden

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")


def to_fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def to_device(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


OTHERS = pytest.mark.parametrize(
    ("change", "what"), [(to_fifo, "it is a FIFO"), (to_device, "it is a device")], ids=["fifo", "device"]
)


@OTHERS
@pytest.mark.parametrize("suffix", [".idx", ".bin", ".sum"])
def test_datasets(tmp_path, suffix, change, what):
    prefix = write_golden(tmp_path / "g")
    change(Path(f"{prefix}{suffix}"))
    with pytest.raises(DataError, match=rf"g{suffix}` must be .*readable.*, but is not \({what}"):
        open_indexed(prefix)


def test_a_socket_is_no_dataset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the names of sockets must be short
    write_golden(Path("g"))
    Path("g.bin").unlink()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("g.bin")
        with pytest.raises(DataError, match=r"g.bin` must be a readable file, but is not \(it is a socket"):
            open_indexed("g")


@OTHERS
@pytest.mark.parametrize("ending", [".json", "-sample_index.npy"])
def test_index_caches_are_rebuilt(tmp_path, ending, change, what):
    text, cache = open_indexed(write_golden(tmp_path / "g")), tmp_path / "cache"
    settings = GPTSettings(4, cache_dir=cache)
    first = GPTDataset(text, range(5), 9, settings).batch(range(9))
    (path,) = (p for p in cache.iterdir() if p.name.endswith(ending))
    change(path)
    with pytest.warns(UserWarning, match=f"is not usable .*{what}.* it is rebuilt"):
        second = GPTDataset(text, range(5), 9, settings).batch(range(9))
    np.testing.assert_array_equal(first["tokens"], second["tokens"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GPTDataset(text, range(5), 9, settings)


@OTHERS
def test_difficulties(tmp_path, change, what):
    write_rows(tmp_path / "m_index_to_sample", np.dtype("<i4"), [(np.arange(3), np.array([1, 2]))])
    change(tmp_path / "m_dataset.json")
    with pytest.raises(DataError, match=f"m_dataset.json` must say .*{what}"):
        dataset_of(tmp_path / "m_index_to_sample")
    change(tmp_path / "m_index_to_sample.idx")
    with pytest.raises(DataError, match=rf"m_index_to_sample.idx` must be a readable file.*{what}"):
        MetricIndex.of_order(tmp_path / "m_index_to_sample")


@OTHERS
def test_labelled_files(tmp_path, change, what):
    task = Task(texts=("a",), labels=LabelColumn("b"), identity="id")
    change(tmp_path / "train.tsv")
    with pytest.raises(DataError, match=f"train.tsv` must be readable UTF-8 text, but is not .*{what}"):
        read_labelled(str(tmp_path / "train.tsv"), task, labels_needed=True)


SPECS = {
    "tokenizer.json": lambda path: TokenizerSpec("HFTokenizer", model=path),
    "vocab.txt": lambda path: TokenizerSpec("BertWordPieceCase", vocab_file=path),
    "t.model": lambda path: TokenizerSpec("GPTSentencePieceTokenizer", model=path),
    "vocab.json": lambda path: TokenizerSpec("GPT2BPETokenizer", vocab_file=path, merge_file=path),
}


@OTHERS
@pytest.mark.parametrize("name", SPECS)
def test_tokenizers(tmp_path, name, change, what):
    change(tmp_path / name)
    with pytest.raises(DataError, match=rf"must name .*, but .*{name} is not a regular file; correct"):
        build_tokenizer(SPECS[name](str(tmp_path / name)))


@OTHERS
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_what_stands_beside_a_tokenizer(tmp_path, name, change, what):
    """It was passed over, as if there were none, so that documents ended with another token."""
    import tokenizers

    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, "a")).save(
        str(tmp_path / "tokenizer.json")
    )
    (tmp_path / name).write_text(json.dumps({"eos_token": "b"}))
    assert build_tokenizer(TokenizerSpec("HFTokenizer", model=str(tmp_path))).eod == 1
    change(tmp_path / name)
    with pytest.raises(DataError, match=f"{name} is not .*{what}"):
        build_tokenizer(TokenizerSpec("HFTokenizer", model=str(tmp_path)))
