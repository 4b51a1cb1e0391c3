"""Ranks that were started differently end before the first step, with what differs and where."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megazero.config.fields import FIELD_BY_PATH, FIELDS
from megazero.config.resolve import parse_config
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.errors import ConfigError
from megazero.mpu.agreement import disagreements
from megazero.mpu.context import thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.launch import Launch
from megazero.mpu.thread_group import ThreadWorld
from megazero.ops import cuda
from megazero.train.guards import agreement
from megazero.train.guards.agreement import MAY_DIFFER, settings_and_code, source_files
from megazero.train.pretraining import pretrain_on
from tests.forks import run_ranks

SMALL = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --lr 1e-2 --train-iters 2 "
    "--micro-batch-size 1 --global-batch-size 2 --eval-iters 0 --log-interval 1"
)


def test_all_settings_count_but_those_of_the_list():
    facts = settings_and_code(parse_config([*SMALL.split(), "--mock-data", "--vocab-size", "9"]).config)
    assert set(FIELD_BY_PATH) >= MAY_DIFFER
    assert len(facts) == len(FIELDS) - len(MAY_DIFFER) + 5
    assert facts["lr"] == "0.01"
    assert facts["compiled kernels"] in ("there", "missing")


def test_one_rank_of_a_machine_reads_the_sources(monkeypatch):
    """Every rank once opened all of them: 680,000 files at the start of a job of 1,024 ranks."""
    config = parse_config([*SMALL.split(), "--mock-data", "--vocab-size", "9"]).config
    read = []
    monkeypatch.setattr(agreement, "read_regular", lambda path: read.append(path) or path.read_bytes())
    first, other = settings_and_code(config), settings_and_code(config, speaks_for_node=False)
    assert read == source_files()
    assert {**other, "sources of megazero": first["sources of megazero"]} == first
    assert other["sources of megazero"] is None
    speakers = [Launch(rank, 8, rank % 4).speaks_for_node for rank in range(8)]
    assert speakers == [True, False, False, False] * 2


def test_ranks_compare_their_cuda_kernels(monkeypatch):
    """A rank without them computed by torch's operators, in other bits than the ranks with them."""

    def facts(device: str, name: str | None) -> dict[str, str | None]:
        library = None if name is None else SimpleNamespace(path=Path(f"/somewhere/{name}.so"))
        monkeypatch.setattr(cuda, "_BACKEND", SimpleNamespace(library=library))
        argv = [*SMALL.split(), "--mock-data", "--vocab-size", "9", "--device", device]
        return settings_and_code(parse_config(argv).config, speaks_for_node=False)

    here = facts("auto", "libmegazero_cuda-0123456789abcdef-sm_90+compute_90")
    assert here == facts("auto", "libmegazero_cuda-0123456789abcdef-sm_80+compute_80")
    for name in (None, "libmegazero_cuda-fedcba9876543210-sm_90+compute_90"):
        (violation,) = disagreements({0: here, 1: facts("auto", name)})
        assert violation.startswith(
            "`CUDA kernels` must be the same on all ranks, but is 0123456789abcdef on"
        )
    assert facts("cpu", None) == facts("cpu", "libmegazero_cuda-0123456789abcdef-sm_90+compute_90")


def write(prefix: Path, tokens: int) -> str:
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.add_document(np.arange(tokens) % 50)
    return str(prefix)


def started(*flags: str) -> list[Exception | None]:
    """What becomes of thread ranks with these flags each."""
    world = ThreadWorld(len(flags), timeout=60)
    grid = ProcessGrid(dp=len(flags))

    def rank(number: int) -> Exception | None:
        config = parse_config([*SMALL.split(), *flags[number].split()], world_size=len(flags)).config
        try:
            pretrain_on(config, thread_context(world, grid, number))
        except ConfigError as error:
            return error

    return world.run(rank)


def test_another_dataset_is_named_and_a_copy_is_none(tmp_path):
    paths = [write(tmp_path / "here", 300), write(tmp_path / "copy", 300), write(tmp_path / "other", 299)]
    flags = [f"--vocab-size 50 --split 1,0,0 --data-path {path}" for path in paths]
    assert started(*flags[:2]) == [None, None]
    for error in started(flags[0], flags[2]):
        (violation,) = error.violations
        assert violation.startswith("`training data` must be the same on all ranks, but is 37 samples of ")


def test_another_tokenizer_is_named(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]
    flags = []
    for name, order in (("one", words), ("two", [*words[:5], "b", "a"])):
        path = tmp_path / name / "vocab.txt"
        path.parent.mkdir()
        path.write_text("\n".join(order))
        flags.append(f"--mock-data --tokenizer-type BertWordPieceCase --vocab-file {path}")
    for error in started(*flags):
        assert [line.partition(" must")[0] for line in error.violations] == ["`content of the tokenizer`"]


@pytest.mark.gloo
def test_real_ranks_end_with_status_2_and_every_difference(tmp_path):
    """Even where they want layouts whose groups do not match."""
    commands = [
        ["pretrain_gpt.py", *SMALL.split(), "--mock-data", "--vocab-size", 50, *own.split()]
        for own in ("--lr 1e-2", "--lr 2e-2 --tensor-model-parallel-size 2 --num-workers 0")
    ]
    for rank in run_ranks(*commands):
        said = rank.stderr
        assert rank.returncode == 2, said
        assert "`lr` must be the same on all ranks, but is 0.01 on rank 0, 0.02 on rank 1." in said
        assert (
            "`tensor_model_parallel_size` must be the same on all ranks, but is 1 on rank 0, 2 on rank 1."
            in said
        )
        assert "num_workers" not in said
