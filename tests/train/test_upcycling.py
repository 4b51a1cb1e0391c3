"""A training with experts that begins from a dense model: the same function, experts that are its MLPs."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from megazero.checkpoint.folder import iteration_folder
from megazero.checkpoint.part import Key
from megazero.checkpoint.reader import CheckpointReader
from megazero.config.resolve import parse_config
from megazero.config.steps import Progress
from megazero.config.tree.checkpoint import CheckpointConfig
from megazero.config.tree.config import Config
from megazero.errors import CheckpointError
from megazero.mpu.context import thread_context
from megazero.mpu.launch import Launch
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.pretraining import pretrain
from megazero.train.resume.resume import resume
from megazero.train.resume.snapshot import Snapshots
from megazero.train.resume.weights import take_foreign_weights
from megazero.train.step.state import TrainState
from megazero.verify.record import verification_engine
from tests.formats.hf.samples import LLAMA, VOCAB, config_for, their_tensors, write_folder
from tests.layouts.layout import SEQUENCE, VOCABULARY, Layout

SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 64 --mock-data "
    "--micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --train-iters 4 --eval-interval 4 --eval-iters 2 "
    "--hidden-dropout 0 --attention-dropout 0"
)
EXPERTS = "--num-experts 3 --moe-router-topk 2 --moe-use-upcycling"
LAYOUTS = (
    Layout(),
    Layout(tp=2),
    Layout(pp=2, schedule="gpipe"),
    Layout(dp=2, zero=1),
    Layout(tp=2, dp=2, zero=3),
    Layout(dp=4, ep=2, zero=1),
    Layout(tp=2, dp=2, ep=4, etp=1, zero=2),
)


def run(metrics: Path, *flags: object) -> list[dict]:
    """Train in this process; the metrics of every iteration."""
    argv = [word for each in (SMALL, "--metrics-jsonl", metrics, *flags) for word in str(each).split()]
    pretrain(parse_config(argv, world_size=1).config, Launch())
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def evaluated(metrics: Path, *flags: object) -> list[float]:
    """The losses of validation and test, without a training."""
    run(metrics, "--skip-train", *flags)
    lines = metrics.with_suffix(".eval.jsonl").read_text().splitlines()
    return [json.loads(line)["lm_loss"] for line in lines]


@pytest.mark.parametrize("shape", ["", "--swiglu --disable-bias-linear --normalization RMSNorm"])
@pytest.mark.parametrize("routing", ["", "--moe-router-score-function sigmoid --moe-layer-freq 2"])
def test_the_function_at_step_0_is_the_dense_model_s(shape, routing, tmp_path):
    dense = tmp_path / "dense"
    run(tmp_path / "a.jsonl", shape, "--save", dense)
    expected = evaluated(tmp_path / "b.jsonl", shape, "--load", dense, "--finetune")
    found = evaluated(tmp_path / "c.jsonl", shape, EXPERTS, routing, "--load", dense)
    assert len(expected) == 2
    assert found == pytest.approx(expected, rel=1e-6)
    seeded = EXPERTS.replace("--moe-use-upcycling", "")
    fresh = evaluated(tmp_path / "d.jsonl", shape, seeded, routing, "--load", tmp_path / "nothing")
    assert fresh != pytest.approx(expected, rel=1e-3)  # the weights matter


def test_the_run_goes_on_from_its_own_checkpoints_once_it_has_some(tmp_path, capsys):
    folder = tmp_path / "run"
    run(tmp_path / "a.jsonl", "--save", folder)
    same = (tmp_path / "b.jsonl", EXPERTS, "--load", folder, "--save", folder)
    first = run(*same, "--exit-interval", 2)
    assert "began experts from the dense model" in capsys.readouterr().out
    again = run(*same)
    assert "began experts" not in capsys.readouterr().out
    assert [record["iteration"] for record in first] == [1, 2]
    assert [record["iteration"] for record in again] == [1, 2, 3, 4]
    assert again[:2] == first


def test_a_dense_checkpoint_is_not_taken_without_the_switch(tmp_path):
    run(tmp_path / "a.jsonl", "--save", tmp_path / "dense")
    load = ("--load", tmp_path / "dense")
    with pytest.raises(CheckpointError, match="must hold this model, but has num_experts"):
        run(tmp_path / "b.jsonl", "--num-experts 3", *load, "--finetune")
    with pytest.raises(CheckpointError, match="must hold this model, but has hidden_size 32"):
        run(tmp_path / "b.jsonl", EXPERTS, *load, "--hidden-size 64")


def save(layout: Layout, config: Config) -> CheckpointReader:
    """What all ranks have after they began, as a checkpoint."""
    world = ThreadWorld(layout.world_size)

    def work(rank: int) -> None:
        context = thread_context(world, layout.grid, rank)
        engine_of = partial(verification_engine, context=context)
        size = config.model.vocab_size
        begin = partial(take_foreign_weights, config, context, size)
        resumed = resume(config, context, size, engine_of, begin)
        snapshots = Snapshots(config, resumed.training_plan, resumed.engine, context, size, 1)
        snapshots.save(TrainState(Progress(1, 8, 8 * SEQUENCE)))
        snapshots.saver.close()

    world.run(work)
    return CheckpointReader(iteration_folder(config.checkpoint.save, 1))


def check_experts(found: CheckpointReader, dense, layers: int, experts: int) -> None:
    """Every expert is the MLP of its layer, bit for bit, and all else but the routers is as it was."""
    for key in (key for key in found.shapes if key.kind == "weight"):
        tensor, name = found.tensor(key), key.name
        if ".experts." in name:
            assert tensor.shape[0] == experts
            assert all(torch.equal(each, dense[Key(name.replace(".experts.", "."))]) for each in tensor), name
        elif ".router." in name:
            assert tensor.std() > 0
        else:
            assert torch.equal(tensor, dense[key]), name
    names = [key.name for key in found.shapes if key.kind == "weight"]
    assert sum(name.endswith("experts.up.weight") for name in names) == layers


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_experts_are_the_dense_mlps_on_every_layout(layout, tmp_path):
    serial = Layout(shape="llama", layers=2)

    def config_of(each: Layout, **checkpoint) -> Config:
        config = each.config()
        model = serial.config().model.model_copy(update={"vocab_size": VOCABULARY})
        return config.model_copy(update={"model": model, "checkpoint": CheckpointConfig(**checkpoint)})

    dense = save(serial, config_of(serial, save=str(tmp_path / "dense")))
    weights = {key: dense.tensor(key) for key in dense.shapes if key.kind == "weight"}
    config = config_of(
        layout, load=str(tmp_path / "dense"), save=str(tmp_path / "moe"), moe_use_upcycling=True
    )
    model = config.model.model_copy(update={"num_experts": (4,), "moe_router_topk": 2})
    training = config.training.model_copy(update={"seed": 4321})  # so that all must have been loaded
    found = save(layout, config.model_copy(update={"model": model, "training": training}))
    check_experts(found, weights, layers=2, experts=4)


def test_a_hugging_face_model_may_be_the_dense_one(tmp_path):
    write_folder(tmp_path / "hf", config_for(LLAMA), their_tensors(LLAMA))
    layout = Layout()
    model = LLAMA.model_copy(update={"num_experts": (3,), "vocab_size": VOCAB, "expert_interval": 2})
    checkpoint = CheckpointConfig(
        load_hf=str(tmp_path / "hf"), save=str(tmp_path / "moe"), moe_use_upcycling=True
    )
    found = save(layout, layout.config().model_copy(update={"model": model, "checkpoint": checkpoint}))
    assert found.shapes[Key("layers.1.mlp.experts.up.weight")] == (3, 2, 58, 36)
    tensors = their_tensors(LLAMA)
    for expert in found.tensor(Key("layers.1.mlp.experts.up.weight")):
        assert torch.equal(expert[0], tensors["model.layers.1.mlp.gate_proj.weight"])
        assert torch.equal(expert[1], tensors["model.layers.1.mlp.up_proj.weight"])
    assert torch.equal(
        found.tensor(Key("layers.0.mlp.down.weight")), tensors["model.layers.0.mlp.down_proj.weight"]
    )
