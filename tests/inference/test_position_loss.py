"""Losses by position: the plain formula, the same on any layout, tables, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from megazero import cli
from megazero.checkpoint.folder import candidates
from megazero.checkpoint.reader import CheckpointReader
from megazero.config.resolve import parse_config
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.errors import DataError
from megazero.inference import position_loss
from megazero.inference.position_loss import PositionLoss, intervals, measure_position_loss, table
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.launch import Launch
from megazero.mpu.thread_group import ThreadWorld
from megazero.pictures import style
from megazero.train.parts.families import family_of
from megazero.train.parts.vocabulary import build_vocabulary
from megazero.train.pretraining import pretrain
from megazero.train.resume.trained import load_chunks
from tests.tables import over_table

SHAPE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 64 --lr 1e-2 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 4 --eval-iters 0 --log-interval 100 "
    "--split 1,1,0 --tokenizer-type NullTokenizer --pack best-fit --reset-attention-mask "
    "--reset-position-ids --position-embedding-type rope"
)
SAMPLES = 7
LAYOUTS = {
    "T2": ("--tensor-model-parallel-size 2 --sequence-parallel", 2),
    "P2": ("--pipeline-model-parallel-size 2", 2),
    "D2": ("--zero-stage 3", 2),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> list[str]:
    """The flags of a small training, which is done, and whose checkpoint they load."""
    folder = tmp_path_factory.mktemp("trained")
    rng = np.random.default_rng(5)
    with IndexedDatasetWriter(folder / "text", np.uint16) as writer:
        for length in rng.integers(3, 16, 80).tolist():
            writer.add_document([rng.integers(0, 64, length)])
    flags = [*SHAPE.split(), "--data-path", str(folder / "text")]
    pretrain(parse_config([*flags, "--save", str(folder / "run")], world_size=1).config, Launch())
    return [*flags, "--load", str(folder / "run")]


def on_layout(flags: list[str], extra: str = "", ranks: int = 1) -> PositionLoss:
    config = parse_config([*flags, *extra.split()], world_size=ranks).config
    tp, pp = config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size
    grid, world = ProcessGrid(tp=tp, pp=pp, dp=ranks // (tp * pp)), ThreadWorld(ranks)

    def rank(number: int) -> PositionLoss:
        context = thread_context(world, grid, number) if ranks > 1 else solo_context()
        return measure_position_loss(config, context, SAMPLES, "it")

    measured = world.run(rank)
    for other in measured[1:]:
        np.testing.assert_array_equal(other.sums, measured[0].sums)
    return measured[0]


def test_it_is_the_cross_entropy_by_the_position_in_a_document(trained):
    config = parse_config(trained, world_size=1).config
    vocabulary, context = build_vocabulary(config), solo_context()
    reader = CheckpointReader(candidates(config.checkpoint.load).folders[0])
    (model,) = load_chunks(config, vocabulary, context, reader).values()
    dataset = family_of(config.model).samples.datasets(config, vocabulary, (0, SAMPLES, 0))[1]
    arrays = dataset.batch(range(SAMPLES))
    collate = family_of(config.model).samples.collate(config, vocabulary.size, context, None)
    with torch.no_grad():
        logits = model(collate(arrays, tuple(range(SAMPLES))))[..., : vocabulary.size].float()
    losses = F.cross_entropy(logits.permute(1, 2, 0), torch.from_numpy(arrays["labels"]), reduction="none")
    sums, counted = np.zeros(16), np.zeros(16)
    for loss, mask, place in zip(losses, arrays["loss_mask"], arrays["position_ids"], strict=True):
        np.add.at(sums, place, loss.numpy() * mask)
        np.add.at(counted, place, mask)
    measured = on_layout(trained)
    np.testing.assert_array_equal(measured.counted, counted)
    assert counted[0] > counted[3] > 0
    np.testing.assert_allclose(measured.sums, sums, rtol=1e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_finds_the_same(trained, name):
    """Seven samples fill no step, so that some are repeated, which must not count."""
    alone, spread = on_layout(trained), on_layout(trained, *LAYOUTS[name])
    np.testing.assert_array_equal(spread.counted, alone.counted)
    np.testing.assert_allclose(spread.sums, alone.sums, rtol=1e-5)


def test_intervals_double():
    assert list(intervals(100)) == [(0, 16), (16, 32), (32, 64), (64, 100)]
    assert list(intervals(8)) == [(0, 8)]


def test_a_table_drawn_by_hand():
    short = PositionLoss("short", np.r_[np.full(16, 2.0), np.full(16, 8.0)], np.full(32, 2.0))
    long = PositionLoss("long", np.full(48, 3.0), np.r_[np.full(32, 2.0), np.zeros(16)])
    assert table([short, long]).splitlines() == [
        "   positions      short       long",
        "    0 -   15     1.0000     1.5000",
        "   16 -   31     4.0000     1.5000",
        "   32 -   47        nan        nan",
    ]


def test_from_the_command_line(trained, tmp_path, capsys):
    flags = [*trained, "--output", str(tmp_path), "--by-position", str(SAMPLES)]
    assert cli.main(["analyze-loss", *flags, "--name", "first"]) == 0
    earlier = tmp_path / "first.json"
    (tmp_path / "loss_by_position.json").rename(earlier)
    capsys.readouterr()
    assert cli.main(["analyze-loss", *flags, "--name", "second", "--beside", str(earlier)]) == 0
    shown = capsys.readouterr().out
    assert (tmp_path / "loss_by_position.txt").read_text() == shown
    assert shown.splitlines()[0].split() == ["positions", "first", "second"]
    first, second = (json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json")))
    assert first["sums"] == second["sums"]
    pytest.importorskip("matplotlib")
    assert (tmp_path / "loss_by_position.png").read_bytes()[1:4] == b"PNG"


def test_losses_are_drawn_so_that_they_can_be_read(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from tests.pictures.checks import complaints

    def looked_at(figure, path):
        assert complaints(figure, style.DARK) == []
        style.save(figure, path)

    monkeypatch.setattr(position_loss, "save", looked_at)
    counted = np.full(2048, 10.0)
    losses = [PositionLoss(name, counted * (3 + 2 / np.arange(1, 2049)), counted) for name in ("a", "b")]
    position_loss.draw(losses, tmp_path / "a.svg", style.DARK)
    assert (tmp_path / "a.svg").stat().st_size > 1000


@over_table(
    ("flags", "words"),
    [
        ("--by-position 0", "`--by-position` must be at least 1, but is 0"),
        ("--name it", "`--by-position` must be given with"),
        ("--by-position 4 --split 1,0,0", "`split` must give the validation some data"),
        ("--by-position 4 --beside {}/none.json", "`--beside` must name a file that `--by-position` wrote"),
    ],
)
def test_bad_input(trained, tmp_path, capsys, flags, words):
    argv = [*trained, "--output", str(tmp_path), *flags.format(tmp_path).split()]
    assert cli.main(["analyze-loss", *argv]) != 0
    assert words in capsys.readouterr().err


@over_table(
    "text", ["[]", "{", '{"name": "a", "sums": [1], "counted": [1, 2]}', '{"sums": [], "counted": []}']
)
def test_a_file_that_is_no_measurement(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(DataError, match=str(path)):
        PositionLoss.read(Path(path))


def test_a_bert_has_no_text_before_a_position(tmp_path, capsys):
    text = (
        "--model-family bert --num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
        "--vocab-size 64 --lr 1e-2 --micro-batch-size 2 --train-iters 1 --eval-iters 1 --mock-data"
    )
    flags = text.split()
    pretrain(parse_config([*flags, "--save", str(tmp_path / "run")], world_size=1).config, Launch())
    argv = [*flags, "--load", str(tmp_path / "run"), "--output", str(tmp_path), "--by-position", "2"]
    assert cli.main(["analyze-loss", *argv]) != 0
    assert "the model must be a language model, but is a BERT" in capsys.readouterr().err
