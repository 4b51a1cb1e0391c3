"""What users write, literally, and what it is read as."""

from __future__ import annotations

import pytest

from megazero.config.coerce import Unreadable, coerce, nearest
from megazero.config.fields import FIELD_BY_PATH


@pytest.mark.parametrize(
    ("path", "written", "read"),
    [
        ("model.num_layers", "24", 24),
        ("training.train_tokens", "300000000000", 300_000_000_000),
        ("training.train_tokens", "300_000", 300_000),
        ("training.train_tokens", "3e11", 300_000_000_000),
        ("training.train_tokens", "1.5e3", 1500),
        ("training.train_tokens", 3e11, 300_000_000_000),
        ("batch.micro_batch_size", "4.0", 4),
        ("optimizer.lr", "2.0e-4", 2e-4),
        ("optimizer.lr", ".01", 0.01),
        ("optimizer.lr", "1e-4", 1e-4),
        ("optimizer.clip_grad", 1, 1.0),
        ("model.normalization", "rmsnorm", "RMSNorm"),
        ("optimizer.lr_decay_style", "wsd", "WSD"),
        ("tokenizer.tokenizer_type", "gpt2bpetokenizer", "GPT2BPETokenizer"),
        ("data.split", "949,50,1", "949,50,1"),
        ("data.data_path", ["0.3", "a", 0.7, "b"], ("0.3", "a", "0.7", "b")),
        ("data.data_path", "0.3 a 0.7 b", ("0.3", "a", "0.7", "b")),
        ("batch.rampup_batch_size", ["16", "8", "1e6"], (16, 8, 1_000_000)),
        ("parallel.sequence_parallel", True, True),
        ("checkpoint.save", None, None),
    ],
)
def test_reads(path: str, written: object, read: object) -> None:
    value = coerce(FIELD_BY_PATH[path], written)
    assert value == read
    assert type(value) is type(read)


@pytest.mark.parametrize(
    ("path", "written", "message"),
    [
        ("model.num_layers", "2.5", "must be an integer"),
        ("model.num_layers", "twelve", "must be an integer"),
        ("model.num_layers", "", "must be an integer"),
        ("model.num_layers", True, "must be an integer"),
        ("model.num_layers", "1e999999999", "must be an integer"),
        ("model.num_layers", "9" * 5000, "must be an integer of fewer digits"),
        ("model.num_layers", float("inf"), "must be an integer"),
        ("model.num_layers", None, "must not be null"),
        ("optimizer.lr", "fast", "must be a number"),
        ("optimizer.lr", False, "must be a number"),
        ("optimizer.lr", [1], "must be a number"),
        ("data.split", 969, "must be text"),
        ("model.normalization", "rmsnrm", r"must be one of LayerNorm, RMSNorm \(did you mean RMSNorm\?\)"),
        ("model.normalization", 3, "must be one of LayerNorm, RMSNorm"),
        ("parallel.sequence_parallel", 1, "must be true or false"),
        ("batch.rampup_batch_size", ["16", "8"], "must be 3 integers"),
        ("data.data_path", [{"a": 1}], "must be a list of texts"),
    ],
)
def test_refuses(path: str, written: object, message: str) -> None:
    with pytest.raises(Unreadable, match=message):
        coerce(FIELD_BY_PATH[path], written)


@pytest.mark.parametrize(
    ("word", "close"),
    [("--hiden-size", "--hidden-size"), ("--Hidden_Size", "--hidden-size"), ("--xyzzy", None)],
)
def test_nearest(word: str, close: str | None) -> None:
    assert nearest(word, ["--hidden-size", "--seq-length"]) == close
