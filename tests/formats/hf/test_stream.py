"""Weights as a stream: from any layout the converted checkpoint, with hashes, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megazero.checkpoint.disk import Disk
from megazero.checkpoint.part import Part
from megazero.config.steps import Progress
from megazero.config.tree.checkpoint import CheckpointConfig
from megazero.errors import CheckpointError
from megazero.formats.hf.convert import convert_to_hf
from megazero.formats.hf.save import FolderAtEnd
from megazero.formats.hf.stream import GatheredSource, hash_of
from megazero.mpu.context import thread_context
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.resume.keepers import keepers_of
from megazero.train.resume.resume import resume
from megazero.train.resume.snapshot import Snapshots
from megazero.train.resume.weights import take_foreign_weights
from megazero.train.step.state import TrainState
from megazero.verify.record import verification_engine
from tests.equivalence.test_hf_expert_layouts import config_of as expert_config
from tests.equivalence.test_hf_layouts import config_of
from tests.layouts.layout import SEQUENCE, VOCABULARY, Layout

DENSE = (
    Layout(),
    Layout(tp=2),
    Layout(tp=4, sequence_parallel=True),
    Layout(dp=2, zero=1),
    Layout(dp=2, zero=2),
    Layout(dp=3, zero=3),
    Layout(cp=2, zero=1),
    Layout(tp=2, cp=2),
    Layout(pp=2, dp=2, zero=2),
    Layout(pp=2, schedule="interleaved", virtual=2, layers=4),
    Layout(pp=2, schedule="zb-v", layers=4),
    Layout(pp=2, schedule="zb-h1", layers=4),
    Layout(tp=2, pp=2, schedule="1f1b"),
    Layout(tp=2, dp=2, zero=3),
)
EXPERTS = (
    Layout(dp=2, ep=2),
    Layout(dp=4, ep=2, zero=3),
    Layout(tp=2, dp=2, ep=4, etp=1),
    Layout(pp=2, dp=2, ep=2, zero=1),
)


def on_ranks(layout: Layout, config, work) -> list:
    """`work(engine, context, resumed)` on the ranks of a layout, as threads."""
    world = ThreadWorld(layout.world_size)

    def rank_work(rank):
        context = thread_context(world, layout.grid, rank)
        engine_of = partial(verification_engine, context=context)
        begin = partial(take_foreign_weights, config, context, VOCABULARY)
        resumed = resume(config, context, VOCABULARY, engine_of, begin)
        return work(resumed, context)

    return world.run(rank_work)


def parts_of(engine) -> list:
    return [part for keeper in keepers_of(engine, ()) for part in keeper.parts()]


def streamed(config, resumed, context) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """What this rank gets of the stream, and its hashes."""
    folder = FolderAtEnd.of(config, VOCABULARY, {}, context)
    assert folder is not None
    stream = folder.stream(parts_of(resumed.engine), context, 7)
    return dict(stream), stream.hashes


def check(layout: Layout, config, folder: Path) -> None:
    def work(resumed, context):
        saved = Snapshots(config, resumed.training_plan, resumed.engine, context, VOCABULARY, 1234)
        saved.save(TrainState(Progress(1, 8, 8 * SEQUENCE)))
        saved.saver.close()
        return streamed(config, resumed, context)

    (tensors, hashes), *others = on_ranks(layout, config, work)
    assert others == [({}, {})] * (layout.world_size - 1), layout.name
    convert_to_hf(config.checkpoint.save, folder / "converted")
    expected = load_file(folder / "converted" / "model.safetensors")
    assert sorted(tensors) == sorted(expected), layout.name
    assert all(torch.equal(tensors[name], expected[name]) for name in expected), layout.name
    assert hashes == {name: hash_of(tensor) for name, tensor in expected.items()}, layout.name


@pytest.mark.parametrize("layouts", [DENSE[2::4], pytest.param(DENSE, marks=pytest.mark.slow)], ids=len)
def test_on_every_layout_it_is_the_converted_checkpoint(layouts, tmp_path):
    for number, layout in enumerate(layouts):
        folder = tmp_path / str(number)
        family, untied = ("gpt2", False) if number % 2 else ("llama", True)
        places = {"save": str(folder / "run"), "save_hf": str(folder / "hf")}
        check(layout, config_of(layout, family, untied, **places), folder)


@pytest.mark.parametrize("layouts", [EXPERTS[2:3], pytest.param(EXPERTS, marks=pytest.mark.slow)], ids=len)
def test_with_experts_on_every_layout_it_is_the_converted_checkpoint(layouts, tmp_path):
    for number, layout in enumerate(layouts):
        folder = tmp_path / str(number)
        kind = ("mixtral", "qwen2-moe")[number % 2]
        check(
            layout, expert_config(layout, kind, save=str(folder / "run"), save_hf=str(folder / "hf")), folder
        )


class DiesAt(Disk):
    """A disk on which the n-th change ends the process, as a kill does: nothing is cleaned up."""

    def __init__(self, left: int):
        self.left = left

    def _change(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed

    def make_folder(self, path):
        self._change()
        super().make_folder(path)

    def create(self, path):
        self._change()
        return super().create(path)

    def rename(self, old, new):
        self._change()
        super().rename(old, new)

    def remove(self, path):
        if self.left < 0:
            raise Killed
        super().remove(path)


class Killed(BaseException):
    """The end of a process."""


def test_a_kill_at_any_change_leaves_no_folder_or_the_whole_one(tmp_path):
    layout, out = Layout(), tmp_path / "hf"
    config = config_of(layout, "llama", False, save_hf=str(out))

    def work(resumed, context):
        for changes in range(50):
            folder = FolderAtEnd.of(config, VOCABULARY, {}, context)
            try:
                folder.write(parts_of(resumed.engine), context, 7, DiesAt(changes))
            except Killed:
                assert not out.exists(), changes
                continue
            return changes
        return 0

    assert on_ranks(layout, config, work)[0] >= 4
    assert os.listdir(tmp_path) == ["hf"]  # what the killed ones left is gone
    versions = json.loads((out / "megazero_weights.json").read_text())
    tensors = load_file(out / "model.safetensors")
    assert versions == {"version": 7, "sha256": {name: hash_of(t) for name, t in tensors.items()}}


def test_a_full_disk_is_told_on_every_rank(tmp_path):
    layout = Layout(tp=2)
    config = config_of(layout, "gpt2", False, save_hf=str(tmp_path / "hf"))

    class Full(Disk):
        def create(self, path):
            raise OSError(28, "No space left on device", str(path))

    def work(resumed, context):
        folder = FolderAtEnd.of(config, VOCABULARY, {}, context)
        with pytest.raises(CheckpointError, match=r"rank 0 could not write .*No space left"):
            folder.write(parts_of(resumed.engine), context, 7, Full())
        return True

    assert on_ranks(layout, config, work) == [True, True]
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path):
    layout, out = Layout(), tmp_path / "hf"
    out.mkdir()
    (out / "mine.txt").write_text("keep")
    config = config_of(layout, "gpt2", False, save_hf=str(out))
    with pytest.raises(CheckpointError, match="must be new or an empty folder"):
        on_ranks(layout, config, lambda resumed, context: FolderAtEnd.of(config, VOCABULARY, {}, context))
    shutil.rmtree(out)
    alien = config.model.model_copy(update={"normalization": "RMSNorm"})
    config = config.model_copy(update={"model": alien})
    with pytest.raises(CheckpointError, match="transformers"):
        on_ranks(layout, config, lambda resumed, context: FolderAtEnd.of(config, VOCABULARY, {}, context))


def test_reading_asks_each_rank_for_its_own_boxes_alone():
    """A rank's memory holds what was asked for, however large the model is: no read fetches more."""
    layout = Layout(dp=2, zero=3)
    config = config_of(layout, "llama", True)

    def work(resumed, context):
        sizes = []
        exchange = context.world.exchange
        context.world.exchange = lambda transfers: (
            sizes.append(sum(t.tensor.numel() for t in transfers)) or exchange(transfers)
        )
        source = GatheredSource(parts_of(resumed.engine), context)
        folder = FolderAtEnd.of(
            config.model_copy(update={"checkpoint": CheckpointConfig(save_hf="nowhere")}),
            VOCABULARY,
            {},
            context,
        )
        tensors = dict(folder.stream(parts_of(resumed.engine), context, 0))
        return source.shapes, max(sizes), tensors

    (shapes, most, tensors), (same, _, nothing) = on_ranks(layout, config, work)
    assert shapes == same
    assert not nothing
    assert most <= max(tensor.numel() for tensor in tensors.values())


def test_no_rank_goes_ahead_of_the_first():
    """On a GPU, sends that wait longer than a call may take end the job: those of the last stage."""
    layout = Layout(pp=2)
    config = config_of(layout, "llama", True)
    begun = [0, 0]
    ahead = []

    def work(resumed, context):
        source = GatheredSource(parts_of(resumed.engine), context)
        exchange = context.world.exchange

        def counted(transfers):
            ahead.append(begun[1] - begun[0])
            return exchange(transfers)

        context.world.exchange = counted
        for key, shape in source.shapes.items():
            begun[context.rank] += 1
            source.read([Part.whole(key, torch.empty(shape))])

    on_ranks(layout, config, work)
    assert min(begun) > 8
    assert {abs(number) for number in ahead} <= {0, 1}
