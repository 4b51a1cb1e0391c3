"""Units: what they are made of, who makes which, what is kept and what is refused."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from megazero.data.tokenizers.build import TokenizerSpec
from megazero.data.tokenizers.fast import FastChoice
from megazero.data_tools import merge_datasets
from megazero.data_tools.cli import Shard
from megazero.data_tools.preprocess_data import main
from megazero.data_tools.preprocessing import encode, units
from megazero.data_tools.preprocessing.chunks import FileSegment
from megazero.data_tools.preprocessing.encode import EncodeJob
from megazero.data_tools.preprocessing.pipeline import PreprocessRun
from megazero.data_tools.preprocessing.shards import make_units
from megazero.data_tools.preprocessing.units import UnitFolder, UnitPlan
from megazero.errors import DataError
from tests.data_tools.conftest import NULL, visible, write_jsonl
from tests.data_tools.preprocessing import read_documents, spec_of
from tests.tables import over_table

JOB = EncodeJob(TokenizerSpec("NullTokenizer", vocab_size=1000), ("text",))


def run_of(folder: Path, *sizes: int) -> PreprocessRun:
    """Files of lines of 14 bytes."""
    paths = []
    for number, size in enumerate(sizes):
        rows = [{"text": f"{(number + i) % 10}"} for i in range(size)]
        paths.append(write_jsonl(folder / f"{number}.jsonl", rows))
    return PreprocessRun(tuple(paths), str(folder / "p"), JOB)


def test_large_files_are_divided_and_small_ones_are_together(tmp_path):
    run = run_of(tmp_path, 10, 5, 2, 2, 30, 1)
    a, b, c, d, e, f = run.paths
    assert os.path.getsize(a) == 140
    plan = UnitPlan.of(run, 100)
    assert [unit.segments for unit in plan.units] == [
        (FileSegment(a, 0, 100),),
        (FileSegment(a, 100, 200),),
        (FileSegment(b), FileSegment(c), FileSegment(d)),
        *((FileSegment(e, start, start + 100),) for start in range(0, 500, 100)),
        (FileSegment(f),),
    ]
    assert len({unit.name for unit in plan.units}) == 9


def test_shards_divide_the_bytes_evenly_and_nothing_is_left_out(tmp_path):
    plan = UnitPlan.of(run_of(tmp_path, 100, 3, 7, 50), 100)
    for shards in range(1, 40):
        shares = [plan.share(Shard(number, shards)) for number in range(shards)]
        assert [unit for share in shares for unit in share] == list(plan.units)
        assert max(sum(unit.bytes for unit in share) for share in shares) <= 2240 / shards + 140


@over_table(
    "change",
    [
        lambda run: [os.utime(run.paths[0], ns=(1, 1)), run][1],
        lambda run: [Path(run.paths[0]).write_bytes(b'{"text": "1"}\n' * 4), run][1],
        lambda run: replace(run, job=replace(JOB, spec=replace(JOB.spec, vocab_size=999))),
        lambda run: replace(run, job=replace(JOB, append_eod=True)),
        lambda run: replace(run, job=replace(JOB, skip_bad_lines=True)),
        lambda run: replace(run, longest_line=7),
        None,
    ],
    ids=["time", "size", "tokenizer", "eod", "bad lines", "longest line", "code"],
)
def test_a_units_name_depends_on_all_that_its_bytes_depend_on(tmp_path, monkeypatch, change):
    run = run_of(tmp_path, 3)
    (before,) = UnitPlan.of(run, 1000).units
    other = replace(run, prefix="elsewhere", log_interval=5, chunk_bytes=9)
    assert UnitPlan.of(other, 1000).units == (before,)
    if change is None:
        monkeypatch.setattr(units, "_SOURCES", ("data",))
    (after,) = UnitPlan.of(run if change is None else change(run), 1000).units
    assert after.name != before.name


def test_a_tokenizer_is_known_by_its_files(tmp_path, bpe):
    run = replace(run_of(tmp_path, 3), job=replace(JOB, spec=spec_of(bpe)))
    before = UnitPlan.of(run, 1000)
    other = tmp_path / "other.json"
    other.write_bytes(Path(run.job.spec.vocab_file).read_bytes())
    moved = replace(run, job=replace(JOB, spec=replace(run.job.spec, vocab_file=str(other))))
    assert UnitPlan.of(moved, 1000).units == before.units
    other.write_bytes(other.read_bytes() + b" ")
    assert UnitPlan.of(moved, 1000).settings["tokenizer"] != before.settings["tokenizer"]


def test_what_is_missing_or_of_another_run_is_named_and_nothing_is_written(tmp_path, out, capsys):
    run = run_of(tmp_path, 3, 2)
    flags = ["--input", *run.paths, "--output-prefix", str(out / "p")]
    assert main([*flags, "--shard", "0/1", *NULL]) == 0
    assert "shard 0 of 1: 1 units are whole in" in capsys.readouterr().out
    for more, words in (
        (["--append-eod"], "is of one with another `append-eod`"),
        (["--on-bad-line", "skip", "--unit-mib", "5"], "another `on-bad-line` and `unit`"),
    ):
        assert main([*flags, *more, "--shard", "0/1", *NULL]) == 1
        assert words in capsys.readouterr().err
    assert main(["--input", run.paths[1], *flags[3:], "--merge", *NULL]) == 1
    assert "is of one with other inputs; delete that file to go on" in capsys.readouterr().err
    (mark,) = out.glob("p.units/??/*.json")
    mark.rename(out / "mark")
    merge = ["--input", str(out / "p.units"), "--output-prefix", str(out / "q")]
    assert merge_datasets.main(merge) == 1
    assert f"must hold all 1 units, but lacks 1, such as that of {run.paths[0]} and 1 more files" in (
        capsys.readouterr().err
    )
    assert visible(out) == ["mark", "p.units"]
    (out / "mark").rename(mark)
    assert merge_datasets.main(merge) == 0
    assert "q_text_document: 5 documents, 5 tokens" in capsys.readouterr().out
    assert read_documents(str(out / "q_text_document")) == [[[0]], [[1]], [[2]], [[1]], [[2]]]
    assert merge_datasets.main([*merge[:2], str(out / "q_text_document"), *merge[2:]]) == 1
    assert "must be one folder of units, but names 2 things" in capsys.readouterr().err


def test_a_damaged_unit_is_not_merged(tmp_path):
    run = run_of(tmp_path, 3)
    plan = UnitPlan.of(run, 1000)
    folder = UnitFolder(tmp_path / "units", plan)
    make_units(run, folder, plan.units)
    (tokens,) = tmp_path.glob("units/??/*.bin")
    tokens.write_bytes(b"\7" + tokens.read_bytes()[1:])
    with pytest.raises(DataError, match="must have CRC-32"):
        folder.merge(str(tmp_path / "q"), None)
    assert not list(tmp_path.glob("q*"))


def test_bad_lines_of_all_units_are_listed_in_order(tmp_path, out, capsys):
    rows = [{"text": "1"}, b"{", {"text": "2"}, b"[]", {"text": "3"}, b"{"]
    run = replace(
        PreprocessRun((write_jsonl(tmp_path / "f", rows),), str(out / "p"), replace(JOB, skip_bad_lines=True))
    )
    plan = UnitPlan.of(run, 15)
    folder = UnitFolder(out / "units", plan)
    make_units(run, folder, plan.units)
    totals = UnitFolder.existing(out / "units").merge(run.prefix, str(out / "bad"))
    assert (len(plan.units), totals.lines, dict(totals.problems)) == (
        4,
        6,
        {"malformed JSON": 2, "not an object": 1},
    )
    listed = [json.loads(line) for line in (out / "bad").read_text().splitlines()]
    assert [(row["line"], row["reason"]) for row in listed] == [
        (2, "malformed JSON"),
        (4, "not an object"),
        (6, "malformed JSON"),
    ]


def test_a_bad_line_stops_a_shard_and_what_is_whole_is_kept(tmp_path, capsys):
    path = write_jsonl(tmp_path / "f", [{"text": "1"}] * 9 + [b"{"])
    run = PreprocessRun((path,), str(tmp_path / "p"), JOB)
    plan = UnitPlan.of(run, 50)
    folder = UnitFolder(tmp_path / "units", plan)
    with pytest.raises(DataError, match="line 10: malformed JSON"):
        make_units(run, folder, plan.units)
    assert [unit.segments[0].start for unit in folder.missing(plan.units)] == [100]


def test_when_the_fast_encoder_is_wrong_all_units_are_made_without_it(tmp_path, bpe, monkeypatch, capsys):
    """Those that are there may be wrong too, where nothing was compared."""

    class Faulty:
        name = "quickfox"

        def __init__(self, tokenizer):
            self.tokenizer = tokenizer

        def encode_batch(self, texts):
            if any("zebra" in text for text in texts):
                raise ValueError("cannot")
            return self.tokenizer.encode_batch([text.upper() if "late" in text else text for text in texts])

    monkeypatch.setattr(encode, "_CHECKED_PER_CHUNK", 0)
    rows = [{"text": "early fox"}] * 20 + [{"text": "late fox"}] * 5 + [{"text": "a zebra"}]
    run = PreprocessRun(
        (write_jsonl(tmp_path / "f", rows),), str(tmp_path / "p"), replace(JOB, spec=spec_of(bpe))
    )
    plan = UnitPlan.of(run, 540)
    folder = UnitFolder(tmp_path / "units", plan)
    make_units(replace(run, job=replace(run.job, fast=False)), folder, plan.units)
    folder.merge(str(tmp_path / "true"), None)
    monkeypatch.setattr(encode, "try_fast", lambda tokenizer: FastChoice(Faulty(tokenizer), None))
    folder = UnitFolder(tmp_path / "others", plan)
    make_units(run, folder, plan.units[:1])
    make_units(run, folder, plan.units[1:])
    assert "making all units by the slower tokenizer itself" in capsys.readouterr().err
    with pytest.raises(DataError, match="but lacks 1, such as that of"):
        UnitFolder(folder.path, plan).merge(str(tmp_path / "q"), None)
    make_units(run, folder, plan.units[:1])
    UnitFolder(folder.path, plan).merge(str(tmp_path / "q"), None)
    for end in (".bin", ".idx"):
        true, checked = (tmp_path / f"{name}_text_document{end}" for name in ("true", "q"))
        assert true.read_bytes() == checked.read_bytes()
