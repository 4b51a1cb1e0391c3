"""Real hybrids of Megatron-Core: their logits, their checkpoints, and ours loaded by Core on ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from megazero.checkpoint.box import Box
from megazero.checkpoint.part import WEIGHT, Part
from megazero.checkpoint.reader import CheckpointReader
from megazero.checkpoint.shards import parts_of_parameters
from megazero.formats.megatron.convert import import_megatron
from megazero.formats.megatron.export import ExportOptions, export_megatron
from megazero.formats.megatron.reader import ImportOptions, MegatronReader
from megazero.layers.placement import Placement
from megazero.models.batch import Batch
from megazero.models.chunk import Slice
from megazero.models.gpt import GPT
from megazero.mpu.context import thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from megazero.spec.resolve import model_spec
from tests.formats.megatron.core_models import PADDED, VOCAB
from tests.formats.megatron.test_reader import assert_same, read_all
from tests.source_tree import ROOT

pytestmark = pytest.mark.skipif(
    not all(map(find_spec, ("megatron", "einops"))), reason="needs megatron-core and einops"
)
TRUSTED = ImportOptions(trust_pickle=True, vocab_size=PADDED)


def run(*lines: tuple[object, ...]) -> None:
    """Run each command in a process of its own, all at once."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.formats.megatron.core_hybrid"]
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    options = {"cwd": ROOT, "env": environment, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen([*command, *map(str, words)], **options) for words in lines]
    said = [process.communicate(timeout=120)[1] for process in started]
    assert [process.returncode for process in started] == [0] * len(lines), said[0][-3000:]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("core") / "saved"
    out.mkdir()
    run(("save", out))
    return out


def test_logits_agree(saved):
    reader = MegatronReader(
        saved / "ranks" / "iter_0000007", ImportOptions(trust_pickle=True, vocab_size=VOCAB)
    )
    context = thread_context(ThreadWorld(1), ProcessGrid(), 0)
    model = GPT(Slice(model_spec(reader.model), (VOCAB, PADDED), Placement.of(context, torch.float32)))
    expected = torch.load(saved / "logits.pt")
    with torch.no_grad():
        reader.read(parts_of_parameters(model.parameters(), context))
        logits = model(Batch(expected["tokens"])).transpose(0, 1)
    theirs = expected["logits"][..., :VOCAB]
    assert 0.3 < theirs.std() < 30  # neither dead nor saturated
    torch.testing.assert_close(logits[..., :VOCAB], theirs, atol=1e-5, rtol=0)


def test_distributed_there_and_back(saved, tmp_path):
    """From Core's checkpoint to megazero's and back, every weight and moment keeps its bits."""
    options = ImportOptions(trust_pickle=True, vocab_size=PADDED, with_optimizer=True)
    with MegatronReader(saved / "distributed", options) as reader:
        ours = import_megatron(reader, tmp_path / "ours")
    written = export_megatron(CheckpointReader(ours), tmp_path / "back", ExportOptions(with_optimizer=True))
    run(("load", written.folder, tmp_path / "loaded.pt", 0, 1))
    loaded, expected = torch.load(tmp_path / "loaded.pt"), torch.load(saved / "tensors.pt")
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("form", ["whole", "shared"])
def test_folders_with_optimizers(saved, form):
    """Optimizer state in a folder of ranks, whole or in a buffer, equals that in the distributed form."""
    options = ImportOptions(trust_pickle=True, vocab_size=PADDED, with_optimizer=True)
    readers = [MegatronReader(saved / name, options) for name in (f"{form}/iter_0000007", "distributed")]
    mine, theirs = readers
    assert mine.shapes.keys() == theirs.shapes.keys()
    assert {key.kind for key in mine.shapes} == {WEIGHT, "exp_avg", "exp_avg_sq"}
    for key, shape in mine.shapes.items():
        tensors = [torch.full(shape, torch.nan) for _ in readers]
        for reader, tensor in zip(readers, tensors, strict=True):
            reader.read([Part(key, shape, Box.whole(shape), tensor)])
        assert torch.equal(*tensors), key


def test_ranks_of_core_slice_mixers_kind_by_kind(saved, tmp_path):
    """Core loads megazero's export on two tensor-parallel ranks; their files are read as the whole again."""
    with MegatronReader(saved / "ranks" / "iter_0000007", TRUSTED) as reader:
        weights, ours = read_all(reader), import_megatron(reader, tmp_path / "ours")
    written = export_megatron(CheckpointReader(ours), tmp_path / "back", ExportOptions())
    run(*(("load", written.folder, tmp_path / "ranks", rank, 2) for rank in range(2)))
    assert_same(read_all(MegatronReader(tmp_path / "ranks" / "iter_0000007", TRUSTED)), weights)
