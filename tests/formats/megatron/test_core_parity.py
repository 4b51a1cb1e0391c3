"""Logits of real Megatron-Core models and of ours with the imported weights."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from megazero.checkpoint.shards import parts_of_parameters
from megazero.formats.megatron.reader import ImportOptions, MegatronReader
from megazero.layers.placement import Placement
from megazero.models.batch import Batch
from megazero.models.bert import BERT
from megazero.models.chunk import Slice
from megazero.models.gpt import GPT
from megazero.mpu.context import thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from megazero.spec.resolve import model_spec
from tests.formats.hf.encoder_samples import batch_of
from tests.formats.megatron.core_models import BERTS, LENGTHS, MODELS, PADDED, VOCAB
from tests.source_tree import ROOT

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    out = tmp_path_factory.mktemp("core")
    command = [sys.executable, "-m", "tests.formats.megatron.core_models", str(out)]
    # Megatron compiles its fused functions, which would take longer than all else.
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return out


@pytest.mark.parametrize("name", MODELS)
def test_logits_agree(saved, name):
    reader = MegatronReader(saved / name, ImportOptions(trust_pickle=True, vocab_size=VOCAB))
    context = thread_context(ThreadWorld(1), ProcessGrid(), 0)
    model = GPT(Slice(model_spec(reader.model), (VOCAB, PADDED), Placement.of(context, torch.float32)))
    with torch.no_grad():
        reader.read(parts_of_parameters(model.parameters(), context))
        expected = torch.load(saved / f"{name}.pt")
        logits = model(Batch(expected["tokens"])).transpose(0, 1)
    theirs = expected["logits"][..., :VOCAB]
    assert 0.3 < theirs.std() < 30  # neither dead nor saturated
    torch.testing.assert_close(logits[..., :VOCAB], theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", BERTS)
def test_logits_of_both_heads_agree(saved, name):
    """Compared at all real positions of a padded batch."""
    reader = MegatronReader(saved / name, ImportOptions(trust_pickle=True, vocab_size=VOCAB))
    assert reader.model.bert_binary_head == (name != "bert-without-binary-head")
    context = thread_context(ThreadWorld(1), ProcessGrid(), 0)
    model = BERT(Slice(model_spec(reader.model), (VOCAB, PADDED), Placement.of(context, torch.float32)))
    expected = torch.load(saved / f"{name}.pt")
    with torch.no_grad():
        reader.read(parts_of_parameters(model.parameters(), context))
        logits, order = model(batch_of(expected["tokens"], expected["types"], LENGTHS))
    theirs = torch.cat([each[:n, :VOCAB] for each, n in zip(expected["logits"], LENGTHS, strict=True)])
    assert 0.3 < theirs.std() < 30  # neither dead nor saturated
    torch.testing.assert_close(logits[:, 0, :VOCAB], theirs, atol=1e-5, rtol=0)
    assert (order is None) == ("order" not in expected)
    if order is not None:
        torch.testing.assert_close(order, expected["order"], atol=1e-5, rtol=0)
