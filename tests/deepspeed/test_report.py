"""What an engine prints, and what reaches the monitors that a JSON switches on."""

from __future__ import annotations

import csv

import pytest
import torch
from torch import nn

import megazero
from megazero.errors import ConfigError
from megazero.mpu.context import ParallelContext, solo_context
from megazero.train.observe.monitors.csv_file import CsvMonitor
from tests.deepspeed.user_models import ADAMW, MICRO, Tied, build, on_ranks, settings, start, train_engine
from tests.train.samples import evaluation, step


def test_a_line_every_so_many_steps(capsys):
    def work(context: ParallelContext):
        config = settings(1, 2, optimizer=ADAMW)
        config["steps_per_print"] = 2
        return train_engine(start(context, build(Tied), config), context, range(5)).losses

    losses = on_ranks(2, work)[0]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines] == ["step 2", "step 4"]
    parts = lines[1].split(" | ")
    assert parts[1] == f"samples {4 * 2 * 2 * MICRO}"
    assert float(parts[2].removeprefix("loss ")) == pytest.approx(losses[3], rel=1e-5)
    assert parts[4:7] == ["learning rate 0.01", "loss scale 1", "skipped 0"]
    assert not any("ms" in part or "FLOP" in part for part in parts)


def test_what_else_a_line_can_hold(capsys):
    def work(context: ParallelContext):
        extras = {
            "wall_clock_breakdown": True,
            "flops_profiler": {"enabled": True},
            "comms_logger": {"enabled": True},
        }
        config = settings(0, 2, optimizer=ADAMW, **extras)
        config["steps_per_print"] = 1
        engine = start(context, nn.Linear(4, 3, bias=False), config)
        for _ in range(2):
            engine.backward(engine(torch.ones(5, 4)).sum())
            engine.step()

    on_ranks(2, work)
    *profile, line = capsys.readouterr().out.splitlines()
    assert profile[0] == "flops profile at step 1"
    # The first micro-batch's forward, once; hooks and counters are gone after it.
    assert profile[-1].startswith("model (Linear): 12 = 100%, 60 MACs = 100%, ")
    assert sum(text.startswith("flops profile") for text in profile) == 1
    names = [part.split(" ")[0] for part in line.split(" | ")]
    assert {"forward", "backward", "step"} <= set(names)
    # Two micro-batches, forward and the weights' gradient: 2 x 5 x 4 x 3 each; the input needs none.
    assert f"{2 * 2 * 120:.3e} FLOPs per step and rank" in line
    assert "replica all_reduce: 1 calls, 48 bytes" in line


def test_the_state_is_dumped_where_asked(capsys):
    start(solo_context(), build(Tied), settings(2, optimizer=ADAMW, dump_state=True))
    assert "configuration: UserSettings(zero=ZeroConfig(stage=2" in capsys.readouterr().out


def test_monitors_of_the_json_get_every_step(tmp_path):
    def work(context: ParallelContext):
        sections = {
            name: {"enabled": True, "output_path": str(tmp_path), "job_name": name}
            for name in ("tensorboard", "csv_monitor")
        }
        engine = start(context, build(Tied), settings(1, 2, optimizer=ADAMW, **sections))
        losses = train_engine(engine, context, range(3)).losses
        engine.monitor.close()
        return losses

    losses = on_ranks(2, work)[0]
    with (tmp_path / "csv_monitor" / "lm_loss.csv").open() as file:
        head, *rows = list(csv.reader(file))
    assert head == ["iteration", "lm loss"]
    assert [int(row[0]) for row in rows] == [1, 2, 3]
    assert [float(row[1]) for row in rows] == pytest.approx(losses, rel=1e-5)
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert events.name.startswith("events.out.tfevents")


def test_wandb_gets_the_settings_and_every_step(monkeypatch):
    import sys
    import types

    calls = []
    run = types.SimpleNamespace(
        define_metric=lambda name, step_metric=None: None,
        log=lambda values: calls.append((values["iteration"], values["lm loss"])),
        finish=lambda: calls.append("end"),
    )
    fake = types.ModuleType("wandb")
    fake.Error = type("Error", (Exception,), {})
    fake.init = lambda **given: calls.append(given["config"]["zero"]["stage"]) or run
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = settings(2, optimizer=ADAMW, wandb={"enabled": True, "project": "p"})
    engine = start(solo_context(), build(Tied), config)
    losses = train_engine(engine, engine.context, range(2)).losses
    engine.destroy()
    assert len(calls) == 3, "an engine's end is not the monitors'"
    engine.monitor.write_events([("lm loss", 0.5, 7)])
    engine.monitor.close()
    engine.monitor.close()
    assert calls[0] == 2
    assert calls[1:3] == [(1, pytest.approx(losses[0])), (2, pytest.approx(losses[1]))]
    assert calls[3:] == [(7, 0.5), "end"]


class TestCsv:
    def test_one_file_per_metric_that_a_later_run_adds_to(self, tmp_path):
        for first in (1, 3):
            monitor = CsvMonitor(tmp_path / "new")
            monitor.step(step(first, grad_norm=1.5))
            monitor.step(step(first + 1, grad_norm=float("inf"), skipped=True))
            monitor.close()
        text = (tmp_path / "new" / "grad-norm.csv").read_text().splitlines()
        assert text == ["iteration,grad-norm", "1,1.5", "2,inf", "3,1.5", "4,inf"]
        assert (tmp_path / "new" / "lm_loss.csv").read_text().count("\n") == 3

    def test_evaluations_have_files_of_their_own(self, tmp_path):
        CsvMonitor(tmp_path).evaluation(evaluation(10))
        assert (tmp_path / "lm_loss_validation.csv").read_text().splitlines()[1] == "10,2.0"

    def test_a_file_in_place_of_the_folder_is_refused(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match="`csv_dir` must be a folder that can be written"):
            CsvMonitor(tmp_path / "file")


def test_repeating_loader_starts_over():
    loader = megazero.RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
