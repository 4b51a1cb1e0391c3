from __future__ import annotations

import errno
import io
import json
import math
import struct
import sys
import types

import pytest
from rich.console import Console

from megazero.config.steps import BEGINNING, Progress
from megazero.config.tree.config import Config
from megazero.config.tree.logging import LoggingConfig
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.optimizer import OptimizerConfig
from megazero.config.tree.training import BatchConfig
from megazero.errors import ConfigError
from megazero.loss import LossTerm
from megazero.train.observe.monitors import build_monitors
from megazero.train.observe.monitors.base import CompositeMonitor, Monitor
from megazero.train.observe.monitors.console import ConsoleMonitor
from megazero.train.observe.monitors.csv_file import CsvMonitor
from megazero.train.observe.monitors.jsonl import JsonlMonitor
from megazero.train.observe.monitors.tensorboard import TensorBoardMonitor
from megazero.train.observe.news.services import WandbMonitor
from megazero.train.step.losses import Losses
from tests.train.samples import evaluation, step

# Of a model with two trained terms, 4 + 0.5 x 2 = 5, and one that is only reported.
THREE = Losses((LossTerm("mlm"), LossTerm("sop", 0.5), LossTerm("sop_accuracy", 0.0)), (4.0, 2.0, 0.75))
NOTHING = Losses(THREE.terms, (None, None, 0.75))


def config(**logging) -> Config:
    return Config(
        model=ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=8),
        batch=BatchConfig(micro_batch_size=1),
        optimizer=OptimizerConfig(lr=1e-3),
        logging=LoggingConfig(**logging),
    )


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class TestJsonl:
    def run(self, path, iterations, resume=0, **fields):
        monitor = JsonlMonitor(path, resume)
        for iteration in iterations:
            monitor.step(step(iteration, **fields))
        monitor.close()

    def test_one_object_per_iteration_in_full_precision(self, tmp_path):
        path = tmp_path / "new" / "m.jsonl"
        loss = math.pi * 1e-7
        self.run(path, [1, 2], lm_loss=loss, skipped=True, phase_seconds={"data": 0.1})
        first, second = records(path)
        assert (first["iteration"], second["iteration"]) == (1, 2)
        assert struct.pack("d", first["lm_loss"]) == struct.pack("d", loss)
        assert first["skipped"] is True
        assert first["phase_seconds"] == {"data": 0.1}
        assert set(first) >= {
            *("consumed_samples", "consumed_tokens", "grad_norm", "learning_rate", "loss_scale"),
            "tokens_per_second",
        }

    def test_a_line_is_in_the_file_at_once(self, tmp_path):
        monitor = JsonlMonitor(tmp_path / "m.jsonl")
        monitor.step(step(1))
        assert len(records(tmp_path / "m.jsonl")) == 1

    def test_non_finite_values_are_valid_json_that_float_reads(self, tmp_path):
        path = tmp_path / "m.jsonl"
        self.run(path, [1], lm_loss=math.nan, grad_norm=math.inf, params_norm=-math.inf)
        (record,) = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
        assert (record["lm_loss"], record["grad_norm"], record["params_norm"]) == (
            "NaN",
            "Infinity",
            "-Infinity",
        )
        assert float(record["grad_norm"]) == math.inf

    def test_resume_drops_what_will_be_repeated(self, tmp_path):
        path = tmp_path / "m.jsonl"
        self.run(path, range(1, 8))
        self.run(path, range(6, 10), resume=5)
        assert [r["iteration"] for r in records(path)] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
        assert sorted(p.name for p in tmp_path.iterdir()) == ["m.jsonl"]

    @pytest.mark.parametrize("cut", [1, 40, -1], ids=["brace", "half", "newline"])
    def test_resume_drops_a_line_cut_short_by_a_crash(self, tmp_path, cut):
        path = tmp_path / "m.jsonl"
        self.run(path, [1, 2])
        whole = path.read_bytes()
        last = whole.splitlines(keepends=True)[-1]
        path.write_bytes(whole[: -len(last)] + last[:cut])
        self.run(path, [2], resume=1)
        assert [r["iteration"] for r in records(path)] == [1, 2]

    def test_a_new_training_keeps_the_old_file_aside(self, tmp_path):
        path = tmp_path / "m.jsonl"
        for iterations in ([1, 2, 3], [1, 2], [1]):
            self.run(path, iterations)
        lengths = {p.name: len(records(p)) for p in tmp_path.iterdir()}
        assert lengths == {"m.jsonl": 1, "m.jsonl.1": 3, "m.jsonl.2": 2}

    @pytest.mark.parametrize("resume", [0, 5])
    @pytest.mark.parametrize("content", ['{"text": "corpus"}\n', "not json\n", "[1]\n", "short", "\xff\n"])
    def test_a_foreign_file_is_refused_unharmed(self, tmp_path, content, resume):
        path = tmp_path / "corpus.jsonl"
        path.write_bytes(content.encode("latin-1"))
        with pytest.raises(ConfigError, match=r"line 1 of .*corpus.jsonl"):
            JsonlMonitor(path, resume)
        assert path.read_bytes() == content.encode("latin-1")
        assert [p.name for p in tmp_path.iterdir()] == ["corpus.jsonl"]

    def test_a_path_that_cannot_be_written_is_refused(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match=r"`metrics_jsonl` must be a file that can be written"):
            JsonlMonitor(tmp_path / "file" / "m.jsonl")

    def test_evaluations_go_beside_and_rewind_alike(self, tmp_path):
        monitor = JsonlMonitor(tmp_path / "m.jsonl")
        monitor.step(step(1))
        for iteration in (10, 20):
            monitor.evaluation(evaluation(iteration, lm_loss=0.0))
        monitor.close()
        JsonlMonitor(tmp_path / "m.jsonl", 10).close()
        (record,) = records(tmp_path / "m.eval.jsonl")
        assert (record["iteration"], record["split"], record["perplexity"]) == (10, "validation", 1.0)
        assert len(records(tmp_path / "m.jsonl")) == 1

    def test_lines_carry_all_terms(self, tmp_path):
        monitor = JsonlMonitor(tmp_path / "m.jsonl")
        monitor.step(step(1, losses=THREE))
        monitor.step(step(2, losses=NOTHING, skipped=True))
        monitor.evaluation(evaluation(2, losses=THREE))
        monitor.close()
        keys = ("mlm_loss", "sop_loss", "sop_accuracy", "total_loss")
        lines = [*records(tmp_path / "m.jsonl"), *records(tmp_path / "m.eval.jsonl")]
        assert [[line[key] for key in keys] for line in lines] == [
            [4.0, 2.0, 0.75, 5.0],
            [None, None, 0.75, None],
            [4.0, 2.0, 0.75, 5.0],
        ]
        assert lines[2]["perplexity"] == math.exp(4.0)
        assert not any("lm_loss" in line for line in lines)

    @pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /dev/full")
    def test_a_full_disk_turns_it_off_with_one_warning(self, tmp_path):
        monitor = JsonlMonitor(tmp_path / "m.jsonl")
        monitor._steps = open("/dev/full", "a")  # noqa: SIM115
        warnings = []
        composite = CompositeMonitor([monitor], warnings.append)
        composite.step(step(1))
        composite.step(step(2))
        (warning,) = warnings
        assert "JsonlMonitor is off" in warning
        assert "No space left" in warning
        assert str(tmp_path / "m.jsonl") in warning


class TestComposite:
    class Recorder(Monitor):
        def __init__(self):
            self.seen = []

        def step(self, metrics):
            self.seen.append(metrics["iteration"])

        def message(self, text):
            self.seen.append(text)

    class Broken(Monitor):
        def step(self, metrics):
            raise OSError(errno.EPIPE, "Broken pipe", "/some/path")

    def test_everything_reaches_every_member(self):
        members = [self.Recorder(), self.Recorder()]
        composite = CompositeMonitor(members)
        composite.step(step(4))
        composite.message("hello")
        composite.evaluation(evaluation())
        composite.close()
        assert [m.seen for m in members] == [[4, "hello"]] * 2

    def test_a_failing_member_is_dropped_and_the_rest_go_on(self, capsys):
        recorder = self.Recorder()
        composite = CompositeMonitor([self.Broken(), recorder])
        composite.step(step(1))
        composite.step(step(2))
        assert recorder.seen == [1, 2]
        assert capsys.readouterr().err.count("warning: Broken is off from here on") == 1

    def test_a_bug_in_a_member_is_not_hidden(self):
        class Buggy(Monitor):
            def step(self, metrics):
                raise AttributeError("bug")

        with pytest.raises(AttributeError):
            CompositeMonitor([Buggy()]).step(step())


class TestConsole:
    def lines(self, metrics, log_interval=2, terminal=False, total=100):
        stream = io.StringIO()
        monitor = ConsoleMonitor(
            log_interval, total, console=Console(file=stream, force_terminal=terminal, width=60)
        )
        for each in metrics:
            monitor.step(each)
        monitor.close()
        return stream.getvalue()

    def test_a_line_per_interval_averages_over_it(self):
        out = self.lines(
            [
                step(1, lm_loss=4.0, seconds=0.1, tokens_per_second=1000.0),
                step(2, lm_loss=2.0, seconds=0.3, tokens_per_second=200.0, learning_rate=5e-5),
            ]
        )
        assert out.count("\n") == 1
        for part in (
            "iteration        2/     100 |",
            "lm loss: 3.000000E+00",
            "elapsed time per iteration (ms): 200.0",
            "tokens per second: 400.0",
            "learning rate: 5.000000E-05",
            "number of skipped iterations:   0",
        ):
            assert part in out

    def test_skipped_updates_stay_out_of_the_loss_and_name_the_parameter(self):
        bad = step(1, lm_loss=math.inf, grad_norm=math.inf, skipped=True, first_bad_parameter="head.weight")
        out = self.lines([bad, step(2, lm_loss=2.0)])
        assert "iteration 1: update skipped" in out
        assert "`head.weight`" in out
        assert "lm loss: 2.000000E+00" in out
        assert "number of skipped iterations:   1" in out

    def test_an_interval_of_skipped_updates_alone_has_no_loss(self):
        out = self.lines([step(i, skipped=True) for i in (1, 2)])
        assert "number of skipped iterations:   2" in out
        assert "lm loss" not in out

    def test_every_term_has_its_mean_over_the_updates_in_which_it_counted(self):
        second = Losses(THREE.terms, (2.0, None, 0.25))
        out = self.lines([step(1, losses=THREE), step(2, losses=second)])
        assert (
            "| mlm loss: 3.000000E+00 | sop loss: 2.000000E+00 | sop_accuracy: 5.000000E-01 | "
            "total loss: 3.500000E+00 | loss scale"
        ) in out
        assert "number of nan iterations:   0" in out

    def test_a_batch_in_which_nothing_counts_says_so(self):
        out = self.lines([step(1, losses=THREE), step(2, losses=NOTHING, skipped=True)], terminal=True)
        assert "iteration 2: update skipped, nothing in the global batch counts" in out
        assert "inf or NaN" not in out
        assert "loss none" in out
        assert "number of skipped iterations:   1" in out

    def test_nan_losses_are_counted(self):
        assert "number of nan iterations:   1" in self.lines([step(1, lm_loss=math.nan), step(2)])

    def test_the_unfinished_interval_is_shown_at_the_end(self):
        assert "iteration        3/" in self.lines([step(1), step(2), step(3)])
        stream = io.StringIO()
        monitor = ConsoleMonitor(2, 9, console=Console(file=stream, width=60))
        monitor.step(step(1))
        monitor.trained()  # by a signal, before the end
        monitor.message("stopping after iteration 1")
        monitor.close()
        assert [line.split()[-2] for line in stream.getvalue().splitlines()] == ["0", "iteration"]

    def test_optional_values_appear_when_given(self):
        out = self.lines([step(1, num_zeros=12, params_norm=3.25)], log_interval=1, total=None)
        assert "num zeros: 12 |" in out
        assert "params norm: 3.250 |" in out
        assert "iteration        1/       ?" in out

    def test_plain_output_has_no_control_codes(self):
        assert "\x1b" not in self.lines([step(1), step(2)])

    def test_a_terminal_gets_a_progress_bar(self):
        out = self.lines([step(i) for i in range(1, 51)], terminal=True)
        assert " 50/100" in out
        assert "loss 4.0000" in out
        assert "iteration        2/     100" in out

    def test_evaluations_and_messages(self):
        stream = io.StringIO()
        monitor = ConsoleMonitor(1, console=Console(file=stream, width=40))
        monitor.evaluation(evaluation(10, lm_loss=0.0))
        monitor.message("saved [checkpoint] to /x")
        rule, line, rule_again, message = stream.getvalue().splitlines()
        assert rule == rule_again == "-" * len(line)
        assert (
            "validation loss at iteration 10 | lm loss value: 0.000000E+00 | lm loss PPL: 1.000000E+00"
            in line
        )
        assert message == "saved [checkpoint] to /x"

    def test_evaluations_of_several_terms(self):
        stream = io.StringIO()
        monitor = ConsoleMonitor(1, console=Console(file=stream, width=40))
        monitor.evaluation(evaluation(10, losses=THREE))
        monitor.evaluation(evaluation(20, losses=NOTHING))
        _, first, _, _, second, _ = stream.getvalue().splitlines()
        assert first == (
            " validation loss at iteration 10 | mlm loss value: 4.000000E+00 | mlm loss PPL: 5.459815E+01 | "
            "sop loss value: 2.000000E+00 | sop_accuracy value: 7.500000E-01 | "
            "total loss value: 5.000000E+00 | seconds: 1.0 |"
        )
        assert "| mlm loss value: none, nothing counts | mlm loss PPL: none, nothing counts |" in second


def scalars(folder):
    """Tag -> [(step, value)] of all events in a folder."""
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = loader.EventAccumulator(str(folder), size_guidance={loader.SCALARS: 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


class TestTensorBoard:
    def test_megatron_tags_at_the_interval(self, tmp_path):
        monitor = TensorBoardMonitor(LoggingConfig(tensorboard_dir=str(tmp_path), tensorboard_log_interval=2))
        for iteration in range(1, 5):
            monitor.step(step(iteration, lm_loss=float(iteration), phase_seconds={"optimizer": 0.5}))
        monitor.step(step(6, skipped=True, num_zeros=3))
        monitor.evaluation(evaluation(4, lm_loss=0.5))
        monitor.close()
        found = scalars(tmp_path)
        assert found["lm loss"] == [(2, 2.0), (4, 4.0)]
        assert found["lm loss vs samples"] == [(16, 2.0), (32, 4.0)]
        assert found["grad-norm"] == [(2, 1.5), (4, 1.5), (6, 1.5)]
        assert found["lm loss validation"] == [(4, 0.5)]
        assert found["lm loss validation vs samples"] == [(32, 0.5)]
        assert found["num-zeros"] == [(6, 3.0)]
        assert {"learning-rate", "loss-scale", "batch-size", "learning-rate vs samples"} <= set(found)
        assert not {"optimizer-time", "lm loss validation ppl"} & set(found)

    def test_every_term_that_counted(self, tmp_path):
        monitor = TensorBoardMonitor(LoggingConfig(tensorboard_dir=str(tmp_path)))
        monitor.step(step(1, losses=THREE))
        monitor.step(step(2, losses=Losses(THREE.terms, (2.0, None, None))))
        monitor.evaluation(evaluation(2, losses=NOTHING))
        monitor.close()
        found = scalars(tmp_path)
        assert found["mlm loss"] == [(1, 4.0), (2, 2.0)]
        assert found["sop loss"] == [(1, 2.0)]
        assert found["sop_accuracy vs samples"] == [(8, 0.75)]
        assert found["total loss"] == [(1, 5.0), (2, 2.0)]
        assert found["sop_accuracy validation"] == [(2, 0.75)]
        assert "mlm loss validation" not in found

    def test_perplexity_and_timers_on_request(self, tmp_path):
        monitor = TensorBoardMonitor(
            LoggingConfig(
                tensorboard_dir=str(tmp_path),
                log_validation_ppl_to_tensorboard=True,
                log_timers_to_tensorboard=True,
            )
        )
        monitor.step(step(1, phase_seconds={"optimizer": 0.5}))
        monitor.evaluation(evaluation(1, lm_loss=0.0))
        monitor.close()
        found = scalars(tmp_path)
        assert found["optimizer-time"] == [(1, 0.5)]
        assert found["lm loss validation ppl"] == [(1, 1.0)]

    def test_an_unwritable_folder_is_refused(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match="`tensorboard_dir` must be a folder that can be written"):
            TensorBoardMonitor(LoggingConfig(tensorboard_dir=str(tmp_path / "file" / "events")))

    def test_a_missing_package_says_what_to_install(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
        with pytest.raises(ConfigError, match="pip install tensorboard"):
            TensorBoardMonitor(LoggingConfig(tensorboard_dir=str(tmp_path)))

    def test_a_full_disk_is_reported_with_the_folder(self, tmp_path, monkeypatch):
        monitor = TensorBoardMonitor(LoggingConfig(tensorboard_dir=str(tmp_path)))

        def full(*args):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(monitor._scalars.writer, "add_scalar", full)
        with pytest.raises(OSError, match=f"No space left.*{tmp_path}"):
            monitor.step(step(1))
        monitor.close()  # or its thread stays, beside which no later test can fork


def test_csv_has_a_file_per_term(tmp_path):
    monitor = CsvMonitor(tmp_path)
    monitor.step(step(3, losses=THREE))
    monitor.evaluation(evaluation(3, losses=THREE))
    found = {path.name: path.read_text().splitlines() for path in tmp_path.glob("*.csv")}
    assert found["mlm_loss.csv"] == ["iteration,mlm loss", "3,4.0"]
    assert found["total_loss.csv"] == ["iteration,total loss", "3,5.0"]
    assert found["sop_accuracy.csv"] == ["iteration,sop_accuracy", "3,0.75"]
    assert found["sop_loss_validation.csv"] == ["iteration,sop loss validation", "3,2.0"]


class FakeWandb(types.ModuleType):
    """What the monitor uses of the wandb package."""

    class Error(Exception):
        pass

    def __init__(self, refuse=False):
        super().__init__("wandb")
        self.refuse, self.logged, self.finished = refuse, [], False

    def init(self, **fields):
        if self.refuse:
            raise self.Error("no API key")
        self.fields = fields
        return self

    def define_metric(self, name, step_metric=None):
        self.axis = step_metric

    def log(self, values):
        if math.isnan(values.get("lm loss", 0.0)):
            raise self.Error("gone")
        self.logged.append((values[self.axis], values))

    def finish(self):
        self.finished = True


class TestWandb:
    def test_logs_to_the_named_project(self, monkeypatch):
        fake = FakeWandb()
        monkeypatch.setitem(sys.modules, "wandb", fake)
        monitor = WandbMonitor(config(wandb_project="p", wandb_exp_name="n", wandb_save_dir="d"))
        monitor.step(step(3))
        monitor.evaluation(evaluation(3, lm_loss=0.0))
        monitor.close()
        assert (fake.fields["project"], fake.fields["name"], fake.fields["dir"]) == ("p", "n", "d")
        assert fake.fields["config"]["model"]["hidden_size"] == 8
        assert fake.logged[0][0] == 3
        assert fake.logged[0][1]["lm loss"] == 4.0
        validation = {"lm loss validation": 0.0, "lm loss validation ppl": 1.0}
        assert fake.logged[1] == (3, {**validation, "iteration": 3})
        assert fake.finished

    def test_its_errors_only_turn_it_off(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "wandb", FakeWandb())
        warnings = []
        composite = CompositeMonitor([WandbMonitor(config(wandb_project="p"))], warnings.append)
        composite.step(step(1, lm_loss=math.nan))
        assert warnings == ["warning: WandbMonitor is off from here on: wandb cannot log: gone"]

    def test_a_refused_run_is_a_config_error(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "wandb", FakeWandb(refuse=True))
        with pytest.raises(ConfigError, match="no API key"):
            WandbMonitor(config(wandb_project="p"))

    def test_a_missing_package_says_what_to_install(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "wandb", None)
        with pytest.raises(ConfigError, match="pip install wandb"):
            WandbMonitor(config(wandb_project="p"))


class TestBuild:
    def kinds(self, is_writer_rank=True, **logging):
        composite = build_monitors(config(**logging), is_writer_rank, BEGINNING, Progress(10, 80, 5120))
        composite.close()
        return [type(member).__name__ for member in composite.members]

    def test_the_console_is_always_there(self):
        assert self.kinds() == ["ConsoleMonitor"]

    def test_each_destination_adds_a_monitor(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "wandb", FakeWandb())
        assert self.kinds(
            metrics_jsonl=str(tmp_path / "m.jsonl"), tensorboard_dir=str(tmp_path / "tb"), wandb_project="p"
        ) == ["ConsoleMonitor", "JsonlMonitor", "TensorBoardMonitor", "WandbMonitor"]

    def test_other_ranks_write_nothing(self, tmp_path):
        assert self.kinds(is_writer_rank=False, metrics_jsonl=str(tmp_path / "m.jsonl")) == []
        assert list(tmp_path.iterdir()) == []


def column(path, key):
    """Iteration -> value in a file of JSON lines."""
    return [(record["iteration"], record[key]) for record in records(path)]


class TestGoingBack:
    """However often a training repeats steps, a reader of any destination sees each of them once."""

    def train(self, folder, resumed, iterations, back_to=None, again=()):
        """Steps with losses 1.0, 2.0, ..., some again as 101.0, ...; an evaluation every second."""
        logging = {"metrics_jsonl": str(folder / "m.jsonl"), "csv_dir": str(folder / "csv")}
        asked = config(tensorboard_dir=str(folder / "tb"), wandb_project="p", **logging)
        monitors = build_monitors(
            asked, True, Progress(resumed, 8 * resumed, 512 * resumed), Progress(10, 80, 5120)
        )
        for shift, numbers in ((0, iterations), (100, again)):
            if shift and back_to is not None:
                monitors.rewound(Progress(back_to, 8 * back_to, 512 * back_to))
            for i in numbers:
                monitors.step(step(i, lm_loss=float(shift + i)))
                if i % 2 == 0:
                    monitors.evaluation(evaluation(i, lm_loss=float(shift + i)))
        monitors.close()

    def seen(self, folder):
        """What readers of each format see of all losses; TensorBoard's by samples, too."""
        events = scalars(folder / "tb")
        files = (folder / "csv" / f"{name}.csv" for name in ("lm_loss", "lm_loss_validation"))
        rows = [[line.split(",") for line in path.read_text().splitlines()[1:]] for path in files]
        over_samples = [events[f"{tag} vs samples"] for tag in ("lm loss", "lm loss validation")]
        return [
            [column(folder / name, "lm_loss") for name in ("m.jsonl", "m.eval.jsonl")],
            [[(int(at), float(value)) for at, value in file] for file in rows],
            [events["lm loss"], events["lm loss validation"]],
            [[(at // 8, value) for at, value in points] for points in over_samples],
        ]

    def test_each_step_is_seen_once_after_a_rollback_and_a_resume(self, tmp_path, monkeypatch):
        fake = FakeWandb()
        monkeypatch.setitem(sys.modules, "wandb", fake)
        self.train(tmp_path, 0, range(1, 8), back_to=3, again=range(4, 6))
        steps = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 104.0), (5, 105.0)]
        assert self.seen(tmp_path) == [[steps, [(2, 2.0), (4, 104.0)]]] * 4
        losses = [(at, values["lm loss"]) for at, values in fake.logged if "lm loss" in values]
        assert losses[-2:] == steps[-2:], "what came after the rollback is not lost"
        assert fake.fields["resume"] == "never", "it is in a run of its own, which has no other value for it"
        self.train(tmp_path, 2, range(3, 5))
        assert self.seen(tmp_path) == [[[(i, float(i)) for i in range(1, 5)], [(2, 2.0), (4, 4.0)]]] * 4

    def test_a_new_training_keeps_the_records_of_an_earlier_one_apart(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "wandb", FakeWandb())
        (tmp_path / "csv").mkdir()
        (tmp_path / "csv" / "other.csv").write_bytes(b"name\xff\n")
        for last in (4, 3, 2):
            self.train(tmp_path, 0, range(1, last + 1))
        assert self.seen(tmp_path) == [[[(1, 1.0), (2, 2.0)], [(2, 2.0)]]] * 4
        assert [len(scalars(tmp_path / "tb" / f"earlier-{i}")["lm loss"]) for i in (1, 2)] == [4, 3]
        kept = [tmp_path / "csv" / f"earlier-{i}" / "lm_loss.csv" for i in (1, 2)]
        assert [path.read_text().count("\n") for path in kept] == [5, 4]
        assert (tmp_path / "csv" / "other.csv").read_bytes() == b"name\xff\n"

    def test_the_console_leaves_out_of_its_means_what_was_undone(self):
        stream = io.StringIO()
        monitor = ConsoleMonitor(4, console=Console(file=stream, width=60))
        for i in (1, 2, 3):
            monitor.step(step(i, lm_loss=float(i)))
        monitor.rewound(Progress(1, 8, 512))
        for i in (2, 3, 4):
            monitor.step(step(i, lm_loss=9.0))
        assert "lm loss: 7.000000E+00" in stream.getvalue()

    def test_a_file_of_something_else_among_the_events_is_named(self, tmp_path):
        (tmp_path / "tfevents").write_bytes(struct.pack("<QI", 4, 0) + b"\xff" * 8)
        with pytest.raises(ConfigError, match="tensorboard_dir.*no file of TensorBoard's events"):
            TensorBoardMonitor(LoggingConfig(tensorboard_dir=str(tmp_path)))
