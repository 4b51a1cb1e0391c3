from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.data_tools.looking.show import main
from tests.tables import over_table

BYTES = ["--tokenizer-type", "ByteLevelTokenizer"]
EOD = 256


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    with IndexedDatasetWriter(str(tmp_path / "d"), np.uint16) as writer:
        writer.add_document([np.array([*b"hello", EOD])])
        writer.add_document([np.array([*b"a\x1b[31m", EOD])])
        writer.add_document([])
        writer.add_document([np.array([*b"One."]), np.array([*b"Two.", EOD])])
    return str(tmp_path / "d")


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(list(words)) == 0
    return capsys.readouterr().out.splitlines()


def test_documents_as_text_without_control_characters(
    prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first three, or those that are named; sentences apart."""
    first = [
        *("--- document 0: 6 tokens, 6 with loss ---", "hello<|endoftext|>"),
        *("--- document 1: 7 tokens, 7 with loss ---", "a\\x1b[31m<|endoftext|>"),
        *("--- document 2: 0 tokens, 0 with loss ---", ""),
    ]
    assert shown(capsys, prefix, *BYTES) == first
    assert shown(capsys, prefix, *BYTES, "--document", "3", "0") == [
        *("--- document 3, sequence 1 of 2: 4 tokens, 4 with loss ---", "One."),
        *("--- document 3, sequence 2 of 2: 5 tokens, 5 with loss ---", "Two.<|endoftext|>"),
        *first[:2],
    ]


def test_ids_alone_without_a_tokenizer_or_beside_the_text(
    prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = "104 101 108 108 111 256"
    assert shown(capsys, prefix, "--document", "0")[1:] == [ids]
    assert shown(capsys, prefix, "--document", "0", "--ids", *BYTES)[1:] == ["hello<|endoftext|>", ids]
    cut = shown(capsys, prefix, "--document", "0", "--limit", "4", *BYTES)
    assert cut[1:] == ["hell", "... and 2 more tokens (`--limit N`)"]


def test_tokens_without_loss_are_marked_or_dim(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = np.ones(22, dtype=np.uint8)
    mask[[0, 1, 4, 17]] = 0
    mask.tofile(tmp_path / "d.mask")
    (tmp_path / "d.sum").unlink()
    words = [prefix, *BYTES, "--document", "0", "3"]
    plain = [
        *("--- document 0: 6 tokens, 3 with loss ---", "⟦he⟧ll⟦o⟧<|endoftext|>"),
        *("--- document 3, sequence 1 of 2: 4 tokens, 4 with loss ---", "One."),
        *("--- document 3, sequence 2 of 2: 5 tokens, 4 with loss ---", "⟦T⟧wo.<|endoftext|>"),
    ]
    assert shown(capsys, *words) == plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    colored = shown(capsys, *words)
    assert colored[1].startswith("\x1b[2mhe\x1b[0m\x1b[32mll\x1b[0m\x1b[2mo\x1b[0m")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "⟦he⟧" in "".join(shown(capsys, *words))


def test_a_sample_shows_its_sequences_and_what_has_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All samples of an epoch, in the training's order: every token is there once, and ends are marked."""
    texts = [b"abcdefg", b"hij", b"klmnopqrs"]
    with IndexedDatasetWriter(str(tmp_path / "d"), np.uint16) as writer:
        for text in texts:
            writer.add_document([np.array([*text, EOD])])
    flags = ["--seq-length", "5", "--split", "1", *BYTES, "--sample", *"0123"]
    lines = shown(capsys, str(tmp_path / "d"), *flags)
    bodies = "".join(lines[1::2]).replace("⟦", "").replace("⟧", "").replace("<|endoftext|>", ".")
    assert len(bodies) == 4 * 6
    assert {letter for text in texts for letter in text.decode()} <= set(bodies)
    assert all(line.startswith("⟦") for line in lines[1::2] if line[1:2] and "from token" in line)
    starts = [line for line in lines[::2] if line.startswith("--- sample 0,")]
    assert len(starts) >= 1
    masked = shown(capsys, str(tmp_path / "d"), *flags, "--eod-mask-loss")
    counts = [int(line.split(" tokens, ")[1].split()[0]) for line in masked[::2]]
    plain = [int(line.split(" tokens, ")[1].split()[0]) for line in lines[::2]]
    inputs = sum(line.endswith("<|endoftext|>") for line in lines[1::2])
    assert 0 < sum(plain) - sum(counts) <= inputs
    assert sum(plain) == 4 * 5


@over_table(
    ("words", "status", "says"),
    [
        (["nowhere"], 1, "nowhere.idx` must be a readable file"),
        (["PREFIX", "--document", "4"], 1, "`document` must be in 0..3"),
        (["PREFIX", "--document", "-1"], 2, "must be a number of at least 0"),
        (["PREFIX", "--sample", "0"], 2, "`--sample` and `--seq-length` must be given together"),
        (["PREFIX", "--seq-length", "4"], 2, "`--sample` and `--seq-length` must be given together"),
        (["PREFIX", "--sample", "9", "--seq-length", "4", "--split", "1"], 1, "`--sample` must be in 0.."),
        (["PREFIX", "--sample", "0", "--seq-length", "400"], 1, "must be at least sequence_length + 1"),
        (["PREFIX", "--sample", "0", "--seq-length", "4", "--eod-mask-loss"], 1, "`eod_token` must be given"),
        (["PREFIX", "--document", "0", "--sample", "0"], 2, "not allowed with argument"),
        (["PREFIX", "--tokenizer-type", "GPT2BPETokenizer"], 1, "`vocab_file` must name"),
    ],
)
def test_wrong_input(
    prefix: str, capsys: pytest.CaptureFixture[str], words: list[str], status: int, says: str
) -> None:
    try:
        ended = main([prefix if word == "PREFIX" else word for word in words])
    except SystemExit as end:
        ended = int(end.code or 0)
    assert ended == status
    assert says in capsys.readouterr().err.replace("\n", " ")
