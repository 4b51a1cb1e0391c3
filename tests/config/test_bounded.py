"""Documents of settings that are larger than they look, or have no end: one sentence, at once."""

from __future__ import annotations

import resource
import time

import pytest

from megazero.config.bounded import MOST_CHARACTERS
from megazero.config.document import read_file, read_text
from megazero.config.metric_text import read_metrics
from megazero.config.numbers import Unreadable
from megazero.config.resolve import parse_config
from megazero.errors import ConfigError
from tests.tables import over_table

SMALL = ["--num-layers", "2", "--hidden-size", "8", "--num-attention-heads", "2", "--seq-length", "8"]
SMALL += ["--max-position-embeddings", "8", "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1"]
SMALL += ["--mock-data", "--vocab-size", "16"]
METRICS = "data_sampling:\n  curriculum_metrics:\n"


def levels(first: str, each: str, count: int = 12) -> str:
    """Mappings that each name the one before nine times; at twelve, a writer would need a terabyte."""
    rows = [f"    m0: &m0 {first}"]
    rows += [f"    m{i}: &m{i} {each.replace('ALIAS', f'*m{i - 1}')}" for i in range(1, count)]
    return METRICS + "\n".join(rows) + "\n"


NINE = ", ".join(f"k{i}: ALIAS" for i in range(9))
HOSTILE = {
    "mappings": levels("{x: lol}", f"{{{NINE}}}"),
    "lists": levels("[lol]", f"[{', '.join(['ALIAS'] * 9)}]"),
    "merged keys": levels("{x: lol}", f"{{<<: [{', '.join(['ALIAS'] * 9)}]}}"),
    "one long text": f"data:\n  split: &a '{'x' * 2000}'\n  data_path: [{', '.join(['*a'] * 600)}]\n",
}


@over_table("name", HOSTILE)
def test_a_document_that_expands_is_refused_at_once(name):
    begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    document = read_text(HOSTILE[name], "c.yaml")
    assert document.problems == [
        "c.yaml: the document must have at most 1048576 characters where its aliases are written out."
    ]
    assert document.settings == []
    assert time.monotonic() - begin < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


@over_table("text", ["data: &a\n  split: *a\n", "&a [*a]\n", "a: &a {b: {c: [1, *a]}}\n"])
def test_a_document_within_itself_is_refused(text):
    assert read_text(text, "c.yaml").problems == ["c.yaml: the document must not contain itself."]


def test_aliases_of_a_usual_size_are_read():
    text = "model:\n  hidden_size: &h 64\n  ffn_hidden_size: *h\ndata:\n  data_path: [&p a, *p, *p]\n"
    values = {setting.spec.path: setting.value for setting in read_text(text).settings}
    assert values == {
        "model.hidden_size": 64,
        "model.ffn_hidden_size": 64,
        "data.data_path": ("a", "a", "a"),
    }


def test_a_node_that_is_named_often_is_looked_at_once():
    """Sixty levels of two would take for ever if each alias were followed."""
    begin = time.monotonic()
    document = read_text(levels("[x]", "[ALIAS, ALIAS]", 60), "c.yaml")
    assert "aliases are written out" in document.problems[0]
    assert time.monotonic() - begin < 5


def test_a_document_without_aliases_may_fill_the_limit(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("training:\n  seed: 7\n#" + "x" * (MOST_CHARACTERS - 22) + "\n")
    assert len(path.read_text()) == MOST_CHARACTERS
    (setting,) = read_file(str(path)).settings
    assert setting.value == 7
    path.write_text(path.read_text() + "\n")
    (problem,) = read_file(str(path)).problems
    assert problem.endswith("c.yaml: it has more than 1048576 characters.")


def test_metrics_of_a_file_that_expands(tmp_path):
    path = tmp_path / "m.yaml"
    path.write_text(HOSTILE["mappings"].replace(METRICS, "").replace("\n    ", "\n").strip())
    with pytest.raises(Unreadable, match="must have at most 1048576 characters where its aliases"):
        read_metrics(str(path))


@over_table("flag", ["--config", "--deepspeed_config", "--curriculum-metrics"])
def test_a_file_that_is_too_long(tmp_path, flag):
    path = tmp_path / "long"
    path.write_text("#" * (MOST_CHARACTERS + 1))
    with pytest.raises(ConfigError, match="it has more than 1048576 characters"):
        parse_config([flag, str(path)], world_size=1)


@over_table(
    "text",
    [
        'tokenizer: {tokenizer_model: "\\ud800"}\n',
        'data: {data_path: [a, "b\\udfff"]}\n',
        'base: "\\ud800"\n',
    ],
)
def test_half_a_surrogate_pair_is_no_text(text):
    """It went through to the system, which raised a UnicodeEncodeError."""
    (problem,) = read_text(text, "c.yaml").problems
    assert "must be text that can be written, without half a surrogate pair" in problem


def test_the_name_of_a_file_that_is_not_utf_8_stays():
    config = parse_config(["--load", "a\udcff", *SMALL], world_size=1).config
    assert config.checkpoint.load == "a\udcff"
