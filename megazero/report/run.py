"""One run as the page shows it: its series reduced to what a chart can show, and what else its folder has."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from megazero.errors import DataError
from megazero.regular_file import read_regular, why_unreadable
from megazero.report.columns import Columns, Lines
from megazero.report.run_folder import SAMPLES, beside, find_metrics, run_name

Json = dict[str, Any]
BINS = 1000
"""Bins of a reduced series, each with its lowest, highest and mean value: 2,000 points, and a line."""
_CELLS = 60_000  # of experts' shares that a page keeps
_AXES = MappingProxyType({"iteration": "steps", "consumed_tokens": "tokens"})
# Of a step that was passed over these are not known.
_OF_WORK = ("seconds", "tokens_per_second", "tflops", "matmul_share", "grad_norm")
_FACTS = ("config", "end", "hosts", "layout", "settings", "versions")  # of a start, each an object
_MEANWHILE = 120.0  # seconds without a step after which a run that says nothing no longer runs
_TREND = 50  # bins that a forecast of the loss needs


@dataclass
class Source:
    """The files that a run's page comes from.

    Attributes:
        name: the run's name.
        lines: its metrics.
        plan: a plan to set beside what was measured.
    """

    name: str
    lines: Lines
    plan: Path | None = None

    @classmethod
    def of(cls, run: Path, plan: Path | None = None) -> Source:
        """The source of a run's folder or of its file of metrics.

        Raises:
            DataError: there are no metrics.
        """
        metrics = find_metrics(run) if run.is_dir() else run
        if metrics is None:
            raise DataError(
                f"`RUN` must be a folder with a run's metrics, but {run} has none; name the file that "
                "`--metrics-jsonl` wrote"
            )
        return cls(run_name(run), Lines(metrics), plan)

    def read(self, bins: int = BINS) -> Json:
        """Read what is new; return the run as JSON.

        Raises:
            DataError: the metrics cannot be read, or no line of them has an iteration.
        """
        self.lines.update()
        columns, path = self.lines.columns, self.lines.path
        if not columns and self.lines.refused:
            raise DataError(f"`RUN` must be a file of metrics, but {self.lines.refused[0]}; check the path")
        damage = self.lines.damage
        events = _objects(beside(path, "run"), damage)
        starts = [event for event in events if event.get("event") == "start"]
        if not all(isinstance(start.get(name), dict) for start in starts for name in _FACTS):
            damage.append(f"{beside(path, 'run')} has a start whose facts are not understood; it is left out")
            events = starts = []
        config = starts[-1]["config"] if starts else {}
        saved = (config.get("checkpoint") or {}).get("save")
        folder = Path(saved) if saved and Path(saved).is_dir() else path.parent
        files = [*sorted((folder / "incidents").glob("*.json")), self.plan or folder / "plan.json"]
        objects = [facts for file in files for facts in _objects(file, damage)]
        plan = next((facts for facts in objects if "seconds_per_step" in facts), None)
        if plan is None and self.plan is not None:
            raise DataError(
                f"`--plan` must be what `megazero plan --output` wrote, but {self.plan} is not; name it"
            )
        steps, measured = _steps(columns, bins), self.lines.rows_with("memory")
        return {
            "name": self.name,
            "path": str(path),
            "folder": str(folder),
            "damage": damage,
            "state": _state(columns, events, path),
            "starts": [{key: value for key, value in start.items() if key != "config"} for start in starts],
            "marks": [event for event in events if event.get("event") == "rewound"],
            "log": [event for event in events if event.get("event") in ("message", "end")][-60:],
            "config": {
                f"{section}.{key}": value
                for section, part in config.items()
                if isinstance(part, dict)
                for key, value in part.items()
            },
            "evaluations": _objects(beside(path, "eval"), damage),
            "samples": _objects(folder / SAMPLES, damage)[-50:],
            "incidents": [facts for facts in objects if "kind" in facts],
            "plan": plan,
            "steps": steps,
            "experts": _experts(self.lines, damage),
            "memory": self.lines.array("memory", measured[-1]) if measured else [],
            "forecast": _forecast(steps, _planned(starts[-1]) if starts else None),
        }


def _objects(path: Path, damage: list[str]) -> list[Json]:
    """The objects of a file of JSON lines, or of JSON; `damage` receives what is wrong with it."""
    try:
        content = read_regular(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        damage.append(f"{path} is left out: {why_unreadable(error)}")
        return []
    texts = {str(path): content}
    if path.suffix == ".jsonl":
        texts = {f"{path}, line {i}": line for i, line in enumerate(content.split(b"\n"), 1)}
    objects: list[Json] = []
    for where, text in texts.items():
        if not text.strip():
            continue
        try:
            value = json.loads(text, parse_constant=lambda word: None)
            if not isinstance(value, dict):
                raise ValueError("it is no object")
            objects.append(value)
        except (ValueError, RecursionError) as error:
            damage.append(f"{where} is left out: {error}")
    return objects


def reduced(column: np.ndarray[Any, Any], starts: np.ndarray[Any, Any]) -> Json:
    """The mean, lowest and highest finite value of the bins that begin at these rows; None where none is."""
    finite = np.isfinite(column)
    known = np.where(finite, column, np.nan)
    with np.errstate(invalid="ignore"):
        counts = np.add.reduceat(finite, starts, dtype=np.int64)
        mean = np.add.reduceat(np.where(finite, column, 0.0), starts) / counts
        low, high = np.fmin.reduceat(known, starts), np.fmax.reduceat(known, starts)
    return {"mean": _numbers(mean), "low": _numbers(low), "high": _numbers(high)}


def _numbers(values: np.ndarray[Any, Any]) -> list[float | None]:
    listed: list[float | None] = values.tolist()
    for place in np.flatnonzero(~np.isfinite(values)).tolist():
        listed[place] = None
    return listed


def _steps(columns: Columns, bins: int) -> Json:
    """The series over steps, tokens and hours of training; reduced if there are more steps than points."""
    count = len(columns.get("iteration", ()))
    if not count:
        return {"count": 0, "x": {}, "series": {}, "skipped": []}
    starts = np.linspace(0, count, bins, endpoint=False).astype(int) if count > 2 * bins else None
    last = np.arange(count) if starts is None else np.append(starts[1:], count) - 1
    x = {short: _numbers(columns[name][last]) for name, short in _AXES.items() if name in columns}
    seconds = np.nan_to_num(columns.get("seconds", np.zeros(count)))
    x["hours"] = _numbers(np.cumsum(seconds)[last] / 3600)
    series: Json = {}
    worked = np.isfinite(columns.get("phase_seconds.forward-backward", np.zeros(count)))
    for name, column in columns.items():
        if name in _OF_WORK:
            column = np.where(worked, column, np.nan)
        if name.startswith("@") or name in (*_AXES, "consumed_samples", "skipped"):
            continue
        series[name] = {"mean": _numbers(column)} if starts is None else reduced(column, starts)
    skipped = columns["iteration"][columns.get("skipped", np.zeros(count)) == 1.0]
    return {"count": count, "x": x, "series": series, "skipped": skipped[-500:].tolist()}


def _state(columns: Columns, events: list[Json], path: Path) -> Json:
    """Tell what a run does, and since when, with the time to its end at the pace of its latest steps."""
    began = max((i for i, event in enumerate(events) if event.get("event") == "start"), default=0)
    start = events[began] if events else {}
    at = int(columns["iteration"][-1]) if columns else 0
    for event in events[began:]:
        if event.get("event") == "end":
            when = _moment(event.get("time"))
            return {"word": event.get("state"), "when": when, "why": event.get("reason"), "at": at}
    seconds = columns.get("seconds", np.zeros(0))[-100:]
    pace = float(np.median(seconds)) if seconds.size else 0.0
    changed = max(path.stat().st_mtime, (_moment(events[-1].get("time")) if events else None) or 0.0)
    alive = time.time() - changed < max(_MEANWHILE, 20 * pace)
    state: Json = {"word": "running" if alive else "silent" if start else "idle", "when": changed, "at": at}
    total = _planned(start)
    if alive and total and pace:
        state["eta"] = pace * max(0, total - at)
    return state


def _moment(text: object) -> float | None:
    try:
        return datetime.fromisoformat(str(text).replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None


def _experts(lines: Lines, damage: list[str]) -> Json | None:
    """Each expert's share of tokens, as a multiple of an even one, in some of the records with the last."""
    rows = lines.rows_with("tokens_per_expert")
    if not rows:
        return None
    try:
        layers = lines.array("tokens_per_expert", rows[-1])
        cells = sum(len(layer["tokens"]) for layer in layers)
        kept = min(len(rows), 120, max(2, _CELLS // max(1, cells)))
        chosen = [rows[i] for i in np.linspace(0, len(rows) - 1, kept).astype(int)]
        loads = [lines.array("tokens_per_expert", row) for row in chosen]
        shares = [[_shares(layer["tokens"]) for layer in load] for load in loads]
    except (KeyError, TypeError) as error:
        damage.append(f"{lines.path}: `tokens_per_expert` is not understood: {error!r}")
        return None
    steps = lines.columns["iteration"][chosen].tolist()
    return {"steps": steps, "layers": [layer["layer"] for layer in layers], "shares": shares}


def _shares(tokens: list[int]) -> list[float]:
    return [round(count * len(tokens) / max(1, sum(tokens)), 3) for count in tokens]


def _planned(start: Json) -> int | None:
    """The iteration at which a start meant to end."""
    end = (start.get("end") or {}).get("iteration")
    return end if isinstance(end, int) else None


def _forecast(steps: Json, end: int | None) -> Json | None:
    """The loss at the end if it goes on as over the latest half: a line over the logarithm of the steps."""
    name = next((n for n in ("total_loss", "lm_loss", "loss") if n in steps["series"]), None)
    if name is None or end is None or steps["x"]["steps"][-1] >= end:
        return None
    pairs = np.array([steps["x"]["steps"], steps["series"][name]["mean"]], dtype=float).T
    known = pairs[np.isfinite(pairs).all(axis=1)]
    known = known[len(known) // 2 :]
    if len(known) < _TREND:
        return None
    at = np.log(known[:, 0])
    slope, level = np.polyfit(at, known[:, 1], 1)
    spread = float(np.std(known[:, 1] - (slope * at + level)))
    value = float(slope * np.log(end) + level)
    return {"name": name, "value": value, "spread": spread, "step": end}
