"""`megazero data conversations`: what it writes, counts, leaves out and says."""

from __future__ import annotations

import gzip
import json
import sys
from functools import partial
from pathlib import Path

import pytest

from megazero.data.indexed.reader import open_indexed
from megazero.data_tools.conversations import main
from megazero.data_tools.preprocessing import chunks
from tests.data.conversations.templates import CHATML, unmarked
from tests.data.conversations.tokenizer import byte_level, write_folder

pytest.importorskip("transformers")

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Rome."}]
GOOD = (
    {"messages": TURNS},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"instruction": "a", "output": "b"},
    {"prompt": "a", "completion": "b"},
)
ASKED = {"messages": TURNS[:1]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_folder(
        tmp_path_factory.mktemp("tokenizer"), byte_level(), unmarked(CHATML), eos="<|im_end|>"
    )


@pytest.fixture
def convert(tmp_path, folder, capsys):
    """Runs the tool on lines; returns its status and what it prints."""

    def run(lines: list[object], *flags: str, name: str = "in.jsonl") -> tuple[int, str, str]:
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines).encode()
        (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
        where = ["--input", str(tmp_path / name), "--output-prefix", str(tmp_path / "out")]
        status = main([*where, "--tokenizer-model", str(folder), *flags])
        return status, *capsys.readouterr()

    return run


def counted(prefix: Path, tokenizer: Path) -> list[str]:
    """The counted text of each document."""
    from tokenizers import Tokenizer

    words, dataset, begin, texts = (
        Tokenizer.from_file(f"{tokenizer}/tokenizer.json"),
        open_indexed(prefix),
        0,
        [],
    )
    for ids in dataset:
        mask = dataset.mask[begin : begin + len(ids)] == 1
        texts.append(words.decode(ids[mask].tolist(), skip_special_tokens=False))
        begin += len(ids)
    return texts


@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz"])
def test_every_form_in_one_file(tmp_path, folder, convert, name):
    status, out, err = convert(["\ufeff" + json.dumps(GOOD[0]), *GOOD[1:], "\r", ASKED], name=name)
    assert (status, err) == (0, "")
    assert counted(tmp_path / "out", folder) == ["Rome.<|im_end|>", *["b<|im_end|>"] * 3]
    dataset = open_indexed(tmp_path / "out", verify=True)
    assert (len(dataset), dataset.document_index.size) == (4, 5)
    assert out.splitlines() == [
        f"{tmp_path}/out: 4 conversations, {dataset.total_tokens} tokens",
        f"  counted  {int(dataset.mask.sum())} tokens ({dataset.mask.mean():.1%})",
        "  cut off  0 at --max-tokens",
        "  dropped  1 without a counted token",
    ]


def test_a_bad_line_stops_or_is_skipped(tmp_path, convert):
    lines = [GOOD[0], "{", {"messages": []}, GOOD[1]]
    status, out, err = convert(lines)
    assert (status, out) == (1, "")
    assert err.startswith(f"error: {tmp_path}/in.jsonl, line 2: it must be JSON, but is not (")
    assert err.endswith("; correct the line or pass `--on-bad-line skip`.\n")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    status, out, err = convert(lines, "--on-bad-line", "skip")
    assert (status, out.splitlines()[0].split(": ")[1][:15]) == (0, "2 conversations")
    assert err.splitlines()[0] == "skipped 2 bad lines; the first:"
    assert err.splitlines()[2] == (
        f"  {tmp_path}/in.jsonl, line 3: `messages` must be a list of messages, but is missing"
    )


def test_a_row_whose_answer_is_cut_off_is_dropped(tmp_path, folder, convert):
    whole = convert([GOOD[0], GOOD[3]])[0] or open_indexed(tmp_path / "out").lengths.tolist()
    status, out, _ = convert([GOOD[0], GOOD[3]], "--max-tokens", "3")
    assert status == 0
    assert out.splitlines()[2:] == ["  cut off  1 at --max-tokens", "  dropped  1 without a counted token"]
    assert open_indexed(tmp_path / "out").lengths.tolist() == [3] == whole[1:]
    convert([GOOD[0]], "--max-tokens", str(whole[0] - 2))
    assert counted(tmp_path / "out", folder) == ["Rome."]


@pytest.mark.parametrize(
    ("lines", "flags", "says"),
    [
        ([ASKED], (), "hold an answer that counts, but 1 lines hold none and 0 are bad; nothing was written"),
        ([], (), "hold an answer that counts, but 0 lines hold none"),
        ([GOOD[0]], ("--chat-template", "nowhere"), "`--chat-template` must be text, but nowhere is not"),
        ([GOOD[0]], ("--tokenizer-model", "nowhere"), "`tokenizer_model` must name a tokenizer.json"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_refused(tmp_path, convert, lines, flags, says):
    status, out, err = convert(lines, *flags)
    assert (status, out) == (1, "")
    assert err.startswith("error: ")
    assert says in err
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_line_that_is_too_long(convert, monkeypatch):
    monkeypatch.setattr(chunks, "cut", partial(chunks.cut, longest=1 << 20))
    status, _, err = convert([GOOD[0], "x" * (1 << 21), GOOD[0]])
    assert (status, err.split("line 2: ")[1].split(";")[0]) == (1, "it has more than 1 MiB")
    status, out, err = convert([GOOD[0], "x" * (1 << 21), GOOD[0]], "--on-bad-line", "skip")
    assert (status, "out: 2 conversations" in out, "line 2: it has more" in err) == (0, True, True)


def test_without_transformers(convert, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "but is not; pip install transformers" in convert([GOOD[0]])[2]


def test_rows_of_tables(tmp_path, folder, convert):
    """A table gives the tokens that its rows give as lines."""
    pa = pytest.importorskip("pyarrow")
    rows = [{"messages": TURNS}, {"messages": TURNS * 2}]
    convert(rows)
    wanted = [bytes((tmp_path / f"out{suffix}").read_bytes()) for suffix in (".bin", ".mask")]
    from pyarrow import parquet

    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    where = ["--input", str(tmp_path / "in.parquet"), "--output-prefix", str(tmp_path / "table")]
    assert main([*where, "--tokenizer-model", str(folder)]) == 0
    assert [bytes((tmp_path / f"table{suffix}").read_bytes()) for suffix in (".bin", ".mask")] == wanted
