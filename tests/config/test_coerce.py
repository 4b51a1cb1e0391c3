"""What users write, literally, and what it is read as."""

from __future__ import annotations

import pytest

from megazero.config.coerce import coerce
from megazero.config.fields import FIELD_BY_PATH
from megazero.config.numbers import Unreadable
from megazero.config.words import nearest
from tests.tables import over_table


@over_table(
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
        ("model.num_experts", "64", (64,)),
        ("model.num_experts", 64, (64,)),
        ("model.num_experts", ["32", "1e2"], (32, 100)),
        ("model.num_experts", [32, 64], (32, 64)),
        ("model.num_experts", "[32]*2+[64]*2", (32, 32, 64, 64)),
        ("model.moe_layer_freq", ["([0]*2+[1]*3)"], (0, 0, 1, 1, 1)),
        ("model.moe_layer_freq", "([0] * 1 + [1, 0]*2)", (0, 1, 0, 1, 0)),
        ("model.moe_layer_freq", ["[0]", "+", "2*[1]"], (0, 1, 1)),
        ("model.moe_layer_freq", "[1]*0+[0,1]", (0, 1)),
        ("model.moe_layer_freq", "[1]" + "+[0]" * 100, (1, *[0] * 100)),
        ("model.moe_aux_loss_coeff", ["1e-2", "0"], (0.01, 0.0)),
        ("model.moe_aux_loss_coeff", 0.5, (0.5,)),
        ("model.moe_router_load_balancing_type", ["AUX_LOSS", "none"], ("aux_loss", "none")),
        ("checkpoint.save", None, None),
    ],
)
def test_reads(path: str, written: object, read: object) -> None:
    value = coerce(FIELD_BY_PATH[path], written)
    assert value == read
    assert type(value) is type(read)


@over_table(
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
        ("model.num_experts", ["8", "many"], "must be an integer"),
        ("model.num_experts", [8.5], "must be an integer"),
        ("model.moe_layer_freq", "[1]*9999999999", "must have at most 10000 items"),
        ("model.moe_layer_freq", "[" + "1," * 2000 + "1]", "must be written in at most 2000 characters"),
        ("model.moe_layer_freq", "[9223372036854775808]", "must be an integer of at most 64 bits"),
        ("model.moe_aux_loss_coeff", ["0.1", "much"], "must be a number"),
        (
            "model.moe_router_load_balancing_type",
            ["aux_los"],
            r"one of aux_loss, seq_aux_loss, global_aux_loss, sinkhorn, none \(did you mean aux_loss\?",
        ),
    ],
)
def test_refuses(path: str, written: object, message: str) -> None:
    with pytest.raises(Unreadable, match=message):
        coerce(FIELD_BY_PATH[path], written)


@over_table(
    "written",
    [
        "[0",
        "[0]*[1]",
        "[0]+1",
        "[0]-[1]",
        "2*3+[1][0]",
        "[True]",
        "[-1]",
        "[0.5]",
        "[[1]]",
        "[x for x in [1]]",
        "[__import__('os')]",
        "list([1])",
        "[1]*2**3",
        "(" * 300 + "[1]" + ")" * 300,
    ],
)
def test_a_pattern_of_layers_is_read_and_never_run(written: str) -> None:
    with pytest.raises(Unreadable, match=r"must be integers, or a list such as \(\[0\]\*3\+\[1\]\*21\)"):
        coerce(FIELD_BY_PATH["model.moe_layer_freq"], written)


@over_table(
    ("word", "close"),
    [
        ("--hiden-size", "--hidden-size"),
        ("--hidddenn-size", "--hidden-size"),
        ("--hdiden-szie", "--hidden-size"),
        ("--hxdden-sxze", "--hidden-size"),
        ("--hxddxn-sxze", None),
        ("--Hidden_Size", "--hidden-size"),
        ("--seq-l", "--seq-length"),
        ("--xyzzy", None),
    ],
)
def test_nearest(word: str, close: str | None) -> None:
    assert nearest(word, ["--hidden-size", "--seq-length"]) == close
