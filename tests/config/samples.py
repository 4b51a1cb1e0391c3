"""Configurations that the tests of this folder start from."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from megazero.config.tree.config import Config

BASE_FLAGS = shlex.split(
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--lr 1e-3 --train-iters 100 --tokenizer-type ByteLevelTokenizer --data-path my_text_document"
)

_BASE = {
    "model": {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32},
    "batch": {"micro_batch_size": 2},
    "optimizer": {"lr": 1e-3},
    "training": {"train_iters": 100},
    "tokenizer": {"tokenizer_type": "ByteLevelTokenizer"},
    "data": {"data_path": ("my_text_document",)},
}


def make_config(changes: Mapping[str, Any] | None = None) -> Config:
    """The base configuration with `section.name -> value` changed."""
    tree = {section: dict(values) for section, values in _BASE.items()}
    for path, value in (changes or {}).items():
        section, name = path.split(".")
        tree.setdefault(section, {})[name] = value
    return Config.model_validate(tree)
