"""A training reads tokens and tokenizer from a store: the same as from disk, whatever fails on the way."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.storage.objects import Objects
from megazero.storage.urls import Url
from tests.forks import run
from tests.storage.proxy import Faults, FaultyProxy
from tests.storage.servers import Server
from tests.storage.small_server import environment

STEPS = 300
FLAGS = (
    "--device cpu --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 64 "
    f"--micro-batch-size 2 --global-batch-size 4 --train-iters {STEPS} --lr 1e-3 --eval-interval 100 "
    "--eval-iters 1 --split 90,10,0 --log-interval 1 --tokenizer-type BertWordPieceLowerCase"
)


def _losses(folder: Path, prefix: str, vocabulary: str, *flags: str) -> list[tuple[float, float]]:
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    paths = ("--data-path", prefix, "--vocab-file", vocabulary, "--metrics-jsonl", str(metrics))
    done = run("pretrain_gpt.py", *FLAGS.split(), *paths, *flags)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "testsecret" not in done.stdout + done.stderr
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [(row["lm_loss"], row["grad_norm"]) for row in rows if "lm_loss" in row]


@pytest.mark.slow
def test_faults_of_the_store_change_no_byte(seaweed: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One request in twenty fails in some way, and the cache holds a third of the tokens."""
    stream = np.random.default_rng(0)
    with IndexedDatasetWriter(tmp_path / "text", "uint16") as writer:
        lengths = stream.integers(10, 200, 80000)
        writer.add_raw(stream.integers(0, 500, int(lengths.sum())), lengths)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{number}" for number in range(600))]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    objects = Objects(Url.parse("s3://bucket/training"))
    for name in ("text.idx", "text.bin", "text.sum", "vocab.txt"):
        objects.put(name, tmp_path / name)
    expected = _losses(tmp_path, str(tmp_path / "text"), str(tmp_path / "vocab.txt"))
    assert len(expected) == STEPS
    with FaultyProxy(seaweed.endpoint, seed=7, faults=Faults.each(0.05)) as proxy:
        for name, value in environment(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        flags = (
            "--object-storage-cache-path",
            str(tmp_path / "cache"),
            "--object-storage-cache-gib",
            "0.006",
        )
        urls = ("s3://bucket/training/text", "s3://bucket/training/vocab.txt")
        assert _losses(tmp_path, *urls, *flags) == expected
        print(os.linesep, dict(proxy.happened))
        assert sum(proxy.happened.values()) > STEPS
        assert all(
            proxy.happened[kind] for kind in ("error", "slow_down", "cut", "delay", "half_open", "lost")
        )
