"""A T5 from text to answers: pretrained on sentences, fine-tuned on pairs, asked by `megazero generate`."""

from __future__ import annotations

import json
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from megazero.checkpoint.folder import iteration_folder
from megazero.checkpoint.manifest import STATE
from megazero.commands.generate import main as generate
from megazero.config.resolve import parse_config
from megazero.config.training_plan import training_plan_of
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.errors import CheckpointError, ConfigError, DataError
from megazero.mpu.context import solo_context
from megazero.mpu.launch import Launch
from megazero.train.parts.feeds import build_feeds
from megazero.train.pretraining import pretrain
from tests.checkpoint.forged import edit, reseal
from tests.tables import over_table

WORDS = [f"w{i}" for i in range(8)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SHAPE = (
    "--model-family t5 --encoder-num-layers 1 --decoder-num-layers 1 --hidden-size 32 "
    "--num-attention-heads 4 --encoder-seq-length 24 --decoder-seq-length 16 --max-position-embeddings 24 "
    "--position-embedding-type relative --t5-style google --normalization RMSNorm --activation geglu "
    "--disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 8 "
    "--global-batch-size 8 --make-vocab-size-divisible-by 8 --num-workers 0 --eval-interval 1000 "
    "--vocab-extra-ids 8 --init-method-std 0.2 --lr-decay-style constant"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A vocabulary, sentences that count up, and pairs of a word and the two that follow it."""
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL, *WORDS]) + "\n")
    rng = np.random.default_rng(1)
    with IndexedDatasetWriter(folder / "text", np.uint16) as writer:
        for _ in range(60):
            starts = rng.integers(0, len(WORDS), 3)
            writer.add_document([5 + (start + np.arange(9)) % len(WORDS) for start in starts])
    pairs = [
        {"given": word, "wanted": f"{WORDS[(i + 1) % 8]} {WORDS[(i + 2) % 8]}"}
        for i, word in enumerate(WORDS)
    ]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    return folder


def run(folder, name: str, *flags: object) -> list[dict]:
    """Train in this process; the metrics of every iteration."""
    metrics = folder / f"{name}.jsonl"
    argv = [*SHAPE.split(), "--vocab-file", folder / "vocab.txt", "--metrics-jsonl", metrics]
    argv += ["--save", folder / name, *flags]
    pretrain(parse_config(list(map(str, argv)), world_size=1).config, Launch())
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def losses(records: list[dict]) -> list[float]:
    return [record["lm_loss"] for record in records if record.get("lm_loss") is not None]


def test_from_text_to_answers(folder, capsys):
    ends = ("--wordpiece-first", "eos")
    text = ("--data-path", folder / "text", "--split", "100,0,0", "--eval-iters", 0, "--lr", "1e-2", *ends)
    learnt = losses(run(folder, "pretrained", *text, "--train-iters", 60))
    assert learnt[-1] < 0.6 * learnt[0]
    pairs = ("--text-to-text-columns", "given", "wanted", "--train-data-path", folder / "pairs.jsonl")
    pairs = (*pairs, "--valid-data-path", folder / "pairs.jsonl", "--eval-iters", 1, "--lr", "1e-2")
    start = ("--load", folder / "pretrained", "--finetune", "--train-iters", 60)
    tuned = losses(run(folder, "tuned", *pairs, *start, *ends))
    assert tuned[-1] < 0.1
    saved = iteration_folder(folder / "tuned", 60)
    edit(saved / STATE, lambda facts: facts["config"]["tokenizer"].pop("wordpiece_first") and None)
    reseal(saved)  # as of a version that gave [EOS] the lower id, and did not say so
    more = ("--load", folder / "tuned", "--train-iters", 61)
    with pytest.raises(CheckpointError, match="`wordpiece_first` must be eos, with which .* was trained"):
        run(folder, "tuned", *pairs, *more)
    capsys.readouterr()
    asked = [flag for word in WORDS for flag in ("--prompt", word)]
    argv = ["--load", str(folder / "tuned"), *asked, "--greedy", "--max-new-tokens", "6"]
    assert generate(argv) == 0
    answers = capsys.readouterr().out.splitlines()[1::2]
    assert answers == [f"{WORDS[(i + 1) % 8]} {WORDS[(i + 2) % 8]}" for i in range(8)]
    # It was accepted, and did nothing.
    assert generate([*argv, "--prefill-chunk", "4"]) == 2
    assert "`--prefill-chunk` must be left out for a T5" in capsys.readouterr().err
    assert generate([*argv, "--kv-cache-dtype", "int8"]) == 2
    assert "`--kv-cache-dtype` must be auto for a T5" in capsys.readouterr().err


def test_fewer_sentinels_than_spans_are_refused_before_training(folder):
    from megazero.errors import DataError

    flags = ("--data-path", folder / "text", "--split", "100,0,0", "--train-iters", 1, "--lr", "1e-3")
    with pytest.raises(DataError, match="`vocab_extra_ids` must be at least 11 for T5"):
        run(folder, "few", *flags, "--mask-prob", "0.5")


def test_a_split_without_pairs_is_warned_of(folder):
    """Its evaluations silently did not happen."""
    rows = (folder / "pairs.jsonl").read_text().splitlines()[:3]
    (folder / "few.jsonl").write_text("\n".join(rows))
    flags = ("--text-to-text-columns", "given", "wanted", "--data-path", folder / "few.jsonl")
    flags = (*flags, "--split", "9,1,0", "--train-iters", 1, "--lr", "1e-3", "--eval-iters", 1)
    with pytest.warns(
        UserWarning, match="the valid split is empty: split 9,1,0 gives it none of the 3 pairs"
    ):
        run(folder, "few-pairs", *flags)


def test_a_training_without_pairs_is_refused(folder):
    (folder / "one.jsonl").write_text((folder / "pairs.jsonl").read_text().splitlines()[0])
    flags = ("--text-to-text-columns", "given", "wanted", "--data-path", folder / "one.jsonl")
    flags = (*flags, "--split", "1,9,0", "--train-iters", 1, "--lr", "1e-3", "--eval-iters", 1)
    said = "the train split must have samples, but is empty with `--split` 1,9,0; give it a larger share"
    with pytest.warns(UserWarning, match="the train split is empty"), pytest.raises(DataError, match=said):
        run(folder, "one-pair", *flags)


def test_a_training_whose_own_file_gives_nothing_blames_no_split():
    config = parse_config(
        f"{SHAPE} --vocab-file v --train-data-path p --train-iters 1 --lr 1e-3".split(), world_size=1
    ).config
    family = SimpleNamespace(samples=SimpleNamespace(datasets=lambda *_: (None, None, None)))
    said = "the train split must have samples, but is empty in `--train-data-path`; give more data"
    patched = mock.patch("megazero.train.parts.feeds.family_of", return_value=family)
    with patched, pytest.raises(DataError, match=said):
        build_feeds(config, training_plan_of(config, 1), SimpleNamespace(size=9), solo_context(), 0)


def test_exact_epochs_of_pairs_are_refused():
    """They were accepted and ignored."""
    flags = "--vocab-file v --text-to-text-columns a b --train-data-path p --train-iters 1 --lr 1e-3"
    parse_config(f"{SHAPE} {flags}".split(), world_size=1)
    with pytest.raises(
        ConfigError, match="`t5_columns` must be left out with `train_data_exact_num_epochs` 2"
    ):
        parse_config(f"{SHAPE} {flags} --train-data-exact-num-epochs 2".split(), world_size=1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--relative-attention-num-buckets 32 --relative-attention-max-distance 16", "single distances, but"),
        ("--relative-attention-num-buckets 3", "`t5_relative_buckets` must be at least 4"),
        ("--num-experts 4", "`num_experts` is"),
        ("--context-parallel-size 2", "`context_parallel_size` is 2"),
        ("--num-layers 7", "`num_layers` must be the layers of a T5's encoder and decoder together"),
        ("--position-embedding-type rope", "`position_embedding_type` is rope"),
        ("--decoder-seq-length 25", "`t5_decoder_seq_length` must be at most `seq_length`"),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --decoder-seq-length 15",
            "and divide over the ranks that share a sequence",
        ),
    ],
)
def test_what_a_t5_cannot_have_is_refused_by_name(folder, flags, message):
    argv = [*SHAPE.split(), "--mock-data", "--vocab-size", "64", "--train-iters", "1", "--lr", "1e-3"]
    with pytest.raises(ConfigError) as refusal:
        parse_config([*argv, *flags.split()], world_size=2)
    assert message in str(refusal.value)


@over_table(
    ("flags", "layers"),
    [
        ("--num-layers 3", (3, 3, 6)),
        ("--encoder-num-layers 2", (2, 2, 4)),
        ("--num-layers 3 --decoder-num-layers 1", (3, 1, 4)),
        ("--encoder-num-layers 2 --decoder-num-layers 5", (2, 5, 7)),
    ],
)
def test_layers_are_counted_as_megatron_lm_counts_them(flags, layers):
    argv = "--model-family t5 --hidden-size 32 --num-attention-heads 4 --encoder-seq-length 32 --mock-data "
    argv += "--vocab-size 64 --micro-batch-size 1 --train-iters 1 --lr 1e-3 " + flags
    model = parse_config(argv.split(), world_size=1).config.model
    assert (model.encoder_layers, model.t5_decoder_layers, model.num_layers) == layers
    again = type(model).model_validate(model.model_dump())
    assert (again.encoder_layers, again.t5_decoder_layers, again.num_layers) == layers
