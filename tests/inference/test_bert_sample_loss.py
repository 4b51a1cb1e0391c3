"""Losses of a BERT's samples: the mean over their masked tokens, the same on any layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from megazero.checkpoint.folder import candidates
from megazero.checkpoint.reader import CheckpointReader
from megazero.config.resolve import parse_config
from megazero.inference.sample_loss import SCALE, measure_loss
from megazero.models.bert import BERT
from megazero.mpu.context import solo_context
from megazero.mpu.launch import Launch
from megazero.train.parts.families import family_of
from megazero.train.parts.vocabulary import build_vocabulary
from megazero.train.pretraining import pretrain
from megazero.train.resume.trained import load_chunks
from tests.data.bert.test_builder import SIZE, write_sentences
from tests.inference.test_sample_loss import on_layout

SHAPE = (
    "--model-family bert --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --lr 1e-2 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 3 --eval-iters 0 --log-interval 100 "
    "--split 1,0,0 --train-data-exact-num-epochs 1 --hidden-dropout 0.1"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> list[str]:
    """The flags of a small training, which is done, and whose checkpoint they load."""
    folder = tmp_path_factory.mktemp("trained")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(5, SIZE))]
    (folder / "vocab.txt").write_text("\n".join(words))
    tokenizer = ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(folder / "vocab.txt")]
    data = ["--data-path", write_sentences(folder / "text", 40)]
    flags = [*SHAPE.split(), *tokenizer, *data]
    pretrain(parse_config([*flags, "--save", str(folder / "run")], world_size=1).config, Launch())
    return [*flags, "--load", str(folder / "run")]


def samples_of(flags: list[str]):
    """The training samples, and what makes batches of them."""
    config = parse_config(flags, world_size=1).config
    vocabulary, family = build_vocabulary(config), family_of(config.model)
    dataset = family.samples.datasets(config, vocabulary, (1, 0, 0))[0]
    collate = family.samples.collate(config, vocabulary.size, solo_context(), None)
    return config, vocabulary, dataset, collate


def measured(flags: list[str], output: Path, extra: str = "", ranks: int = 1) -> np.ndarray:
    *_, dataset, _ = samples_of(flags)
    return on_layout(flags, extra, ranks, output, len(dataset))


@pytest.fixture(scope="module")
def alone(trained, tmp_path_factory) -> np.ndarray:
    return measured(trained, tmp_path_factory.mktemp("alone"))


def test_it_is_the_mean_over_the_masked_tokens_of_each_sample(trained, alone):
    config, vocabulary, dataset, collate = samples_of(trained)
    reader = CheckpointReader(candidates(config.checkpoint.load).folders[0])
    (model,) = load_chunks(config, vocabulary, solo_context(), reader).values()
    assert isinstance(model, BERT)
    expected = []
    for number in range(len(dataset)):
        batch = collate(dataset.batch(np.array([number])), (number,))
        with torch.no_grad():
            logits, _ = model(batch)
        loss = F.cross_entropy(logits.squeeze(1)[:, : vocabulary.size].float(), batch.targets.labels)
        expected.append(SCALE * float(loss))
    assert len(alone) == len(dataset) > 30
    assert len(set(alone.tolist())) > 20
    np.testing.assert_allclose(alone, np.rint(expected), atol=1)


@pytest.mark.parametrize(
    ("extra", "ranks"),
    [
        ("--tensor-model-parallel-size 2 --sequence-parallel", 2),
        ("--pipeline-model-parallel-size 2", 2),
        ("--zero-stage 3", 2),
        ("--bert-pack", 1),
    ],
)
def test_every_layout_finds_the_same(trained, alone, tmp_path, extra, ranks):
    np.testing.assert_allclose(measured(trained, tmp_path, extra, ranks), alone, atol=1)


def test_other_masks_are_measured_anew(trained, alone, tmp_path, monkeypatch):
    monkeypatch.setattr("megazero.inference.sample_loss._CHUNK", 10)
    run = measure_loss(parse_config(trained, world_size=1).config, solo_context(), tmp_path)
    next(run), next(run)
    run.close()
    other = parse_config([*trained, "--mask-prob", "0.3"], world_size=1).config
    assert next(measure_loss(other, solo_context(), tmp_path)) == (0, len(alone))
