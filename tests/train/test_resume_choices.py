"""What a resume takes over, what it refuses, and that it says why."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megazero.checkpoint.folder import iteration_folder, saved_iterations
from megazero.checkpoint.manifest import STATE
from megazero.checkpoint.shards import parts_to_read
from megazero.config.steps import Progress
from megazero.config.training_plan import training_plan_of
from megazero.config.tree.checkpoint import CheckpointConfig
from megazero.config.tree.config import Config
from megazero.config.tree.model import ModelConfig
from megazero.errors import CheckpointError, DamagedCheckpointError
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.launch import Launch
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.resume import saved as module
from megazero.train.resume.facts import PRETRAINING
from megazero.train.resume.fit import check_model
from megazero.train.resume.resume import Resumed, resume
from megazero.train.resume.saved import SavedModel
from megazero.train.resume.snapshot import Snapshots
from megazero.train.resume.trained import load_for_inference
from megazero.train.step.engine import Engine
from megazero.train.step.state import TrainState
from megazero.train.step.timers import Timers
from megazero.verify.record import micro_batches, verification_engine
from tests.checkpoint.forged import edit, reseal
from tests.layouts.layout import GLOBAL_BATCH, SEQUENCE, VOCABULARY, Layout

STEPS = 2
LAYOUT = Layout(layers=1, dropout=0.1)
SEED = 77


def config_of(folder: Path, layout: Layout = LAYOUT, **choices: Any) -> Config:
    fields = {"save": str(folder), "load": str(folder), **choices}
    return layout.config().model_copy(update={"checkpoint": CheckpointConfig(**fields)})


def values(engine: Engine, context=None) -> dict[str, torch.Tensor]:
    """All weights and moments of one rank."""
    parts = parts_to_read(engine.optimizer, context or solo_context())
    return {str(part.key): part.tensor.clone() for part in parts}


def train(folder: Path, **choices: Any) -> dict[str, torch.Tensor]:
    """Save one checkpoint; returns what it holds."""
    config, context, state = config_of(folder, **choices), solo_context(), TrainState()
    training_plan = training_plan_of(config, context.data.size)
    engine = verification_engine(config, training_plan, context)
    for _ in range(STEPS):
        step = training_plan.at(state.progress)
        result = engine.train_step(micro_batches(config, context, step), state.progress, Timers())
        state = state.after(step, result.skipped)
    snapshots = Snapshots(config, training_plan, engine, context, VOCABULARY, SEED)
    snapshots.save(state)
    snapshots.saver.close()
    return values(engine)


def test_a_retain_interval_alone_keeps_its_multiples_and_the_newest(tmp_path):
    # As in Megatron-LM; it was once refused without `keep_last`.
    config, context = config_of(tmp_path / "run", save_retain_interval=2), solo_context()
    training_plan = training_plan_of(config, context.data.size)
    engine = verification_engine(config, training_plan, context)
    snapshots = Snapshots(config, training_plan, engine, context, VOCABULARY, SEED)
    for iteration in range(1, 6):
        here = training_plan.before(iteration)
        snapshots.save(TrainState(here))
    snapshots.saver.close()
    assert saved_iterations(tmp_path / "run") == [2, 4, 5]


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> SimpleNamespace:
    """A run's folder, and what its checkpoint holds."""
    folder = tmp_path_factory.mktemp("run")
    return SimpleNamespace(folder=folder, values=train(folder))


@pytest.fixture
def run(original, tmp_path) -> SimpleNamespace:
    """A copy of it, to be changed."""
    shutil.copytree(original.folder, tmp_path / "run")
    folder = tmp_path / "run"
    state = iteration_folder(folder, STEPS) / STATE
    return SimpleNamespace(folder=folder, values=original.values, state=state)


def again(config: Config, vocab_size: int = VOCABULARY) -> Resumed:
    build = partial(verification_engine, context=solo_context())
    return resume(config, solo_context(), vocab_size, build)


def refused(config: Config, vocab_size: int = VOCABULARY, kind: type = CheckpointError) -> str:
    """Why, of a resume that must not get as far as an engine."""
    with pytest.raises(CheckpointError) as error:
        resume(config, solo_context(), vocab_size, lambda *_: pytest.fail("built"))
    assert type(error.value) is kind, error.value
    return str(error.value)


def of_kind(found: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    return {name: t for name, t in found.items() if name.partition("/")[2] == kind}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    assert a.keys() == b.keys()
    assert a
    return all(torch.equal(a[name], b[name]) for name in a)


def test_everything_is_taken_over(run):
    found = again(config_of(run.folder))
    assert found.state == TrainState(Progress(STEPS, STEPS * GLOBAL_BATCH, STEPS * GLOBAL_BATCH * SEQUENCE))
    assert found.stream_seed == SEED
    assert found.engine.optimizer.updates == STEPS
    assert same(values(found.engine), run.values)
    assert found.remarks == (f"loaded {iteration_folder(run.folder, STEPS)}",)


def test_each_file_of_a_checkpoint_is_opened_once(run, monkeypatch):
    """The look for a healthy one reads `state.json`, and opening the checkpoint does not repeat it."""
    config, folder, real = config_of(run.folder), iteration_folder(run.folder, STEPS), os.open
    opened: list[str] = []

    def note(path, *args, **options):
        opened.append(str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", note)
    assert again(config).state.iteration == STEPS
    names = [Path(path).name for path in opened if Path(path).parent == folder]
    assert sorted(names) == sorted(path.name for path in folder.iterdir())


def test_facts_that_were_replaced_since_the_look_are_read_again(run, monkeypatch):
    """Another job may have saved the same iteration anew in between."""
    real = module.candidates

    def look(*args):
        listed = real(*args)
        edit(run.state, saying(5, "stream_seed"))
        return listed

    monkeypatch.setattr(module, "candidates", look)
    assert again(config_of(run.folder)).stream_seed == 5


def test_finetune_takes_weights_alone(run):
    found = again(config_of(run.folder, finetune=True))
    assert found.state == TrainState()
    assert found.stream_seed == found.config.training.seed != SEED
    assert found.engine.optimizer.updates == 0
    got = values(found.engine)
    assert same(of_kind(got, ""), of_kind(run.values, ""))
    for kind in ("exp_avg", "exp_avg_sq"):
        assert not any(t.any() for t in of_kind(got, kind).values())
        assert any(t.any() for t in of_kind(run.values, kind).values())


def test_without_the_optimizer_the_counters_go_on(run):
    found = again(config_of(run.folder, no_load_optim=True))
    assert (found.state.iteration, found.stream_seed) == (STEPS, SEED)
    assert found.engine.optimizer.updates == 0
    got = values(found.engine)
    assert same(of_kind(got, ""), of_kind(run.values, ""))
    assert not any(t.any() for t in of_kind(got, "exp_avg").values())


def test_the_random_state_is_taken_over_unless_it_is_not_to_be(tmp_path):
    torch.manual_seed(1)
    np.random.seed(1)
    train(tmp_path)
    expected = (torch.rand(3).tolist(), np.random.rand(3).tolist())
    torch.manual_seed(2)
    np.random.seed(2)
    found = again(config_of(tmp_path))
    assert (torch.rand(3).tolist(), np.random.rand(3).tolist()) == expected
    torch.manual_seed(2)
    np.random.seed(2)
    own = (torch.rand(3).tolist(), np.random.rand(3).tolist())
    torch.manual_seed(2)
    np.random.seed(2)
    found = again(config_of(tmp_path, no_load_rng=True))
    assert (torch.rand(3).tolist(), np.random.rand(3).tolist()) == own
    assert found.state.iteration == STEPS
    assert found.stream_seed == found.config.training.seed


def test_a_checkpoint_without_optimizer_state(tmp_path):
    weights = of_kind(train(tmp_path, no_save_optim=True), "")
    message = "must hold optimizer state, but has none; set --no-load-optim or --finetune"
    with pytest.raises(CheckpointError, match=message):
        again(config_of(tmp_path))
    for choice in ("no_load_optim", "finetune"):
        found = again(config_of(tmp_path, **{choice: True}))
        assert same(of_kind(values(found.engine), ""), weights)
        assert found.state.iteration == (STEPS if choice == "no_load_optim" else 0)


def test_every_field_of_another_model_is_named(run):
    config = config_of(run.folder)
    other = {
        "num_layers": 3,
        "hidden_size": 64,
        "ffn_hidden_size": 96,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "position_embedding_type": "rope",
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "norm_epsilon": 1e-6,
    }
    free = {"seq_length": 32, "hidden_dropout": 0.0, "make_vocab_size_divisible_by": 8}
    model = config.model.model_copy(update={**other, **free, "max_position_embeddings": 48})
    message = refused(config.model_copy(update={"model": model}), vocab_size=60)
    before = config.model
    for name, value in other.items():
        saved = {"num_query_groups": before.kv_heads}.get(name, getattr(before, name))
        assert f"{name} {saved} (now {value})" in message
    assert "kv_channels" not in message or f"kv_channels {before.head_dim} (now 16)" in message
    assert f"max_position_embeddings {SEQUENCE} (now 48)" in message
    assert f"vocab_size {VOCABULARY} (now 60)" in message
    assert not [name for name in free if f"{name} " in message.replace("max_position", "")]
    assert "\n" not in message


def test_another_vocabulary_is_refused_even_if_its_padding_is_as_large(run):
    config = config_of(run.folder)
    assert f"must hold this model, but has vocab_size {VOCABULARY} (now 62)" in refused(config, 62)
    assert again(config, VOCABULARY).state.iteration == STEPS


@pytest.mark.parametrize("name", ["lr", "min_lr", "lr_decay_iters", "weight_decay"])
def test_another_schedule_is_refused_unless_it_is_meant(run, name):
    config = config_of(run.folder)
    now = 7 if name == "lr_decay_iters" else 5e-4
    before = getattr(config.optimizer, name)
    changed = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={name: now})})
    message = refused(changed)
    named = {
        "lr": "peak of the learning rate",
        "min_lr": "minimum of the learning rate",
        "lr_decay_iters": "decay length of the learning rate",
        "weight_decay": "weight decay",
    }
    assert f"has another one ({named[name]} " in message
    assert "or --override-opt_param-scheduler to take the new one" in message
    override = changed.checkpoint.model_copy(update={"override_opt_param_scheduler": True})
    found = again(changed.model_copy(update={"checkpoint": override}))
    assert found.state.iteration == STEPS
    assert found.remarks[-1] == f"changed since the checkpoint: optimizer.{name}: {before} -> {now}"


def test_another_optimizer_is_refused_by_its_states(run):
    config = config_of(run.folder)
    changed = config.optimizer.model_copy(update={"optimizer": "sgd"})
    config = config.model_copy(update={"optimizer": changed})
    with pytest.raises(CheckpointError, match=r"does not fit this model: .*/momentum is missing"):
        again(config)


@pytest.mark.parametrize("choice", ["no_load_optim", "finetune"])
def test_without_its_states_another_optimizer_may_go_on(run, choice):
    """The moments that the checkpoint holds are then not left over, they are not asked for."""
    config = config_of(run.folder, **{choice: True}, override_opt_param_scheduler=True)
    changed = config.optimizer.model_copy(update={"optimizer": "sgd"})
    found = again(config.model_copy(update={"optimizer": changed}))
    assert same(of_kind(values(found.engine), ""), of_kind(run.values, ""))


def lacking(*names: str) -> Callable[[dict], None]:
    def change(facts: dict) -> None:
        for name in names[:-1]:
            facts = facts[name]
        del facts[names[-1]]

    return change


def saying(value: Any, *names: str) -> Callable[[dict], None]:
    def change(facts: dict) -> None:
        for name in names[:-1]:
            facts = facts[name]
        facts[names[-1]] = value

    return change


ILL_FORMED = {
    **{f"no {name}": lacking(name) for name in ("config", "state", "scaler", "updates", "stream_seed")},
    "no global batch": lacking("global_batch_size"),
    "no iteration": lacking("state", "iteration"),
    "no scale": lacking("scaler", "scale"),
    "a kind of a number": saying(3, "kind"),
    "a config of text": saying("x", "config"),
    "a config of lists": saying([1], "config", "optimizer"),
    "a model of text": saying("x", "config", "model"),
    "negative iteration": saying(-1, "state", "iteration"),
    "iteration of true": saying(True, "state", "iteration"),
    "iteration of a float": saying(2.5, "state", "iteration"),
    "iteration of text": saying("2", "state", "iteration"),
    "state of a list": saying([2, 0, 0, 0], "state"),
    "no batch": saying(0, "global_batch_size"),
    "updates of text": saying("2", "updates"),
    "scale of zero": saying(0.0, "scaler", "scale"),
    "infinite scale": saying(float("inf"), "scaler", "scale"),
    "scale not a number": saying(float("nan"), "scaler", "scale"),
    "seed of null": saying(None, "stream_seed"),
    "vocabulary of text": saying("61", "vocab_size"),
    "no vocabulary": lambda facts: facts.update(vocab_size=-61),
}


@pytest.mark.parametrize("case", ILL_FORMED)
def test_ill_formed_facts_are_damage(run, case):
    edit(run.state, ILL_FORMED[case])
    assert STATE in refused(config_of(run.folder), kind=DamagedCheckpointError)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lacking("config", "model"), "must say which model it holds, but does not"),
        (lacking("vocab_size"), "must say which model it holds, but does not"),
        (
            lacking("config", "model", "num_layers"),
            "must hold settings that this version knows, but num_layers",
        ),
        (saying("tanh", "config", "model", "activation"), "but activation is 'tanh'"),
        (saying([], "config", "model", "hidden_size"), r"but hidden_size is \[\]"),
    ],
)
def test_facts_of_another_version_are_refused(run, change, message):
    edit(run.state, change)
    with pytest.raises(CheckpointError, match=message) as error:
        again(config_of(run.folder))
    assert type(error.value) is CheckpointError


def test_facts_that_a_later_version_adds_are_left_alone(run):
    edit(run.state, lambda facts: facts.update(later=1, state={**facts["state"], "epochs": 3}))
    edit(run.state, saying(True, "config", "model", "a_later_setting"))
    assert again(config_of(run.folder)).state.iteration == STEPS


@pytest.mark.parametrize("position", [-1, 10**6])
@pytest.mark.parametrize("name", ["python", "numpy"])
def test_a_random_state_that_no_generator_has(run, name, position):
    """numpy takes any position in its words, and reads beyond them then."""
    folder = iteration_folder(run.folder, STEPS)
    index = json.loads((folder / "index.json").read_text())
    (entry,) = [t for t in index["tensors"] if (t["name"], t["kind"]) == (name, "rng")]
    path = folder / entry["pieces"][0]["file"]
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    start, stop = json.loads(data[8 : 8 + size])[f"{name}/rng"]["data_offsets"]
    words = np.frombuffer(data, np.int64, (stop - start) // 8, 8 + size + start)
    words[-2] = position
    path.write_bytes(data)
    reseal(folder)
    with pytest.raises(DamagedCheckpointError, match=r"has none: .*must be one that a generator can have"):
        again(config_of(run.folder))
    assert again(config_of(run.folder, no_load_rng=True)).state.iteration == STEPS


def test_nothing_of_a_damaged_checkpoint_stays(run):
    """An older one has weights alone; the newer one breaks when half of its moments are read."""
    older, newer = iteration_folder(run.folder, 1), iteration_folder(run.folder, STEPS)
    shutil.copytree(newer, older)
    edit(older / STATE, lambda facts: {k: facts[k] for k in ("vocab_size", "config")} | {"kind": "weights"})
    (path,) = newer.glob("optimizer-*")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    # As if the file were long: what was read before the damage is in the engine.
    real = module.CheckpointReader.read

    def read(self, parts):
        if self.folder == newer:
            for part in parts:
                part.tensor.fill_(3)
        real(self, parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.CheckpointReader, "read", read)
        found = again(config_of(run.folder))
    assert path.name in found.remarks[0]
    assert found.remarks[1] == f"loaded {older}"
    got = values(found.engine)
    assert same(of_kind(got, ""), of_kind(run.values, ""))
    assert not any(t.any() for t in of_kind(got, "exp_avg").values())
    assert found.engine.optimizer.updates == 0


def test_all_ranks_try_what_the_first_one_sees(run, monkeypatch):
    """Another machine may be shown the folder as it was."""
    world, layout = ThreadWorld(2), Layout(layers=1, dp=2)
    here = []

    def found(directory, iteration):
        here.append(1)
        return module.Candidates((iteration_folder(directory, STEPS),), ("seen once",))

    monkeypatch.setattr(module, "candidates", found)

    def work(rank: int) -> tuple[int, tuple[str, ...]]:
        context = thread_context(world, layout.grid, rank)
        build = partial(verification_engine, context=context)
        resumed = resume(config_of(run.folder, layout), context, VOCABULARY, build)
        return resumed.state.iteration, resumed.remarks[:1]

    assert world.run(work) == [(STEPS, ("seen once",))] * 2
    assert here == [1]


def test_a_missing_folder_is_a_new_run_and_a_damaged_one_is_not(run, tmp_path):
    assert again(config_of(tmp_path / "nothing")).state == TrainState()
    (iteration_folder(run.folder, STEPS) / "manifest.json").unlink()
    assert "manifest.json" in refused(config_of(run.folder), kind=DamagedCheckpointError)
    shutil.rmtree(iteration_folder(run.folder, STEPS))
    assert "which is missing" in refused(config_of(run.folder), kind=DamagedCheckpointError)


def test_ill_formed_facts_keep_a_model_from_generating(run):
    edit(run.state, saying("x", "config", "model"))
    with pytest.raises(DamagedCheckpointError, match=STATE):
        load_for_inference(str(run.folder), Launch())
    assert PRETRAINING in run.state.read_text()


def test_experts_may_be_balanced_in_another_way_but_not_be_in_other_layers():
    shape = {
        "num_layers": 4,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "seq_length": 8,
        "num_experts": (8,),
    }
    written = ModelConfig(**shape, moe_layer_freq=2).model_dump(mode="json")
    saved = SavedModel(VOCABULARY, {"model": written}, Path("state.json"))
    balanced = {"moe_aux_loss_coeff": (0.1,), "moe_expert_capacity_factor": 1.5}
    same = ModelConfig(**shape, **balanced, moe_layer_freq=(1, 0, 1, 0), moe_ffn_hidden_size=32)
    check_model(same, VOCABULARY, saved, Path("run"))
    other = ModelConfig(**shape, expert_interval=2, moe_router_topk=1)
    with pytest.raises(CheckpointError) as caught:
        check_model(other, VOCABULARY, saved, Path("run"))
    assert str(caught.value) == (
        "`run` must hold this model, but has num_experts (8, 0, 8, 0) (now (0, 8, 0, 8)), moe_router_topk 2 "
        "(now 1)"
    )


def test_the_length_of_a_decoder_may_change_but_not_precision_or_what_decays():
    """There was another list of settings for models of Hugging Face; this one lacked the length."""
    shape = {"num_layers": 4, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 8}
    written = ModelConfig(**shape, family="t5", t5_decoder_seq_length=4, qk_layernorm=True)
    saved = SavedModel(VOCABULARY, {"model": written.model_dump(mode="json")}, Path("state.json"))
    free = {"t5_decoder_seq_length": 6, "seq_length": 6, "max_position_embeddings": 8}
    check_model(written.model_copy(update=free), VOCABULARY, saved, Path("run"))
    for field in ("fp32_residual_connection", "apply_wd_to_qk_layernorm"):
        with pytest.raises(CheckpointError, match=rf"has {field} False \(now True\)"):
            check_model(written.model_copy(update={field: True}), VOCABULARY, saved, Path("run"))
