"""Memory over a step: what is alive, by kind, adds up; a peak has a time and a name."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from megazero.account.profilers.memory_timeline import OutputTimeline, kind_of_frame, timeline_of_history
from megazero.account.profilers.timeline import MemoryHistory
from megazero.errors import ConfigError
from megazero.pictures.style import DARK, styled
from tests.account.profilers.runs import train
from tests.tables import over_table

PACKAGE = Path(kind_of_frame.__code__.co_filename).parents[2]


def test_storages_come_and_go() -> None:
    timeline = MemoryHistory()
    with OutputTimeline(timeline, {"weights": 1000}, lambda: 0) as outputs:
        a = torch.ones(25)
        b = a + 1
        del a
        c = b.view(5, 5)  # no storage of its own
        del b, c
    outputs.ends = True
    totals = [sum(held.values()) for held in timeline.alive]
    assert totals == [1100, 1200, 1100, 1000]
    assert timeline.peak() == 1
    assert timeline.times == sorted(timeline.times)


def made_by(file: str) -> str:
    """The kind of what a function of this file makes."""
    names: dict = {"kind": kind_of_frame, "sys": __import__("sys")}
    exec(compile("def make():\n    return kind(sys._getframe(0))", str(PACKAGE / file), "exec"), names)
    return names["make"]()


@over_table(
    ("file", "kind"),
    [
        ("zero/reduce.py", "buffers"),
        ("optim/elementwise.py", "buffers"),
        ("layers/linear.py", "activations"),
        ("pipeline/executor.py", "activations"),
        ("account/profilers/group.py", "activations"),  # whoever calls it: no part of the package here
    ],
)
def test_the_room_that_makes_memory_decides_its_kind(file: str, kind: str) -> None:
    assert made_by(file) == kind


def read(path: Path) -> list[dict]:
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


@pytest.mark.parametrize(
    ("axes", "flags"),
    [({}, ""), ({"pp": 2}, ""), ({"dp": 2}, "--zero-stage 3 --zero-param-persistence-threshold 0")],
)
def test_the_peak_is_that_of_the_memory_report(tmp_path, capsys, axes: dict[str, int], flags: str) -> None:
    """Two measurements of equal steps: the first one's by `MemoryMeter`, the third one's here."""
    metrics = tmp_path / "metrics.jsonl"
    train(f"--memory-timeline-step 3 --metrics-jsonl {metrics} {flags}", tmp_path, **axes)
    measured = json.loads(metrics.read_text().splitlines()[0])["memory"][0]["device"]
    events = read(tmp_path / "memory_step3_rank0.json.gz")
    counters = [event["args"] for event in events if event["ph"] == "C"]
    for kind in ("weights", "moments", "gradients"):
        assert {counter[kind] for counter in counters} == {measured[kind]}
    most = max(sum(counter.values()) for counter in counters)
    # The report adds the most gathered weights to the most of the rest, whenever each was.
    assert 0.8 * sum(measured.values()) < most <= 1.01 * sum(measured.values())
    if "dp" not in axes:
        assert most == pytest.approx(sum(measured.values()), rel=0.02)
    actions = [event["name"] for event in events if event["ph"] == "X"]
    assert actions[:1] == ["forward of micro-batch 0"]
    assert actions[-1] == "update"
    assert len(actions) == 9  # four micro-batches there and back
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("memory: ")]
    assert f"memory: at most {most / 2**20:.1f} MiB in iteration 3, " in line
    assert "of micro-batch " in line
    assert (tmp_path / "memory_step3_rank0.svg").read_bytes()[:5] == b"<?xml"
    assert not (tmp_path / "memory_step3_rank1.svg").exists()


def entry(action: str, time_us: int, addr: int, size: int, *files: str) -> dict:
    """An entry of a CUDA allocator's history, as torch documents it; the innermost frame is the first."""
    frames = [{"filename": file, "line": 1, "name": "f"} for file in files]
    return {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": time_us, "frames": frames}


def test_the_history_of_cudas_allocator() -> None:
    layer, reducer = str(PACKAGE / "layers/linear.py"), str(PACKAGE / "zero/reduce.py")
    entries = [
        entry("segment_alloc", 1_000_000, 0, 2 << 20),
        entry("alloc", 1_000_100, 64, 512, "/usr/lib/torch/nn.py", layer),
        entry("alloc", 1_000_200, 640, 1024, reducer),
        entry("free_requested", 1_000_300, 64, 512),
        entry("free_completed", 1_000_400, 64, 512),
        entry("free_completed", 1_000_500, 9999, 100),  # made before the step
    ]
    timeline = timeline_of_history(entries, {"weights": 4000}, 4300)
    assert timeline.times == pytest.approx([0.0, 0.0001, 0.0002, 0.0004, 0.0005])
    assert timeline.alive[2] == {"weights": 4000, "other": 300, "activations": 512, "buffers": 1024}
    assert timeline.alive[-1] == {"weights": 4000, "other": 200, "activations": 0, "buffers": 1024}
    assert timeline.peak() == 2
    assert timeline.kinds == ["weights", "buffers", "activations", "other"]


def test_the_picture_has_a_layer_for_each_kind_and_names_the_peak() -> None:
    pytest.importorskip("matplotlib")
    from megazero.account.profilers.memory_picture import timeline_figure
    from tests.pictures.checks import complaints

    timeline = MemoryHistory(
        actions=[(0.0, 0.5, "forward of micro-batch 0"), (0.5, 1.0, "backward of micro-batch 0")]
    )
    for at in range(4000):
        held = {"weights": 1 << 20, "activations": (2000 - abs(2000 - at)) << 10, "buffers": 0}
        timeline.add(at / 4000, held)
    with styled(DARK):
        figure = timeline_figure(timeline, "memory of rank 0", "2 ranks: P2", DARK)
        assert complaints(figure, DARK) == []
    panel, below = figure.axes
    assert [layer.get_label() for layer in panel.collections[:-1]] == ["weights", "activations"]
    assert panel.get_title(loc="right") == "▼ 3.0 MiB at 0.5 s, backward of micro-batch 0"
    assert panel.collections[-1].get_offsets().tolist() == [[0.5, pytest.approx(1.04 * 2.953, rel=1e-3)]]
    assert panel.get_ylim()[1] > 1.04 * 2.953  # the peak is not cut off
    assert len(below.collections) == 2
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["weights", "activations", "forward", "backward", "update"]


def test_without_matplotlib_it_is_refused_before_the_training(tmp_path, monkeypatch) -> None:
    def absent() -> None:
        raise ConfigError("matplotlib must be installed to draw a picture, but is not")

    monkeypatch.setattr("megazero.account.profilers.memory_timeline.styled", absent)
    with pytest.raises(ConfigError, match="matplotlib"):
        train("--memory-timeline-step 3", tmp_path)


def test_a_history_is_kept_on_cuda_alone(tmp_path) -> None:
    with pytest.raises(ConfigError, match="`record_memory_history` must be off on a CPU"):
        train("--record-memory-history", tmp_path)
