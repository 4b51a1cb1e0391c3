"""A training with a teacher: who may be one, when the lessons end, and what is left of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megazero.checkpoint.folder import iteration_folder
from megazero.checkpoint.reader import CheckpointReader
from megazero.config.resolve import parse_config
from megazero.errors import CheckpointError, ConfigError
from megazero.mpu.launch import Launch
from megazero.train.pretraining import pretrain

SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 64 --mock-data "
    "--micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --train-iters 6 --eval-interval 3 --eval-iters 1"
)


def run(folder: Path, *flags: object) -> list[dict]:
    """Train in this process; the metrics of every iteration."""
    metrics = folder / "metrics.jsonl"
    argv = [word for each in (SMALL, "--metrics-jsonl", metrics, *flags) for word in str(each).split()]
    pretrain(parse_config(argv, world_size=1).config, Launch())
    return [json.loads(line) for line in metrics.read_text().splitlines()]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    run(folder, "--num-layers 3 --num-experts 4 --train-iters 2 --save", folder / "run")
    return folder / "run"


def refusal(error: type, *flags: object, folder: Path) -> str:
    with pytest.raises(error) as caught:
        run(folder, *flags)
    return str(caught.value)


def test_the_lessons_end_and_a_resume_knows_it(teacher, tmp_path, capsys):
    distillation = ("--kd --kd-train-iters 4 --kd-temp 2 --load-teacher", teacher)
    whole = run(tmp_path, *distillation)
    assert f"learns from {iteration_folder(teacher, 2)} until step 4" in capsys.readouterr().out
    assert ["kd_loss" in step for step in whole] == [True] * 4 + [False] * 2
    assert whole[3]["tflops"] * whole[3]["seconds"] > 1.2 * whole[4]["tflops"] * whole[4]["seconds"]
    evaluations = (tmp_path / "metrics.eval.jsonl").read_text()
    assert "lm_loss" in evaluations
    assert "kd_loss" not in evaluations
    # Within the lessons, and after them, when the teacher is not even opened.
    for stop, there in ((2, teacher), (4, tmp_path / "gone"), (5, tmp_path / "gone")):
        folder = tmp_path / f"stopped-{stop}"
        folder.mkdir()
        again = ("--save", folder / "run", "--load", folder / "run", *distillation)
        run(folder, *again, "--exit-interval", stop)
        resumed = run(folder, *again[:-1], there)
        assert [(s["lm_loss"], s["grad_norm"]) for s in resumed] == [
            (s["lm_loss"], s["grad_norm"]) for s in whole
        ]


def test_what_is_saved_is_the_student_s_alone(teacher, tmp_path):
    plain, distilled = tmp_path / "plain", tmp_path / "taught"
    for folder, flags in ((plain, ()), (distilled, ("--kd --load-teacher", teacher))):
        folder.mkdir()
        run(folder, "--train-iters 3 --save", folder / "run", *flags)
    names = [set(CheckpointReader(iteration_folder(each / "run", 3)).shapes) for each in (plain, distilled)]
    assert names[0] == names[1]


def test_a_teacher_of_another_vocabulary_or_shape_is_refused_with_everything_at_once(teacher, tmp_path):
    said = refusal(
        CheckpointError,
        "--kd --vocab-size 63 --num-layers-teacher 24 --num-experts-teacher 8 --hidden-size-teacher 32",
        "--load-teacher",
        teacher,
        folder=tmp_path,
    )
    assert "vocab_size 64 (the student's is 63)" in said
    assert "num_layers 3 (asked for: 24)" in said
    assert "num_experts 4 (asked for: 8)" in said
    assert "hidden_size" not in said


def test_a_teacher_s_shape_may_be_named(teacher, tmp_path):
    shape = "--num-layers-teacher 3 --num-experts-teacher 4 --hidden-size-teacher 32"
    assert run(
        tmp_path, "--kd --train-iters 3", shape, "--num-attention-heads-teacher 4 --load-teacher", teacher
    )


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    said = refusal(CheckpointError, "--kd --load-teacher", tmp_path / "empty", folder=tmp_path)
    assert "must hold a checkpoint, but has none" in said


def test_a_model_of_another_family_is_refused(tmp_path):
    (tmp_path / "bert").mkdir()
    run(tmp_path / "bert", "--model-family bert --train-iters 2 --save", tmp_path / "bert/run")
    said = refusal(CheckpointError, "--kd --load-teacher", tmp_path / "bert/run", folder=tmp_path)
    assert "family bert (the student is a gpt for pretraining)" in said


def test_a_teacher_that_cannot_do_what_the_student_does_is_refused_by_the_rule(teacher, tmp_path):
    said = refusal(
        ConfigError,
        "--kd --seq-length 32 --load-teacher",
        teacher,
        "--recompute-granularity full",
        folder=tmp_path,
    )
    assert f"the teacher {iteration_folder(teacher, 2)}: " in said
    assert "`max_position_embeddings` must be at least `seq_length`" in said


def test_flags_of_a_teacher_without_kd_are_refused(tmp_path):
    said = refusal(ConfigError, "--load-teacher somewhere", folder=tmp_path)
    assert "[rule needs_of_load_teacher]" in said
    assert "[rule needs_of_kd]" in refusal(ConfigError, "--mos", folder=tmp_path)


def test_a_damaged_teacher_is_not_taken_for_a_damaged_student(teacher, tmp_path):
    """A resume passes over damaged checkpoints of the student, but must not do so for the teacher's sake."""
    flags = ("--save", tmp_path / "run", "--load", tmp_path / "run", "--kd --load-teacher")
    run(tmp_path, *flags, teacher, "--exit-interval 2")
    broken = shutil.copytree(teacher, tmp_path / "broken")
    (file,) = iteration_folder(broken, 2).glob("model-*.safetensors")
    file.write_bytes(file.read_bytes()[:-8])
    said = refusal(CheckpointError, *flags, broken, folder=tmp_path)
    assert str(iteration_folder(broken, 2)) in said
    assert "passed over" not in said
