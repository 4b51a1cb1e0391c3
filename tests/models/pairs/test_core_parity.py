"""T5 trains as Megatron-Core's T5 does, on the same samples of a text."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from megazero.config.training_plan import training_plan_of
from megazero.data.indexed.reader import open_indexed
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.data.t5.dataset import T5Dataset, T5Settings
from megazero.data.t5.vocabulary import SpanVocabulary
from megazero.data.tokenizers.build import TokenizerSpec, build_tokenizer
from megazero.data_tools.wordpiece_training import train_wordpiece
from megazero.mpu.context import solo_context
from megazero.train.step.engine import Engine
from megazero.verify.record import collate_of, record_steps, verification_engine
from tests.models.pairs.core_t5 import SAMPLES, SENTINELS, STEPS, VOCABULARY, WORDS, config_of, name_in_core
from tests.source_tree import ROOT

pytestmark = [
    pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core"),
    pytest.mark.slow,
]
CONFIG, CONTEXT = config_of(), solo_context()
PLAN = training_plan_of(CONFIG, 1)
Batches = list[dict[str, np.ndarray]]


def batches_of(folder: Path, first: str) -> Batches:
    """Each step's samples of the licence's text; `first` names the token that WordPiece adds first."""
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    vocab = folder / "vocab.txt"
    vocab.write_text(train_wordpiece([text], WORDS, cased=False)[1]["vocab.txt"], encoding="utf-8")
    sizes = {"vocab_size": VOCABULARY, "extra_ids": SENTINELS}
    spec = TokenizerSpec("BertWordPieceLowerCase", str(vocab), wordpiece_first=first, **sizes)
    tokenizer = build_tokenizer(spec)
    paragraphs, count = text.split("\n\n"), STEPS * SAMPLES
    with IndexedDatasetWriter(folder / first, np.uint16) as writer:
        for paragraph in paragraphs:
            writer.add_document(tokenizer.encode_batch(paragraph.split(". ")).rows())
    ids, model = SpanVocabulary.of(tokenizer), CONFIG.model
    settings = T5Settings(model.seq_length, ids.words, vocabulary=ids, decoder_length=model.decoder_length)
    dataset = T5Dataset(open_indexed(folder / first), range(len(paragraphs)), count, settings)
    batches = [dataset.batch(range(i, i + SAMPLES)) for i in range(0, count, SAMPLES)]
    begin, end = (tokenizer.word_pieces()[token] for token in ("[BOS]", "[EOS]"))
    assert (begin, end) == ((WORDS, WORDS + 1) if first == "bos" else (WORDS + 1, WORDS))
    for batch in batches:
        last = batch["decoder_lengths"] - 1
        assert (batch["decoder_tokens"][:, 0] == begin).all()
        assert (batch["labels"][range(SAMPLES), last] == end).all()
    return batches


def train(engine: Engine, batches: Batches) -> list[float]:
    """Our loss of each step."""
    collate, rows = collate_of(CONFIG, CONTEXT), tuple(range(SAMPLES))
    record = record_steps(engine, PLAN, STEPS, lambda step: [collate(batches[step.before.iteration], rows)])
    return [losses["lm loss"] for losses in record.losses]


def train_core(folder: Path, engine: Engine, batches: Batches) -> list[float]:
    """Megatron-Core's loss of each step, from the weights of `engine`."""
    weights = {
        name_in_core(spec.name, CONFIG.model.encoder_layers): spec.unshard(state["weight"], CONTEXT.groups)
        for spec, state in engine.optimizer.full_state(("weight",))
    }
    arrays = [{name: torch.from_numpy(array) for name, array in batch.items()} for batch in batches]
    torch.save({"weights": weights, "batches": arrays}, folder / "given.pt")
    command = [sys.executable, "-m", "tests.models.pairs.core_t5", str(folder)]
    # Megatron compiles its fused functions, which would take longer than all else.
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return torch.load(folder / "losses.pt")


def test_ten_steps_equal_megatron_cores(tmp_path):
    """They differ if [BOS] and [EOS] are exchanged."""
    engine, batches = verification_engine(CONFIG, PLAN, CONTEXT), batches_of(tmp_path, "bos")
    theirs = np.array(train_core(tmp_path, engine, batches))
    np.testing.assert_allclose(train(engine, batches), theirs, rtol=1e-6)
    exchanged = train(verification_engine(CONFIG, PLAN, CONTEXT), batches_of(tmp_path, "eos"))
    assert abs(exchanged / theirs - 1).max() > 1e-3
