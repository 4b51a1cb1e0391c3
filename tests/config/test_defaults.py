"""The defaults of Megatron-LM (August 2026) and Megatron-DeepSpeed (July 2025), and what follows for ours.

A default is what a launch of `pretrain_gpt.py` has when the flag is left out, after the parser's own
completion: `--split` is None to Megatron-LM's parser and `969, 30, 1` to its datasets.
"""

from __future__ import annotations

import ast
import csv
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megazero.config.fields import FIELD_BY_PATH, FIELDS, Kind
from megazero.config.resolve import parse_config
from megazero.config.tables import rows
from tests.tables import over_table


def _read(text: str) -> Any:
    """A value as Python writes it; what is no such value is a text."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def _facts() -> Iterator[tuple[str, list[Any]]]:
    """Each setting, and its default in those of the two Megatrons that have it. Off is False for any flag."""
    with Path(__file__).with_name("megatron_defaults.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            given = (row["megatron_lm"], row["megatron_deepspeed"])
            yield row["setting"], [_read(text) for text in given if text != "-"]


REQUIRED = "required"
FACTS = dict(_facts())
DECIDED = {row["setting"]: row for row in rows("defaults.csv")}


def test_each_setting_has_its_facts() -> None:
    """Where neither Megatron has a flag for it, too."""
    assert list(FACTS) == [spec.path for spec in FIELDS]


@over_table("path", [path for path in FACTS if FACTS[path] and path not in DECIDED])
def test_where_both_agree_it_is_the_default(path: str) -> None:
    """So it is where only one of them has the setting."""
    spec = FIELD_BY_PATH[path]
    assert all(default == (REQUIRED if spec.required else spec.default) for default in FACTS[path])


@over_table("path", DECIDED)
def test_what_was_decided_differs_from_one_of_them(path: str) -> None:
    spec = FIELD_BY_PATH[path]
    assert not spec.required
    assert any(default != spec.default for default in FACTS[path])
    assert len(DECIDED[path]["why"]) > 20


@over_table("path", DECIDED)
def test_the_documented_default_is_the_trees(path: str) -> None:
    spec, words = FIELD_BY_PATH[path], DECIDED[path]["here"]
    if spec.default is None or spec.path == "tokenizer.tokenizer_type":
        assert not words.isdecimal()
    else:
        assert words == (spec.default_text if spec.kind is not Kind.BOOL else "on" if spec.default else "off")


LAUNCH = shlex.split(
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --lr 1e-3 --train-iters 100 --data-path my_text_document"
)


@over_table(
    ("flags", "kind"),
    [
        ("--vocab-file v --merge-file m", "GPT2BPETokenizer"),
        ("--vocab-file v --merge-file m --vocab-size 50257", "GPT2BPETokenizer"),
        ("--vocab-size 50257", None),
        ("--tokenizer-type NullTokenizer --vocab-size 50257", "NullTokenizer"),
        ("--tokenizer-type HFTokenizer --tokenizer-model t --vocab-file v", "HFTokenizer"),
    ],
)
def test_a_launch_without_a_tokenizers_name_takes_gpt2s(flags: str, kind: str | None) -> None:
    """17 of the launch lines of Megatron-DeepSpeed's examples were refused for this alone."""
    assert parse_config([*LAUNCH, *flags.split()]).config.tokenizer.tokenizer_type == kind
