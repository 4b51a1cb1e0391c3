from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megazero.config.resolve import parse_config
from megazero.data.from_config import GPTBuilder, gpt_datasets
from megazero.data.gpt_dataset import GPTSettings
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.data_efficiency.analyzed import AnalyzedDataset, dataset_of
from megazero.data_efficiency.metric_index import MetricIndex
from megazero.data_efficiency.metrics import Samples
from megazero.data_efficiency.row_file import RowFile
from megazero.data_tools.analyze_dataset import main

ROOT = Path(__file__).resolve().parents[2]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    """2,560 samples of 16 tokens, some words rarer than others."""
    prefix = tmp_path_factory.mktemp("text") / "a"
    ids = np.minimum(np.random.default_rng(3).zipf(1.5, 40_961) - 1, 99)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.add_raw(ids, np.array([41] * 999 + [2]))
    return str(prefix)


@pytest.fixture(scope="module")
def sentences(tmp_path_factory) -> list[str]:
    """The flags of a BERT dataset."""
    folder = tmp_path_factory.mktemp("sentences")
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    rng = np.random.default_rng(4)
    with IndexedDatasetWriter(folder / "a", np.uint16) as writer:
        for _ in range(80):
            writer.add_document([rng.integers(5, 31, rng.integers(2, 9)) for _ in range(6)])
    tokenizer = ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(folder / "vocab.txt")]
    return [
        "--analyzing-data-type",
        "BERT",
        "--data-path",
        str(folder / "a"),
        *tokenizer,
        "--seq-length",
        "24",
    ]


def gpt(text: str, out: Path, *flags: str) -> list[str]:
    base = ["--data-path", text, "--seq-length", "16", "--split", "1,0,0", "--vocab-size", "100"]
    return [*base, "--output", str(out), *flags]


def whole_text(text: str) -> np.ndarray:
    """All samples of the training, [n, 17]."""
    from megazero.data.build import DatasetRequest, DataSources, build_datasets

    request = DatasetRequest(
        GPTBuilder(GPTSettings(16)), (None, 0, 0), DataSources((text,), "1,0,0"), train_exact_num_epochs=1
    )
    dataset = build_datasets(request)[0]
    index = np.arange(len(dataset))
    return Samples.of(index, dataset.batch(index)).text


def values_of(out: Path, metric: str, kind: str = "sample_to_metric") -> np.ndarray:
    return np.array(RowFile(out / metric / f"{metric}_{kind}").elements)


def rarities(text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    counts = np.bincount(text.reshape(-1), minlength=100)
    share = np.maximum(counts, 1) / np.maximum(counts, 1).sum()
    return counts, np.array([int(sum(-np.log(share[row]))) for row in text])


def test_both_metrics_in_one_command(text, tmp_path, capsys):
    flags = ("--metric", "vocab_rarity", "total_vocab_freq", "--analyzing-num-threads", "2")
    assert main(gpt(text, tmp_path, *flags)) == 0
    counts, rarity = rarities(whole_text(text))
    np.testing.assert_array_equal(values_of(tmp_path, "total_vocab_freq", "metric_value"), counts)
    np.testing.assert_array_equal(values_of(tmp_path, "vocab_rarity"), rarity)
    prefix = tmp_path / "vocab_rarity/vocab_rarity"
    index = MetricIndex.open(f"{prefix}_index_to_sample", f"{prefix}_index_to_metric")
    index.verify()
    np.testing.assert_array_equal(index.samples, np.argsort(rarity, kind="stable"))
    said = capsys.readouterr().out
    assert "vocab_rarity: 2,560 samples" in said
    assert f'"index_to_metric_path": "{prefix}_index_to_metric"' in said


def test_processes_that_cannot_be_forked_open_everything_again(text, tmp_path, monkeypatch):
    monkeypatch.setattr("megazero.data_efficiency.tasks.can_fork", lambda: False)
    (tmp_path / "mine.py").write_text("def first(samples):\n    return samples['text'][:, 0]\n")
    flags = ("--metric", f"{tmp_path / 'mine.py'}:first", "--analyzing-num-threads", "2")
    assert main(gpt(text, tmp_path, *flags)) == 0
    np.testing.assert_array_equal(values_of(tmp_path, "first"), whole_text(text)[:, 0])


def test_what_is_done_is_not_done_again(text, tmp_path, capsys):
    flags = gpt(text, tmp_path, "--metric", "total_vocab_freq", "vocab_rarity")
    path = tmp_path / "total_vocab_freq/total_vocab_freq_metric_value.bin"
    assert main(flags) == 0
    before = path.stat().st_mtime_ns
    assert main(flags) == 0
    assert "total_vocab_freq was analyzed before; delete" in capsys.readouterr().err
    assert path.stat().st_mtime_ns == before
    path.write_bytes(path.read_bytes()[:-4])  # what is damaged is done again
    assert main([*flags, "--analyzing-num-threads", "2"]) == 0
    assert "total_vocab_freq was analyzed before" not in capsys.readouterr().err
    assert main([*flags, "--seed", "3"]) == 0
    assert "analyzed before" not in capsys.readouterr().err


def test_the_facts_are_those_of_the_training(text, tmp_path):
    """A training with the same flags finds its own dataset in the index, and another one does not."""
    assert main(gpt(text, tmp_path, "--metric", "total_vocab_freq")) == 0
    facts = dataset_of(tmp_path / "total_vocab_freq/total_vocab_freq_metric_value")

    def of_training(*more: str) -> AnalyzedDataset:
        shape = (
            "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --lr 1 --train-iters 5 --vocab-size 100"
        )
        flags = [*shape.split(), "--micro-batch-size", "4", "--seq-length", "16", "--split", "1,0,0"]
        config = parse_config([*flags, "--data-path", text, *more], world_size=1).config

        class Vocabulary:
            size, eod, tokenizer = 100, None, None

        return AnalyzedDataset.of(gpt_datasets(config, Vocabulary, (20, 0, 0))[0])

    assert of_training("--train-data-exact-num-epochs", "1") == facts
    assert of_training("--train-data-exact-num-epochs", "1", "--seed", "5") != facts
    assert of_training("--dataloader-type", "cyclic") == facts


def test_bert(sentences, tmp_path):
    flags = [*sentences, "--output", str(tmp_path), "--split", "1,0,0"]
    names = ["total_vocab_freq", "seqlen", "vocab_rarity", "seqlen_vocab_rarity"]
    assert main([*flags, "--metric", *names]) == 0
    seqlen, rarity = values_of(tmp_path, "seqlen"), values_of(tmp_path, "vocab_rarity")
    counts = values_of(tmp_path, "total_vocab_freq", "metric_value")
    assert len(counts) >= len(WORDS)  # the tokenizer adds some of its own
    assert counts.sum() == seqlen.sum()
    assert (counts[0], counts[4], counts[2]) == (0, 0, len(seqlen))  # no padding, no mask, one [CLS] each
    assert seqlen.max() <= 24
    both = values_of(tmp_path, "seqlen_vocab_rarity")
    np.testing.assert_array_equal(both, seqlen * 10000 + rarity)
    np.testing.assert_array_equal(np.argsort(both, kind="stable"), np.lexsort((rarity, seqlen)))


def test_your_own_functions(text, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "def largest(samples):\n    return -samples['text'].max(1)\n"
        "def total(samples):\n    return np.array([samples['text'].size, samples['padding_mask'].sum()])\n"
    )
    mine = str(tmp_path / "mine.py")
    assert main(gpt(text, tmp_path, "--metric", f"{mine}:largest", "--accumulate", f"{mine}:total")) == 0
    np.testing.assert_array_equal(values_of(tmp_path, "largest"), -whole_text(text).max(1))
    assert values_of(tmp_path, "total", "metric_value").tolist() == [2560 * 17, 2560 * 17]


def test_machines_map_and_one_reduces(text, tmp_path, capsys):
    flags = gpt(text, tmp_path, "--metric", "total_vocab_freq", "--analyzing-num-workers", "2")
    assert main(flags) == 1
    assert "`--analyzing-task` must be map or reduce" in capsys.readouterr().err
    assert main([*flags, "--analyzing-task", "map", "--analyzing-worker-id", "1"]) == 0
    assert main([*flags, "--analyzing-task", "reduce"]) == 1
    assert "1024 are missing, the first are 0..1023" in capsys.readouterr().err
    assert main([*flags, "--analyzing-task", "map", "--analyzing-worker-id", "0"]) == 0
    assert main([*flags, "--analyzing-task", "reduce", "--analyzing-num-threads-reduce", "2"]) == 0
    counts, _ = rarities(whole_text(text))
    np.testing.assert_array_equal(values_of(tmp_path, "total_vocab_freq", "metric_value"), counts)


def test_a_killed_map_goes_on_where_it_was(text, tmp_path):
    """kill -9 in the third of three chunks: the first two are not measured again."""
    (tmp_path / "slow.py").write_text(
        "import os, time, pathlib\n"
        f"log = pathlib.Path({str(tmp_path / 'log')!r})\n"
        "def slow(samples):\n"
        "    first = int(samples['index'][0])\n"
        "    with open(log, 'a') as file:\n        file.write(f'{first}\\n')\n"
        f"    go = {str(tmp_path / 'go')!r}\n"
        "    while first >= 2048 and not os.path.exists(go):\n        time.sleep(0.02)\n"
        "    return samples['text'].sum(1)\n"
    )
    flags = gpt(text, tmp_path / "out", "--metric", f"{tmp_path / 'slow.py'}:slow")
    command = [sys.executable, "data_tools/analyze_dataset.py", *flags]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not ((tmp_path / "log").exists() and "2048" in (tmp_path / "log").read_text()):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not list((tmp_path / "out").rglob("*.idx"))
    before = (tmp_path / "log").read_text().split()
    (tmp_path / "go").touch()
    assert main(flags) == 0
    again = (tmp_path / "log").read_text().split()[len(before) :]
    assert again == ["2048", "2176", "2304", "2432"]
    np.testing.assert_array_equal(values_of(tmp_path / "out", "slow"), whole_text(text).sum(1))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--metric", "rarity"], "must be one of seqlen, total_vocab_freq"),
        (["--metric", "seqlen"], "those of GPT are all full"),
        (["--metric", "seqlen_vocab_rarity"], "those of GPT are all full"),
        (["--metric", "loss"], "megazero analyze-loss"),
        (["--metric", "vocab_rarity"], "must exist for seqlen_vocab_rarity and vocab_rarity, but does not"),
        (["--metric", "total_vocab_freq", "total_vocab_freq"], "has total_vocab_freq twice"),
        ([], "names none"),
        (
            ["--metric", "math:sqrt"],
            "metric `sqrt` on samples 0..127 must return numbers, but raised TypeError",
        ),
        (["--metric", "total_vocab_freq", "--split", "0,1,0"], "must give the train split some data"),
        (["--metric", "total_vocab_freq", "--seq-length", "99999"], "for one sample"),
        (["--metric", "total_vocab_freq", "--vocab-size", "50"], "`token id` must be in 0..49"),
        (
            ["--metric", "total_vocab_freq", "--analyzing-worker-id", "1"],
            "`--analyzing-worker-id` must be in 0..0",
        ),
        (
            ["--metric", "total_vocab_freq", "--train-samples", "5", "--train-data-exact-num-epochs", "1"],
            "must come",
        ),
        (["--metric", "total_vocab_freq", "--data-path", "none"], "none.idx is not a file"),
        (
            ["--metric", "total_vocab_freq", "--analyzing-data-type", "BERT"],
            "`--tokenizer-type` must be given",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:the train split is empty")
def test_what_cannot_be_is_refused(text, tmp_path, capsys, flags, message):
    assert main([*gpt(text, tmp_path), *flags]) == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.idx"))


def test_counts_of_other_data_are_refused(text, tmp_path, capsys):
    assert main(gpt(text, tmp_path, "--metric", "total_vocab_freq", "--seed", "1")) == 0
    assert main(gpt(text, tmp_path, "--metric", "vocab_rarity", "--seed", "2")) == 1
    assert "seed was 1 and is 2" in capsys.readouterr().err


def test_counts_without_a_vocabulary_are_refused(text, tmp_path, capsys):
    flags = [
        "--data-path",
        text,
        "--seq-length",
        "16",
        "--output",
        str(tmp_path),
        "--metric",
        "total_vocab_freq",
    ]
    assert main(flags) == 1
    assert "`--vocab-size` must be given" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_an_error(text, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(gpt(text, tmp_path / "file", "--metric", "total_vocab_freq")) == 1
    assert "must be writable, but is not (Not a directory)" in capsys.readouterr().err


def test_weighted_blends_need_the_number_of_samples(text, tmp_path, capsys):
    flags = gpt(text, tmp_path, "--metric", "total_vocab_freq")
    flags[1:2] = ["1", text, "3", text]
    assert main(flags) == 1
    assert "without weights" in capsys.readouterr().err
    assert main([*flags, "--train-samples", "500"]) == 0
    assert values_of(tmp_path, "total_vocab_freq", "metric_value").sum() == 500 * 17


def test_an_interrupt_says_what_is_kept(text, tmp_path, capsys):
    path = tmp_path / "stop.py"
    path.write_text("def stop(samples):\n    raise KeyboardInterrupt\n")
    assert main(gpt(text, tmp_path / "out", "--metric", f"{path}:stop")) == 130
    assert "interrupted; finished chunks are kept" in capsys.readouterr().err


def test_pictures(text, tmp_path):
    pytest.importorskip("matplotlib")
    assert (
        main(gpt(text, tmp_path, "--metric", "total_vocab_freq", "vocab_rarity", "--histogram", "svg")) == 0
    )
    names = [f"{metric}/{metric}_histogram.svg" for metric in ("total_vocab_freq", "vocab_rarity")]
    assert all(os.path.getsize(tmp_path / name) > 1000 for name in names)


def test_shards_and_a_merge_give_what_one_machine_gives(text, tmp_path, capsys):
    metric = ("--metric", "total_vocab_freq")
    assert main(gpt(text, tmp_path / "one", *metric)) == 0
    for shard in ("1/2", "0/2"):
        assert main(gpt(text, tmp_path / "two", *metric, "--shard", shard)) == 0
        assert not (tmp_path / "two/total_vocab_freq/total_vocab_freq_metric_value.idx").exists()
    capsys.readouterr()
    assert main(gpt(text, tmp_path / "three", *metric, "--shard", "0/2")) == 0
    assert main(gpt(text, tmp_path / "three", *metric, "--merge")) == 1
    assert "1536 are missing, the first are 1024..2047" in capsys.readouterr().err
    assert main(gpt(text, tmp_path / "two", *metric, "--merge")) == 0
    names = sorted(path.name for path in (tmp_path / "one/total_vocab_freq").glob("*metric_value*"))
    assert len(names) >= 2
    for name in names:
        one, two = (tmp_path / folder / "total_vocab_freq" / name for folder in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()
    assert main(gpt(text, tmp_path, *metric, "--shard", "0/2", "--merge")) == 1
    assert "must come one at a time" in capsys.readouterr().err
