"""Libraries and programs that drive `deepspeed`, unpatched; DeepSpeed's own answers beside ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forks
from tests.forks import ROOT

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
PROGRAMS = Path(__file__).with_name("programs")
ONE_RANK = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29517",
}


def answers(name: str) -> dict[str, Any]:
    """What DeepSpeed answered."""
    return json.loads((PROGRAMS / f"answers/{name}.json").read_text())


def run(ranks: int, script: str, *arguments: object) -> None:
    """A program on so many ranks, as `megazero run` starts it."""
    launch = ["--nproc_per_node", str(ranks)] if ranks > 1 else []
    words = ["-m", "megazero.cli", "run", *launch, str(PROGRAMS / script), *map(str, arguments)]
    environment = {**os.environ, **(ONE_RANK if ranks == 1 else {}), "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *words], env={**environment, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_trainer_trains_as_under_deepspeed(ranks, tmp_path):
    """Stages 0 to 3, fp32 and bf16, the JSON's optimizer and schedule or the Trainer's own."""
    run(ranks, "trainer.py", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    there = answers(f"trainer-{ranks}")
    assert found.keys() == there.keys()
    for case, wanted in there.items():
        assert "error" not in found[case], (case, found[case])
        tolerance = 1e-6 if case.endswith("fp32") else 1e-3
        assert found[case]["losses"] == pytest.approx(wanted["losses"], rel=tolerance), case
        assert found[case]["evaluated"] == pytest.approx(wanted["evaluated"], rel=tolerance), case
        assert found[case]["rates"] == pytest.approx(wanted["rates"]), case
        # At stage 0 DeepSpeed has none in fp32, and in bf16 others than at its stages 1 to 3.
        norms = there[case.replace("stage0", "stage1")]["norms"]
        assert found[case]["norms"] == pytest.approx(norms, rel=max(tolerance, 2e-6)), case


@pytest.mark.slow
def test_trainer_saves_resumes_takes_the_best_and_generates(tmp_path):
    """The whole model and LoRA, at every stage; a new process resumes."""
    pytest.importorskip("peft")
    for phase in ("first", "again"):
        run(1, "trainer_life.py", tmp_path, phase, 0, 1, 2, 3)
    first, again = (json.loads((tmp_path / f"{phase}.json").read_text()) for phase in ("first", "again"))
    for case, wanted in answers("trainer_life").items():
        here = first[case]
        assert "error" not in here, (case, here)
        assert here["losses"] == pytest.approx(wanted["losses"], rel=1e-6), case
        assert here["text"] == wanted["text"], case
        assert here.get("reloaded") == wanted.get("reloaded"), case
        assert here["best"] == pytest.approx(wanted["best"], rel=1e-6)
        assert {"global_step2", "latest"} <= set(here["files"])
        assert "error" not in again[case], (case, again[case])
        resumed = again[case]["losses"]  # after the second step and its evaluation
        assert resumed == pytest.approx(here["losses"][5 : 5 + len(resumed)], rel=1e-6), case


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_accelerate_trains_as_under_deepspeed(ranks, tmp_path):
    """Each plugin's own JSON, offload, dummies, `accumulate`, clipping, `get_state_dict`, `save_state`."""
    run(ranks, "accelerated.py", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert not [(case, value) for case, value in found.items() if "error" in value]
    plain = found["stage0"]
    for case, value in found.items():
        if case != "stage3-auto" and not case.endswith("offload"):
            assert value["losses"] == pytest.approx(plain["losses"], rel=1e-6), case
        if case.endswith("saved"):
            assert value["after"][0] == pytest.approx(value["after"][1], rel=1e-6), case
    refused = "Cannot get 16bit model weights because `stage3_gather_16bit_"
    assert found["stage3"]["after"] == found["stage3-auto"]["after"] == {"refused": refused}
    assert found["stage3-gathered"]["after"] == pytest.approx(plain["after"], rel=1e-6)
    for case, wanted in answers("accelerate").items() if ranks == 1 else ():
        assert found[case]["losses"] == pytest.approx(wanted["losses"], rel=1e-6), case


@pytest.mark.slow
def test_lightning_trains_as_under_deepspeed(tmp_path):
    """Stages 0 to 3, fp32 and both kinds of bf16; validation; a training that goes on from a checkpoint."""
    pytest.importorskip("lightning")
    run(1, "lightning_fit.py", tmp_path / "found.json")
    here = json.loads((tmp_path / "found.json").read_text())
    there = answers("lightning")
    assert here.keys() == there.keys()
    for case, wanted in there.items():
        assert "error" not in here[case], (case, here[case])
        if case.startswith("stage0-bf16"):
            wanted = there[case.replace("stage0", "stage1")]  # DeepSpeed's stage 0 is 4e-3 from its others
        tolerance = 1e-6 if case.endswith("32-true") else 1e-4
        for kind, values in wanted.items():
            assert here[case][kind] == pytest.approx(values, rel=tolerance), (case, kind)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_trl_trains_as_under_deepspeed(task, stage, tmp_path):
    pytest.importorskip("trl")
    run(1, "preferences.py", tmp_path, task, stage)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["losses"] == pytest.approx(answers("trl")[task], rel=1e-6)
    assert {"checkpoint-3", "checkpoint-6"} <= set(found["saved"])


@pytest.mark.slow
@pytest.mark.parametrize("task", ["grpo", "rloo"])
def test_trl_generates_between_steps_at_stage_3(task, tmp_path):
    """It takes hooks off the gathered model, lets it write, and trains on: as at stage 0."""
    pytest.importorskip("trl")
    found = []
    for stage in (0, 3):
        run(1, "preferences.py", tmp_path / str(stage), task, stage)
        found.append(json.loads((tmp_path / str(stage) / "found.json").read_text()))
    for kind in ("losses", "norms", "rewards"):
        assert found[1][kind] == pytest.approx(found[0][kind], rel=1e-6, abs=1e-6), kind
    assert any(found[0]["rewards"])


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_llama_factory_trains(stage, tmp_path):
    """By its own command, which starts torchrun, whose rank finds our `deepspeed` through the environment."""
    pytest.importorskip("llamafactory")
    pytest.importorskip("torchaudio")  # it imports it for data of audio
    run(1, "factory.py", tmp_path, stage)
    lines = (tmp_path / "out/trainer_log.jsonl").read_text().splitlines()
    losses = [entry["loss"] for entry in map(json.loads, lines) if "loss" in entry]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert (tmp_path / "out/checkpoint-6/global_step6").is_dir()


def test_a_configuration_must_be_kept_for_models_to_be_sharded():
    """transformers holds it weakly: of a temporary one nothing is left when the model is built."""
    code = """
from megazero.deepspeed import install; install()
from transformers.integrations import HfDeepSpeedConfig
from tests.deepspeed.programs.tiny import llama
config = {"train_batch_size": 1, "zero_optimization": {"stage": 3}}
def sharded():
    model = type(llama())._from_config(llama().config)
    return all(hasattr(param, "ds_id") for param in model.parameters())
HfDeepSpeedConfig(config); print(sharded())
keep = HfDeepSpeedConfig(config); print(sharded())
"""
    done = forks.run("-c", code, environment=ONE_RANK)
    assert done.stdout.split()[-2:] == ["False", "True"], done.stderr


@pytest.mark.slow
def test_sequences_are_shared_through_accelerate_at_every_stage(tmp_path):
    """DeepSpeed's losses are those of stage 3; its gradients at stage 2 are twice as large, and clipped."""
    for stage in (2, 3):
        run(2, "shared_sequences.py", tmp_path / "found.json", stage)
        assert json.loads((tmp_path / "found.json").read_text()) == pytest.approx(
            answers("shared_sequences"), rel=1e-5
        )
