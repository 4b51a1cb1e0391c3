"""Checkpoints that DeepSpeed 0.19.8 wrote, against what its optimizers held in memory then."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megazero.checkpoint.part import Key
from megazero.deepspeed.zero_to_fp32 import (
    get_fp32_state_dict_from_zero_checkpoint,
    get_model_state_file,
    get_optim_files,
)
from megazero.errors import CheckpointError, DamagedCheckpointError
from megazero.formats.deepspeed.files import find_files
from megazero.formats.deepspeed.folder import ForeignFolder
from megazero.formats.deepspeed.pickles import clone_tensors_for_torch_save, load_states
from megazero.mpu.context import ParallelContext, solo_context
from tests.deepspeed.user_models import build, on_ranks, settings, start
from tests.formats.deepspeed.small import Small, groups_of, small_batch
from tests.tables import over_table

PACKED = Path(__file__).with_name("checkpoints.zip")
with zipfile.ZipFile(PACKED) as packed:
    RUNS = sorted({name.split("/")[0] for name in packed.namelist()})
SGD = {"type": "SGD", "params": {"lr": 0.02, "momentum": 0.9}}
ADAMW = {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}}
SCHEDULE = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.05, "warmup_num_steps": 10}}
STEPS = 5


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """The folder of all runs."""
    folder = tmp_path_factory.mktemp("runs")
    with zipfile.ZipFile(PACKED) as packed:
        packed.extractall(folder)
    return folder


def groups() -> list[dict[str, tuple[int, ...]]]:
    """Names and shapes of the groups' parameters."""
    model = Small()
    names = {id(param): name for name, param in model.named_parameters()}
    return [{names[id(param)]: tuple(param.shape) for param in group["params"]} for group in groups_of(model)]


# Runs whose names do not say the type of their weights.
HALVES = {
    "stage0-sgd": "fp16",
    **dict.fromkeys(("stage1-accumulates-fp32", "stage1-of-1", "stage3-sub-groups"), "bf16"),
}


def half_of(run: str) -> str | None:
    """The dtype of a run's weights; None for fp32."""
    return HALVES.get(run) or next((half for half in ("fp16", "bf16") if half in run), None)


def config(run: str, stage: int = 1) -> dict:
    """The DeepSpeed JSON of a run."""
    half = half_of(run)
    more = {half: {"enabled": True}} if half else {}
    optimizer = SGD if "sgd" in run else ADAMW
    return {
        **settings(
            stage, optimizer=optimizer, scheduler=SCHEDULE, zero_allow_untested_optimizer=True, **more
        ),
        "gradient_clipping": 1.0,
    }


def engine_of(context: ParallelContext, run: str, stage: int = 1):
    model = build(Small, seed=9)
    return start(context, model, config(run, stage), model_parameters=groups_of(model))


def whole_state(engine) -> dict[str, torch.Tensor]:
    """Masters and moments by name."""
    return {
        spec.name + ("" if kind == "weight" else f"/{kind}"): value.clone()
        for spec, kinds in engine.optimizer.shards.full_state()
        for kind, value in kinds.items()
    }


@over_table("run", RUNS)
def test_every_tensor_is_the_runs_bit_for_bit(runs, run):
    folder = ForeignFolder(find_files(runs / run / f"global_step{STEPS}"), groups())
    expected = load_file(runs / run / "expected.safetensors")
    steps, skipped, samples, ranks, rate, scale = expected.pop("facts").tolist()
    del expected["passing"]  # a buffer that is not kept
    tensors = {name: value for name, value in expected.items() if not name.endswith("/next")}
    assert tensors.keys() == {str(key) for key in folder.shapes if key.name != "head.weight"}
    for name, value in tensors.items():
        found = folder.tensor(Key(*name.split("/")))
        assert found.shape == value.shape, name
        assert torch.equal(found.float(), value), name
    assert torch.equal(folder.tensor(Key("head.weight")), folder.tensor(Key("embedding.weight")))
    facts, counts = folder.facts, folder.facts.counts
    assert (counts.steps, counts.skipped, counts.samples) == (steps, skipped, samples)
    assert folder.dp_world_size == ranks
    if "elastic" in run:  # it has no options
        assert list(facts.options) == []
    else:
        assert facts.options[0]["lr"] == pytest.approx(rate)
        assert [group["weight_decay"] for group in facts.options] == [0.0 if "sgd" in run else 0.1, 0.0]
    assert (1.0 if facts.scale is None else facts.scale.scale) == scale
    assert facts.client.pop("seen").tolist() == [0, 1, 2]
    assert facts.client.pop("args").seed == 3
    assert facts.client == {"epoch": 4}


@pytest.mark.parametrize(
    ("run", "ranks", "stage"),
    [(run, 2, 3 if "stage2" in run else 1) for run in RUNS if "-of-" not in run]
    + [("stage3-of-3", 3, 3), ("stage2-of-3", 3, 0), ("stage1-of-1", 1, 2)],
)
def test_an_engine_goes_on_as_deepspeed_did(runs, run, ranks, stage):
    def work(context: ParallelContext):
        engine = engine_of(context, run, stage)
        path, client = engine.load_checkpoint(runs / run)
        assert path == str(runs / run / f"global_step{STEPS}")
        assert client["epoch"] == 4
        before = whole_state(engine)
        counted = engine.global_steps, engine.skipped_steps, engine.get_lr()[0], engine.optimizer.cur_scale
        engine.backward(engine(*small_batch(STEPS, context.data.rank)))
        engine.step()
        return before, counted, engine.module_state_dict()

    expected = load_file(runs / run / "expected.safetensors")
    steps, skipped, _, _, rate, scale = expected["facts"].tolist()
    for before, counted, after in on_ranks(ranks, work):
        assert counted == (steps, skipped, pytest.approx(0.0 if "elastic" in run else rate), scale)
        for name, value in before.items():
            assert torch.equal(value.float(), expected[name]), name
        half = half_of(run)
        for name, value in after.items():
            # An elastic checkpoint has no rates; DeepSpeed's fp16 step at stage 0 is not that of its stage 1.
            if f"{name}/next" in expected and "elastic" not in run and run != "stage0-fp16":
                torch.testing.assert_close(
                    value.float(),
                    expected[f"{name}/next"],
                    rtol=2**-7 if half else 1e-5,
                    atol=1e-3 if half else 1e-6,
                )


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (3, 3), (3, 1)])
@pytest.mark.parametrize("run", ["stage2-fp32", "stage3-bf16", "stage0-fp16"])
def test_any_number_of_ranks_loads_it(runs, run, ranks, stage):
    def work(context: ParallelContext):
        engine = engine_of(context, run, stage)
        engine.load_checkpoint(runs / run)
        return whole_state(engine)

    expected = load_file(runs / run / "expected.safetensors")
    for state in on_ranks(ranks, work):
        assert len(state) == 14
        for name, value in state.items():
            assert torch.equal(value, expected[name]), name


@over_table("run", RUNS)
def test_whole_weights_have_every_name(runs, run):
    state = get_fp32_state_dict_from_zero_checkpoint(runs / run)
    expected = load_file(runs / run / "expected.safetensors")
    assert state.keys() == Small().state_dict().keys()
    assert all(value.dtype == torch.float32 for value in state.values())
    assert state["head.weight"] is state["embedding.weight"]
    rounded = "stage0" in run  # no names beside the masters there
    for name, value in state.items():
        torch.testing.assert_close(
            value,
            expected[name] if name != "head.weight" else expected["embedding.weight"],
            rtol=2**-8 if rounded else 0,
            atol=0,
        )


def copy_of(folder: Path, to: Path) -> Path:
    """A copy whose files a test may change."""
    to.mkdir(parents=True)
    for path in folder.glob("*.pt"):
        (to / path.name).write_bytes(path.read_bytes())
    return to


@pytest.mark.fast
def test_a_missing_ranks_file_is_named(runs, tmp_path):
    folder = copy_of(runs / "stage3-of-3" / f"global_step{STEPS}", tmp_path / "a")
    (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(
        DamagedCheckpointError, match="files of 3 ranks, but zero_pp_rank_1_mp_rank_00_optim_states.pt is mis"
    ):
        ForeignFolder(find_files(folder))
    other = copy_of(runs / "stage2-fp32" / f"global_step{STEPS}", tmp_path / "b")
    for path in other.glob("*optim_states.pt"):
        path.unlink()
    with pytest.raises(DamagedCheckpointError, match="zero_pp_rank_0_mp_rank_00_optim_states.pt, zero_pp"):
        ForeignFolder(find_files(other))
    engine = engine_of(solo_context(), "fp32")
    engine.load_checkpoint(tmp_path, "b", load_module_only=True)  # its weights are whole
    expected = load_file(runs / "stage2-fp32" / "expected.safetensors")
    assert torch.equal(engine.module_state_dict()["inner.weight"], expected["inner.weight"])
    assert find_files(tmp_path) is None


def test_old_names_are_read(runs, tmp_path):
    folder = copy_of(runs / "stage2-fp32" / f"global_step{STEPS}", tmp_path / "a")
    for path in folder.glob("*_optim_states.pt"):
        path.rename(path.with_name(path.name.replace("_optim_states", "optim_states")))
    expected = load_file(runs / "stage2-fp32" / "expected.safetensors")
    found = ForeignFolder(find_files(folder)).tensor(Key("embedding.weight", "exp_avg"))
    assert torch.equal(found, expected["embedding.weight/exp_avg"])


class Stranger:
    """A class that no pickle may name."""


def test_a_class_that_is_not_known_is_refused_by_name_unless_it_is_trusted(runs, tmp_path, monkeypatch):
    folder = copy_of(runs / "stage2-fp32" / f"global_step{STEPS}", tmp_path / "a")
    path = folder / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(path, weights_only=False), "mine": Stranger()}, path)
    engine = engine_of(solo_context(), "fp32")
    with pytest.raises(
        CheckpointError, match=r"names tests\S*\.Stranger, which was not called; .*TRUST_PICKLE=1"
    ):
        engine.load_checkpoint(tmp_path, "a")


def test_layers_of_a_pipeline_have_their_numbers(runs, tmp_path):
    folder = copy_of(runs / "stage2-fp32" / f"global_step{STEPS}", tmp_path / "a")
    path = folder / "mp_rank_00_model_states.pt"
    torch.save({**_plain(path), "module": None, "param_shapes": None, "optimizer": None}, path)
    for optimizer in folder.glob("*optim_states.pt"):
        optimizer.unlink()
    torch.save({"weight": torch.full((2,), 3.0)}, folder / "layer_04-model_states.pt")
    found = ForeignFolder(find_files(folder), optimizer=False)
    assert found.tensor(Key("4.weight")).tolist() == [3.0, 3.0]


def _plain(path: Path) -> dict:
    """The plain values of a file's content, not memory-mapped."""
    content = {k: v for k, v in load_states(path).items() if k not in ("args", "ds_config")}
    return clone_tensors_for_torch_save(content)


def test_slices_of_tensor_parallel_ranks_are_refused_and_stages_of_a_pipeline_are_joined(runs, tmp_path):
    folder = copy_of(runs / "stage0-fp32" / f"global_step{STEPS}", tmp_path / "a")
    first = _plain(folder / "mp_rank_00_model_states.pt")
    torch.save({**first, "module": {"late": torch.ones(2)}}, folder / "mp_rank_01_model_states.pt")
    assert ForeignFolder(find_files(folder), optimizer=False).tensor(Key("late")).tolist() == [1.0, 1.0]
    torch.save({**first, "module": {"inner.bias": torch.ones(3)}}, folder / "mp_rank_01_model_states.pt")
    with pytest.raises(
        CheckpointError, match="must be of one tensor-parallel rank, but `inner.bias` differs"
    ):
        ForeignFolder(find_files(folder), optimizer=False)


def test_experts_are_refused(runs, tmp_path):
    folder = copy_of(runs / "stage0-fp32" / f"global_step{STEPS}", tmp_path / "a")
    torch.save({}, folder / "layer_0_expert_1_mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="must hold no experts in files of their own"):
        ForeignFolder(find_files(folder))


def test_an_optimizer_of_other_groups_is_refused(runs):
    engine = start(solo_context(), build(Small), config("fp32"))
    with pytest.raises(CheckpointError, match="must be of an optimizer with the same parameter groups"):
        engine.load_checkpoint(runs / "stage0-fp16")
    with pytest.raises(CheckpointError, match="momentum_buffer is missing"):
        engine_of(solo_context(), "sgd").load_checkpoint(runs / "stage2-fp32")


@pytest.mark.fast
def test_files_are_found_by_stage(runs):
    folder = runs / "stage3-bf16" / f"global_step{STEPS}"
    names = [Path(path).name for path in get_optim_files(folder)]
    assert names == [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)]
    assert Path(get_model_state_file(folder, 3)).name == "zero_pp_rank_0_mp_rank_00_model_states.pt"
    with pytest.raises(CheckpointError, match="must hold mp_rank_00_model_states.pt"):
        get_model_state_file(folder, 2)
    assert find_files(runs) is None
