"""Losses of samples: the plain formula, the same on any layout, and a whole job from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
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
from megazero.data_efficiency.analyzed import dataset_of
from megazero.data_efficiency.metric_index import MetricIndex
from megazero.data_efficiency.row_file import RowFile
from megazero.errors import CheckpointError, ConfigError, NumericsError
from megazero.inference.sample_loss import SCALE, measure_loss, whole_numbers
from megazero.models.gpt import GPT
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.launch import Launch
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.parts.families import family_of
from megazero.train.parts.vocabulary import build_vocabulary
from megazero.train.pretraining import pretrain
from megazero.train.resume.trained import load_chunks

SHAPE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 64 --lr 1e-2 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 3 --eval-iters 0 --log-interval 100 "
    "--split 1,0,0 --train-data-exact-num-epochs 1 --hidden-dropout 0.1"
)
LAYOUTS = {
    "T2": ("--tensor-model-parallel-size 2 --sequence-parallel", 2),
    "P2": ("--pipeline-model-parallel-size 2", 2),
    "D2, ZeRO 3": ("--zero-stage 3", 2),
    "T2 P2": ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 4),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> list[str]:
    """The flags of a small training, which is done, and whose checkpoint they load."""
    folder = tmp_path_factory.mktemp("trained")
    rng = np.random.default_rng(5)
    with IndexedDatasetWriter(folder / "text", np.uint16) as writer:
        # Half of the documents repeat a token, which is learnt soon; 37 samples fill no step.
        for number in range(60):
            writer.add_document([np.full(10, 7) if number % 2 else rng.integers(0, 64, 10)])
    flags = [*SHAPE.split(), "--data-path", str(folder / "text")]
    argv = [*flags, "--train-iters", "4", "--save", str(folder / "run")]
    pretrain(parse_config(argv, world_size=1).config, Launch())
    return [*flags, "--load", str(folder / "run")]


def values_of(folder: Path) -> np.ndarray:
    return np.array(RowFile(folder / "loss/loss_sample_to_metric").elements)


def on_layout(flags: list[str], extra: str, ranks: int, output: Path, samples: int = 37) -> np.ndarray:
    """The values that a job of so many ranks finds."""

    config = parse_config([*flags, *extra.split()], world_size=ranks).config
    tp, pp = config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size
    grid = ProcessGrid(tp=tp, pp=pp, dp=ranks // (tp * pp))
    world = ThreadWorld(ranks)

    def rank(number: int) -> None:
        *_, done = measure_loss(config, thread_context(world, grid, number), output)
        assert done == (samples, samples)

    world.run(rank)
    return values_of(output)


@pytest.fixture(scope="module")
def alone(trained, tmp_path_factory) -> np.ndarray:
    return on_layout(trained, "", 1, tmp_path_factory.mktemp("alone"))


def test_it_is_the_mean_cross_entropy_of_each_sample(trained, alone):
    config = parse_config(trained, world_size=1).config
    vocabulary, context = build_vocabulary(config), solo_context()
    reader = CheckpointReader(candidates(config.checkpoint.load).folders[0])
    (model,) = load_chunks(config, vocabulary, context, reader).values()
    assert isinstance(model, GPT)
    dataset = family_of(config.model).samples.datasets(config, vocabulary, (1, 0, 0))[0]
    arrays = dataset.batch(np.arange(37))
    collate = family_of(config.model).samples.collate(config, vocabulary.size, context, None)
    with torch.no_grad():
        logits = model(collate(arrays, tuple(range(37))))[..., :64].float()
    losses = F.cross_entropy(logits.permute(1, 2, 0), torch.from_numpy(arrays["labels"]), reduction="none")
    expected = np.rint(SCALE * losses.double().mean(1).numpy())
    assert len(alone) == 37
    assert len(set(alone.tolist())) > 20
    np.testing.assert_allclose(alone, expected, atol=1)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_finds_the_same(trained, alone, tmp_path, name):
    """Up to rounding: a value in the middle between two integers may fall to either."""
    np.testing.assert_allclose(on_layout(trained, *LAYOUTS[name], tmp_path), alone, atol=1)


def test_positions_that_do_not_count_have_no_share(trained, alone, tmp_path):
    """With a mask, the mean is over fewer positions, so values differ."""
    masked = [*trained, "--tokenizer-type", "NullTokenizer", "--eod-mask-loss", "--vocab-size", "63"]
    found = on_layout(masked, "", 1, tmp_path)
    assert len(found) == 37
    assert (found >= 0).all()
    assert (found != alone).any()


def test_what_was_stopped_goes_on(trained, alone, tmp_path, monkeypatch):
    monkeypatch.setattr("megazero.inference.sample_loss._CHUNK", 10)
    config = parse_config(trained, world_size=1).config
    first = measure_loss(config, solo_context(), tmp_path)
    assert [next(first) for _ in range(3)] == [(0, 37), (10, 37), (20, 37)]
    first.close()
    assert next(measure_loss(config, solo_context(), tmp_path)) == (20, 37)
    assert list(measure_loss(config, solo_context(), tmp_path))[-1] == (37, 37)
    np.testing.assert_array_equal(values_of(tmp_path), alone)
    assert list(measure_loss(config, solo_context(), tmp_path)) == [(37, 37)]


def test_another_checkpoint_begins_anew(trained, tmp_path, monkeypatch):
    monkeypatch.setattr("megazero.inference.sample_loss._CHUNK", 10)
    run = measure_loss(parse_config(trained, world_size=1).config, solo_context(), tmp_path / "out")
    next(run), next(run)
    run.close()
    save = ["--save", str(tmp_path / "later")]
    without = trained[: trained.index("--load")]
    pretrain(parse_config([*without, *save, "--train-iters", "2"], world_size=1).config, Launch())
    later = [*trained[:-1], str(tmp_path / "later")]
    assert next(measure_loss(parse_config(later, world_size=1).config, solo_context(), tmp_path / "out")) == (
        0,
        37,
    )


def test_torchrun_and_the_command(trained, alone, tmp_path, capsys):
    assert cli.main(["analyze-loss", "--output", str(tmp_path / "one"), *trained]) == 0
    said = capsys.readouterr()
    assert "37 samples; percentiles" in said.out
    assert "loss of 37 of 37 samples" in said.err
    prefix = tmp_path / "one/loss/loss"
    index = MetricIndex.open(f"{prefix}_index_to_sample", f"{prefix}_index_to_metric")
    index.verify()
    np.testing.assert_array_equal(values_of(tmp_path / "one"), alone)
    np.testing.assert_array_equal(index.samples, np.argsort(alone, kind="stable"))
    facts = dataset_of(f"{prefix}_index_to_sample")
    assert facts.samples == 37
    assert json.loads((tmp_path / "one/loss/loss_dataset.json").read_text())["metric"]["scale"] == 1000


@pytest.mark.slow
@pytest.mark.gloo
def test_real_ranks(trained, alone, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "megazero.cli", "analyze-loss", "--output", str(tmp_path), *trained]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("37 samples; percentiles") == 1
    np.testing.assert_allclose(values_of(tmp_path), alone, atol=1)


def test_no_checkpoint_is_refused(trained, tmp_path):
    without = trained[: trained.index("--load")]
    with pytest.raises(ConfigError, match="`load` must"):
        list(measure_loss(parse_config(without, world_size=1).config, solo_context(), tmp_path))
    nothing = parse_config([*without, "--load", str(tmp_path)], world_size=1).config
    with pytest.raises(CheckpointError, match=f"`{tmp_path}` must hold a checkpoint"):
        list(measure_loss(nothing, solo_context(), tmp_path))


def test_another_model_is_refused(trained, tmp_path):
    config = parse_config([*trained, "--num-layers", "4"], world_size=1).config
    with pytest.raises(CheckpointError, match="num_layers 2 \\(now 4\\)"):
        list(measure_loss(config, solo_context(), tmp_path))


def test_a_loss_that_is_not_finite_is_refused():
    with pytest.raises(NumericsError, match="sample 11 must be finite, but is nan"):
        whole_numbers(np.array([1.0, np.nan, 2.0]), range(10, 13))
    assert whole_numbers(np.array([1.2344, 0.0005, 0.0]), range(3)).tolist() == [1234, 0, 0]
