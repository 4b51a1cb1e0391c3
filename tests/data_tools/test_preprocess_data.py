from __future__ import annotations

import gzip
import hashlib
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megazero.data.indexed.reader import open_indexed
from megazero.data.tokenizers.base import TokenBatch
from megazero.data.tokenizers.fast import FastChoice
from megazero.data_tools.preprocess_data import main
from megazero.data_tools.preprocessing import encode
from megazero.data_tools.preprocessing.pipeline import PreprocessRun, Workers, preprocess
from tests.data_tools.conftest import BYTES, NULL, visible, write_jsonl
from tests.data_tools.preprocessing import fox_rows, read_documents, spec_of

SCRIPT = Path(__file__).resolve().parents[2] / "data_tools" / "preprocess_data.py"


def test_golden_files_of_the_format_description(tmp_path, out):
    """The md5 sums written down with the format for [[11,12,13],[14]], [[21]], [[31..35],[36,37]]."""
    rows = [{"text": ["11 12 13", "14"]}, {"text": "21"}, {"text": ["31 32 33 34 35", "", "36 37"]}]
    path = write_jsonl(tmp_path / "f.jsonl", rows)
    assert main(["--input", path, "--output-prefix", str(out / "g"), *NULL]) == 0
    digests = [
        hashlib.md5((out / f"g_text_document{end}").read_bytes()).hexdigest() for end in (".idx", ".bin")
    ]
    assert digests == ["c43fac06674f5141176556f6c020c062", "4c9743a37d558150203a2460b0855b0b"]


def test_eod_ends_the_last_sequence_and_is_counted(tmp_path, out):
    """Megatron-DeepSpeed writes the eod but does not count it, so later ones are read one token early."""
    rows = [{"text": ["1 2", "3", ""]}, {"text": ""}, {"text": ["", " "]}, {"text": "4"}, {"text": []}]
    path = write_jsonl(tmp_path / "f.jsonl", rows)
    assert main(["--input", path, "--output-prefix", str(out / "p"), "--append-eod", *NULL]) == 0
    assert read_documents(str(out / "p_text_document")) == [[[1, 2], [3, 1000]], [[4, 1000]]]


def test_all_keys_are_written_and_stay_aligned(tmp_path, out, capsys):
    """Megatron-DeepSpeed finishes the last key's index only."""
    rows = [{"a": "1", "b": ["2", "3"]}, {"a": "4"}, {"a": "", "b": "5"}]
    path = write_jsonl(tmp_path / "f.jsonl", rows)
    flags = ["--json-keys", "a", "b", "--on-error", "skip", *NULL]
    assert main(["--input", path, "--output-prefix", str(out / "p"), *flags]) == 0
    assert read_documents(str(out / "p_a_document")) == [[[1]]]
    assert read_documents(str(out / "p_b_document")) == [[[2], [3]], [[5]]]
    shown = capsys.readouterr()
    assert "skipped 1 lines (missing key 1)" in shown.err
    assert "f.jsonl, line 2: missing key: key `b` is missing (keys: a)" in shown.err


def test_output_is_the_tokenizers_ids_for_any_worker_count_chunk_size_and_packing(tmp_path, out, bpe):
    from megazero.data.tokenizers.build import build_tokenizer

    rows = fox_rows(300)
    plain = write_jsonl(tmp_path / "a.jsonl", rows[:200])
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in rows[200:])))
    job = encode.EncodeJob(spec_of(bpe), ("text",), append_eod=True)
    digests = set()
    for workers, chunk_bytes in ((1, 1 << 20), (1, 500), (2, 3000), (3, 700)):
        prefix = str(out / f"w{workers}_{chunk_bytes}")
        run = PreprocessRun((plain, str(packed)), prefix, job, Workers(workers), chunk_bytes=chunk_bytes)
        totals = preprocess(run).totals
        assert (totals.lines, totals.keys["text"].documents, totals.keys["text"].empty) == (300, 257, 43)
        ends = (".bin", ".idx", ".sum")
        digests.add(tuple(Path(f"{prefix}_text_document{end}").read_bytes() for end in ends))
    assert len(digests) == 1
    tokenizer = build_tokenizer(job.spec)
    expected = [[[*tokenizer.encode(row["text"]), tokenizer.eod]] for row in rows if row["text"]]
    assert read_documents(f"{prefix}_text_document") == expected


def test_slow_path_writes_the_same_bytes_and_says_so(tmp_path, out, bpe, monkeypatch, capsys):
    path = write_jsonl(tmp_path / "f.jsonl", fox_rows(50))
    assert main(["--input", path, "--output-prefix", str(out / "quick"), *bpe]) == 0
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    assert main(["--input", path, "--output-prefix", str(out / "slow"), *bpe]) == 0
    assert (
        "note: encoding with the slower GPT2BPETokenizer itself: gigatoken is not" in capsys.readouterr().err
    )
    for end in (".bin", ".idx"):
        quick, slow = (out / f"{name}_text_document{end}" for name in ("quick", "slow"))
        assert quick.read_bytes() == slow.read_bytes()


@pytest.mark.parametrize("fault", ["wrong ids", "refuses"])
def test_fast_encoder_that_is_wrong_is_found_and_not_used(tmp_path, out, bpe, monkeypatch, capsys, fault):
    class Faulty:
        name = "quickfox"

        def __init__(self, tokenizer):
            self.tokenizer = tokenizer

        def encode_batch(self, texts):
            if fault == "refuses":
                raise ValueError("cannot")
            rows = self.tokenizer.encode_batch(texts).rows()
            return TokenBatch.of(
                [row[::-1] if "zebra" in text else row for row, text in zip(rows, texts, strict=True)]
            )

    path = write_jsonl(tmp_path / "f.jsonl", [{"text": "the fox"}] * 5 + [{"text": "a zebra runs"}] * 20)
    assert main(["--input", path, "--output-prefix", str(out / "true"), *bpe]) == 0
    monkeypatch.setattr(encode, "try_fast", lambda tokenizer: FastChoice(Faulty(tokenizer), None))
    capsys.readouterr()
    assert main(["--input", path, "--output-prefix", str(out / "checked"), *bpe]) == 0
    shown = capsys.readouterr()
    assert "quickfox and GPT2BPETokenizer differ in" in shown.err
    assert ("a zebra runs" if fault == "wrong ids" else "ValueError: cannot") in shown.err
    assert "encoded by GPT2BPETokenizer" in shown.out
    for end in (".bin", ".idx"):
        true, checked = (out / f"{name}_text_document{end}" for name in ("true", "checked"))
        assert true.read_bytes() == checked.read_bytes()


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{oops", "malformed JSON"),
        (b'{"text": "\xff"}', "not UTF-8"),
        (b'{"body": "1"}', "missing key: key `text` is missing (keys: body)"),
        (b'{"text": 5}', "wrong type: key `text` must be a string or a list of strings, but is a number"),
        (b'{"text": "1 x"}', "not tokenizable: key `text`: text must be ids in 0..999"),
    ],
)
def test_bad_line_stops_the_run_naming_file_line_and_reason(tmp_path, out, capsys, line, words, workers):
    good = [{"text": "1 2"}] * 2
    first = write_jsonl(tmp_path / "good.jsonl", good)
    second = write_jsonl(tmp_path / "bad.jsonl", [*good, line, *good, b"{"])
    flags = ["--workers", workers, *NULL]
    assert main(["--input", first, second, "--output-prefix", str(out / "p"), *flags]) == 1
    error = capsys.readouterr().err
    assert f"bad.jsonl, line 3: {words}" in error
    assert "--on-bad-line skip" in error
    assert visible(out) == []


def test_skipping_is_not_advised_where_it_leaves_nothing(tmp_path, out, capsys):
    path = write_jsonl(tmp_path / "f.jsonl", [{"content": "1"}] * 3)
    assert main(["--input", path, "--output-prefix", str(out / "p"), *NULL]) == 1
    error = capsys.readouterr().err
    assert "line 1: missing key: key `text` is missing (keys: content); none of the first 3 lines" in error
    assert "--on-bad-line" not in error


def test_skipped_lines_are_counted_by_reason_and_the_first_listed(tmp_path, out, capsys):
    rows = [{"text": "1"}, b"{", b"", {"text": "2"}, b"[]", b"{", {"text": "x"}, {"text": "3"}]
    path = write_jsonl(tmp_path / "f.jsonl", rows)
    run = ["--input", path, "--output-prefix", str(out / "p"), "--on-error", "skip", *NULL]
    assert main(run) == 0
    error = capsys.readouterr().err
    assert "skipped 4 lines (malformed JSON 2, not an object 1, not tokenizable 1); the first:" in error
    assert [line.split(": ")[0].rsplit(" ", 1)[1] for line in error.splitlines()[1:]] == ["2", "5", "6", "7"]
    assert read_documents(str(out / "p_text_document")) == [[[1]], [[2]], [[3]]]


def test_line_numbers_go_on_across_chunks(tmp_path, out):
    path = write_jsonl(tmp_path / "f.jsonl", [{"text": "1"}] * 50 + [b"{"])
    job = encode.EncodeJob(_null_spec(), ("text",))
    with pytest.raises(Exception, match="line 51: malformed"):
        preprocess(PreprocessRun((path,), str(out / "p"), job, chunk_bytes=40))


def _null_spec():
    from megazero.data.tokenizers.build import TokenizerSpec

    return TokenizerSpec("NullTokenizer", vocab_size=1000)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--json-keys", "text", "text", *NULL], "must name each key once"),
        (["--json-keys", "a/b", *NULL], "must fit into a file name"),
        (["--tokenizer-type", "GPT2BPETokenizer"], "`vocab_file` must name a vocab.json"),
        (["--tokenizer-type", "GPT2BPETokenizer", "--workers", "2"], "`vocab_file` must name a vocab.json"),
    ],
)
def test_unfit_flags_are_refused(tmp_path, out, capsys, flags, words):
    path = write_jsonl(tmp_path / "f.jsonl", [{"text": "1"}])
    assert main(["--input", path, "--output-prefix", str(out / "p"), *flags]) == 1
    assert words in capsys.readouterr().err
    assert visible(out) == []


def test_eod_that_does_not_exist_is_refused(tmp_path, out, capsys):
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\n")
    path = write_jsonl(tmp_path / "f.jsonl", [{"text": "the"}])
    flags = ["--tokenizer-type", "BertWordPieceCase", "--vocab-file", str(vocab)]
    assert main(["--input", path, "--output-prefix", str(out / "p"), "--append-eod", *flags]) == 1
    assert "`--append-eod` must have an end-of-document token" in capsys.readouterr().err
    assert main(["--input", path, "--output-prefix", str(out / "p"), *flags]) == 0


def test_inputs_without_documents_or_files_are_refused(tmp_path, out, capsys):
    empty = write_jsonl(tmp_path / "f.jsonl", [{"text": ""}, b""])
    assert main(["--input", empty, "--output-prefix", str(out / "p"), *BYTES]) == 1
    assert "holds none in 2 lines" in capsys.readouterr().err
    assert main(["--input", str(tmp_path / "*.nothing"), "--output-prefix", str(out / "p"), *BYTES]) == 1
    assert "matches no file" in capsys.readouterr().err
    assert visible(out) == []


def test_plain_progress_lines_come_every_interval(tmp_path, out, capsys):
    path = write_jsonl(tmp_path / "f.jsonl", [{"text": "1 2 3"}] * 5)
    job = encode.EncodeJob(_null_spec(), ("text",))
    preprocess(PreprocessRun((path,), str(out / "p"), job, log_interval=2, chunk_bytes=1))
    starts = [line.split(",")[:2] for line in capsys.readouterr().err.splitlines()]
    assert starts == [["2 documents", " 6 tokens"], ["4 documents", " 12 tokens"]]


def test_runs_as_a_script_from_anywhere(tmp_path, out):
    path = write_jsonl(tmp_path / "f.jsonl", [{"text": "hé"}])
    command = [
        sys.executable,
        str(SCRIPT),
        "--input",
        path,
        "--output-prefix",
        str(out / "p"),
        "--workers",
        "2",
        *BYTES,
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert read_documents(str(out / "p_text_document")) == [[[104, 195, 169]]]
    assert visible(out) == ["p_text_document.bin", "p_text_document.idx", "p_text_document.sum"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's memory account")
def test_memory_does_not_grow_with_the_input(tmp_path, out):
    """Peak memory of a 64 MB run in chunks of 1 MB stays near that of an 8 MB run."""
    peaks = []
    for copies in (1, 8):
        path = tmp_path / f"{copies}.jsonl"
        row = json.dumps({"text": "y" * 1000}).encode() + b"\n"
        path.write_bytes(row * (8_000 * copies))
        prefix = str(out / str(copies))
        # VmHWM: unlike getrusage's figure it does not remember the process before exec.
        code = (
            "from megazero.data_tools.preprocessing.encode import EncodeJob\n"
            "from megazero.data_tools.preprocessing.pipeline import PreprocessRun, preprocess\n"
            "from megazero.data.tokenizers.build import TokenizerSpec\n"
            "job = EncodeJob(TokenizerSpec('ByteLevelTokenizer'), ('text',))\n"
            f"preprocess(PreprocessRun(({str(path)!r},), {prefix!r}, job, chunk_bytes=1 << 20))\n"
            "print(*[line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')])\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=SCRIPT.parents[1], capture_output=True, text=True, check=True
        )
        peaks.append(int(done.stdout.split()[-1]))
    assert peaks[1] < peaks[0] + 8_000  # KiB


def test_ids_of_a_large_vocabulary_take_four_bytes(tmp_path, out):
    path = write_jsonl(tmp_path / "f.jsonl", [{"text": "69999 1"}])
    flags = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "70000", "--append-eod"]
    assert main(["--input", path, "--output-prefix", str(out / "p"), *flags]) == 0
    assert open_indexed(str(out / "p_text_document")).dtype == np.int32
    assert read_documents(str(out / "p_text_document")) == [[[69999, 1, 70000]]]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_line_without_end_is_a_bad_line(tmp_path, out, capsys, packed, workers):
    """64 MB of one line, which gzip makes of 64 kB; memory stays what the limit of 1 MiB allows."""
    good = [json.dumps({"text": f"{i}"}).encode() for i in range(5)]
    path = tmp_path / "f.jsonl"
    with gzip.open(path, "wb", 1) if packed else open(path, "wb") as file:
        file.write(b"\n".join(good[:3]) + b'\n{"text": "')
        for _ in range(64):
            file.write(b"1" * (1 << 20))
        file.write(b'"}\n' + b"\n".join(good[3:]) + b"\n")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    command = ["--input", str(path), "--output-prefix", str(out / "p"), "--workers", workers, *NULL]
    command += ["--max-line-mib", "1"]
    assert main(command) == 1
    assert capsys.readouterr().err == (
        f"error: {path}, line 4: too long: the line has more than 1048576 bytes; correct the line or pass "
        "`--on-bad-line skip`.\n"
    )
    assert visible(out) == []
    assert main([*command, "--on-error", "skip"]) == 0
    assert "(too long 1)" in capsys.readouterr().err
    assert [document[0] for document in read_documents(str(out / "p_text_document"))] == [
        [0],
        [1],
        [2],
        [3],
        [4],
    ]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10  # KiB


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
def test_an_input_that_is_no_file_is_refused(tmp_path, out, capsys):
    os.mkfifo(tmp_path / "fifo")
    for name in (str(tmp_path / "fifo"), "/dev/zero"):
        assert main(["--input", name, "--output-prefix", str(out / "p"), *NULL]) == 1
        assert f"{name} is not a regular file; correct the path" in capsys.readouterr().err
