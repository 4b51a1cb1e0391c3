"""Trainings whose blend is edited under them: when an edit acts, what is said, and the samples trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from megazero.checkpoint.folder import iteration_folder
from megazero.checkpoint.manifest import STATE
from megazero.commands.checkpoint import main as inspect
from megazero.config.resolve import parse_config
from megazero.data.changing.blend import ChangingBlend
from megazero.data.changing.history import History
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.mpu.context import thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.pretraining import pretrain_on
from megazero.train.step.engine import Engine
from tests.data.changing.shelf import by_the_rule

MODEL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --lr 1e-2 --vocab-size 50 "
    "--micro-batch-size 1 --log-interval 4 --split 8,1,1 --adam-eps 1e-4 --lr-decay-iters 99 "
    "--hidden-dropout 0 --attention-dropout 0 --data-args-path blend --save run --load run --keep-last 99"
)

ATTEMPT = Engine.attempt
Edits = Mapping[int, str | None]
"""Iteration -> what the file with the blend holds from then on; None if it is gone."""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate("abcd"):
        with IndexedDatasetWriter(tmp_path / name, np.uint16) as writer:
            for part in np.array_split((np.arange(330 + 70 * number) * 7 + number) % 50, 9):
                writer.add_document(part)
    (tmp_path / "blend").write_text("0.7 a 0.3 b")
    return tmp_path


class Killed(Exception):
    """The end of a job that is killed."""


def edit_during(monkeypatch, edits: Edits, kill: int | None = None) -> None:
    """Change the file during these steps, whichever rank is there first; kill the job in a step."""
    done: set[int] = set()

    def step(self, batches, progress, *rest):
        iteration = progress.iteration + 1
        if iteration == kill:
            raise Killed
        if iteration in edits and iteration not in done:
            done.add(iteration)
            Path("blend").unlink(missing_ok=True)
            if edits[iteration] is not None:
                Path("blend").write_text(edits[iteration])
        return ATTEMPT(self, batches, progress, *rest)

    monkeypatch.setattr(Engine, "attempt", step)


def job(flags: str, **grid: int) -> list[BaseException | None]:
    """Train on ranks as threads; return how each ended."""
    size = int(np.prod(list(grid.values()) or [1]))
    world = ThreadWorld(size, timeout=60)

    def rank(number: int) -> BaseException | None:
        config = parse_config([*MODEL.split(), *flags.split()], world_size=size).config
        try:
            pretrain_on(config, thread_context(world, ProcessGrid(**grid), number))
        except Killed as error:
            return error
        return None

    return world.run(rank)


def history_at(iteration: int, run: str = "run") -> History:
    facts = json.loads((iteration_folder(Path(run), iteration) / STATE).read_text())
    return History.model_validate_json(json.dumps(facts["blend"]))


def starts(history: History) -> list[int]:
    return [segment.start for segment in history.segments]


def test_an_edit_acts_on_all_ranks_and_a_broken_one_on_none(folder, monkeypatch, capsys):
    edit_during(monkeypatch, {2: "0.5 b 0.5 c", 5: "1 a 1 nothere"})
    job("--train-iters 9 --global-batch-size 4 --eval-iters 0 --log-interval 3", dp=2)
    history = history_at(9)
    assert starts(history) == [0, 12]
    assert [share.path for share in history.segments[-1].shares] == ["b", "c"]
    assert sorted(history.segments[-1].taken.values()) == [4, 8]
    out = capsys.readouterr().out
    assert "iteration 4 is the first of another blend: the blend in blend of " in out
    assert (
        "acts from sample 12 on: b 30% -> 50% (4 samples so far), c 0% -> 50% (0 samples so far), a 70%"
        in out
    )
    warning = "warning: training keeps the blend that it has: blend cannot be used: `data_path` must name "
    assert out.count(f"{warning}datasets, but nothere.idx is not a file") == 2, "at each log line"
    facts = json.loads((iteration_folder(Path("run"), 9) / STATE).read_text())
    assert [Path(data["prefix"]).name for data in facts["data"]] == ["b", "c"]
    assert "another blend" in Path("run/metrics.run.jsonl").read_text()
    assert inspect(["inspect", "run/iter_0000009"]) == 0
    shown = capsys.readouterr().out
    rows = [line.split()[-3:] for line in shown.splitlines() if line[:1] in "abc" and "%" in line]
    assert rows == [["0", "70%", "0"], ["0", "30%", "0"], ["12", "50%", "4"], ["12", "50%", "0"]]


def losses(run: str) -> list[float]:
    return [json.loads(line)["lm_loss"] for line in Path(run, "metrics.jsonl").read_text().splitlines()]


FIVE: Edits = {
    3: "0.2 a 0.3 b 0.5 c",
    8: "0 a 1 b 2 c",
    14: '{"train": "1 d 1 b", "valid": "1 a"}',
    16: "0.5 a 0.25 d 0.25 c 0 b",
    20: "1 a 1 b 1 c 1 d",
}
PARTS = [
    ("", {"dp": 2}),
    ("--tensor-model-parallel-size 2", {"tp": 2}),
    ("--pipeline-model-parallel-size 2", {"pp": 2}),
    ("--context-parallel-size 2", {"cp": 2}),
]


@pytest.mark.slow
def test_edits_and_changes_of_the_layout_give_the_losses_of_one_unbroken_process(folder, monkeypatch):
    flags = "--train-iters 24 --global-batch-size 4 --eval-iters 2 --eval-interval 8"
    edit_during(monkeypatch, FIVE)
    job(f"{flags} --save whole --load whole")
    Path("blend").write_text("0.7 a 0.3 b")
    edit_during(monkeypatch, FIVE)
    for more, grid in PARTS:
        job(f"{flags} --exit-interval 6 {more}", **grid)
    whole, parts = history_at(24, "whole"), history_at(24)
    assert starts(whole) == [0, 16, 36, 60, 68, 84]
    bare = {"segments": {"__all__": {"origin": {"time"}}}}
    assert parts.model_dump(exclude=bare) == whole.model_dump(exclude=bare)
    assert losses("run") == pytest.approx(losses("whole"), rel=2e-5)
    evaluated = [Path(run, "metrics.eval.jsonl").read_text().count("\n") for run in ("run", "whole")]
    assert evaluated[0] == evaluated[1] > 3


@pytest.mark.slow
def test_kills_other_batches_and_edits_between_them_train_on_each_sample_once(folder, monkeypatch):
    """Kills undo steps; the last reading of each position is in the order of the history."""
    seen: dict[int, tuple[str, int]] = {}
    whole = ChangingBlend.batch

    def noted(self, indices):
        sources, owners, samples = self.located(np.asarray(indices))
        for place, owner, sample in zip(indices, owners.tolist(), samples.tolist(), strict=True):
            seen[int(place)] = (sources[owner].path, sample)
        return whole(self, indices)

    monkeypatch.setattr(ChangingBlend, "batch", noted)
    flags = "--train-iters 60 --save-interval 3 --eval-iters 0 --num-workers 0 --override-opt_param-scheduler"
    plan: list[tuple[Edits, int | None, str, Mapping[str, int]]] = [
        ({2: "0.5 b 0.5 c", 7: "1 d"}, 8, "--global-batch-size 4", {"dp": 2}),
        ({9: "3 a 1 b"}, 12, "--global-batch-size 6 --tensor-model-parallel-size 2", {"tp": 2}),
        ({12: "2 b 1 d 1 a"}, None, "--global-batch-size 8 --exit-interval 16", {"dp": 2, "tp": 1}),
        ({17: "1 c 1 b", 19: "nonsense"}, 21, "--global-batch-size 2 --context-parallel-size 2", {"cp": 2}),
        ({20: "1 a"}, None, "--global-batch-size 4 --exit-interval 24", {}),
    ]
    for edits, kill, more, grid in plan:
        edit_during(monkeypatch, edits, kill)
        ended = job(f"{flags} {more}", **grid)
        assert all(isinstance(error, Killed) == (kill is not None) for error in ended)
        if kill == 12:
            Path("blend").write_text("1 a 1 c")  # while no job runs
    history = history_at(24)
    consumed = json.loads((iteration_folder(Path("run"), 24) / STATE).read_text())["state"][
        "consumed_samples"
    ]
    assert starts(history) == [0, 12, 24, 42, 74, 102, 114]
    rule = [(s.start, {share.path: share.weight for share in s.shares}) for s in history.segments]
    assert [seen[place] for place in range(consumed)] == by_the_rule(rule, consumed)


def test_each_validation_set_has_a_loss_and_a_broken_one_ends_nothing(folder, capsys):
    """A document of `late` that is not read first has an id that the vocabulary has not."""
    with IndexedDatasetWriter(folder / "late", np.uint16) as writer:
        for number in range(40):
            writer.add_document(np.full(9, 60 if number == 20 else number))
    flags = "--train-data-path 1 a --valid-data-path c late d --multiple-validation-sets --log-interval 9"
    words = [word for word in MODEL.split() if word not in ("--data-args-path", "blend")]
    words += f"{flags} --train-iters 2 --eval-iters 6 --eval-interval 1 --global-batch-size 4".split()
    world = ThreadWorld(2, timeout=60)
    config = parse_config(words, world_size=2).config
    world.run(lambda number: pretrain_on(config, thread_context(world, ProcessGrid(dp=2), number)))
    records = [json.loads(line) for line in Path("run/metrics.eval.jsonl").read_text().splitlines()]
    assert [(r["iteration"], r["split"]) for r in records if r["split"] != "validation-late"] == [
        (iteration, f"validation-{name}") for iteration in (1, 2) for name in "cd"
    ]
    assert "warning: there is no validation-late loss: rank" in capsys.readouterr().out
