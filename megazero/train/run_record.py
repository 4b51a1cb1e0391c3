"""The record that a run keeps of itself for `megazero report`: its starts, messages and its end."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import shlex
import socket
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from megazero.checkpoint.remote.mirror import local_path
from megazero.config.fields import FIELDS
from megazero.config.rules.rule import value_at
from megazero.config.steps import Progress
from megazero.errors import ConfigError
from megazero.layers.inputs import NOTHING_SKIPPED
from megazero.mpu.grid import AXES
from megazero.mpu.group import Group
from megazero.mpu.messages import fold_values
from megazero.report.run_folder import METRICS, beside
from megazero.train.observe.host import nominal_matmul_rate
from megazero.train.observe.meters import Meters
from megazero.train.observe.metrics import StepMetrics
from megazero.train.observe.monitors.base import Monitor
from megazero.train.observe.monitors.jsonl import JsonlMonitor, to_json
from megazero.train.resume.snapshot import git_revision
from megazero.version import VERSION

_SECRET = re.compile(r"secret|passw|api_?key|credential|webhook|(^|_)(access_|auth_)?token$", re.I)
_URL = re.compile(r"\b([a-z][a-z0-9+.-]*://)(?:[^/@\s]*@)?([^/\s?#]+)[^\s\"]*", re.I)
HIDDEN = "(not recorded)"


class RunRecord(Monitor):
    """Appends a record of this start to `X.run.jsonl`, then one of each message, rewind and of the end.

    Args:
        path: the file.
        start: the facts of the start.
        progress: where it starts.
        end: the iteration at which the training is finished.
    """

    def __init__(self, path: Path, start: Mapping[str, object], progress: Progress, end: int):
        self._at, self._end = progress.iteration, end
        self._file = path.open("a", encoding="utf-8")  # kept open: another job may take the folder
        self._append("start", iteration=self._at, **start)

    def step(self, metrics: StepMetrics) -> None:
        self._at = metrics["iteration"]

    def message(self, text: str) -> None:
        self._append("message", iteration=self._at, text=text)

    def rewound(self, progress: Progress) -> None:
        self._append("rewound", iteration=progress.iteration, before=self._at)
        self._at = progress.iteration

    def close(self) -> None:
        error = sys.exc_info()[1]  # a run is closed while its error is on its way
        state = "failed" if error is not None else "finished" if self._at >= self._end else "stopped"
        reason = None if error is None else f"{type(error).__name__}: {error}"
        self._append("end", iteration=self._at, state=state, reason=reason)
        self._file.close()

    def _append(self, event: str, **facts: object) -> None:
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        line = json.dumps(to_json({"event": event, "time": moment, **facts}), allow_nan=False)
        self._file.write(f"{line}\n")
        self._file.flush()


def begin_record(meters: Meters, world: Group, progress: Progress) -> list[Monitor]:
    """Make the monitors that keep a run in its folder; every rank calls this, and the first one has them.

    Metrics go to `metrics.jsonl` in the run's folder if `--metrics-jsonl` does not name a file.
    """
    config, context = meters.config, meters.engine.context
    given, folder = config.logging.metrics_jsonl, config.checkpoint.save
    if given is None and (folder is None or config.training.skip_train):
        return []
    own: list[Any] = [[socket.gethostname()], _parameters(meters)]
    whole = fold_values(world, own, lambda a, b: [a[0] + b[0], a[1] + b[1]], context.device)
    if context.rank != 0:
        return []
    path = Path(given) if given is not None else local_path(folder or "") / METRICS
    facts = {"hosts": Counter(whole[0]), "parameters": whole[1], **_start_facts(meters)}
    try:
        members: list[Monitor] = [] if given is not None else [_kept(path, progress.iteration)]
        return [*members, RunRecord(beside(path, "run"), facts, progress, meters.plan.end.iteration)]
    except (OSError, ConfigError) as error:
        print(f"warning: the run goes on without a record of itself: {error}", file=sys.stderr)
        return []


def _kept(path: Path, iteration: int) -> JsonlMonitor:
    """The monitor of a run's own metrics; a damaged file is set aside, as it must not end a resume."""
    try:
        return JsonlMonitor(path, iteration)
    except ConfigError as error:
        aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
        os.replace(path, aside)
        print(f"warning: metrics begin anew, {aside} has the earlier ones: {error}", file=sys.stderr)
        return JsonlMonitor(path, iteration)


def _parameters(meters: Meters) -> int:
    """This rank's part of the number of parameters: each element counts on one rank, tied ones once."""
    context = meters.engine.context
    buckets = meters.engine.optimizer.store.buckets
    specs = {spec.name: spec for bucket in buckets for spec in bucket.layout.specs}
    return sum(
        math.prod(spec.present(context.place))
        for spec in specs.values()
        if spec.counts_on(context.place) and context.groups[spec.replicas].rank == 0
    )


def _start_facts(meters: Meters) -> dict[str, object]:
    config, context, end = meters.config, meters.engine.context, meters.plan.end
    device = _device_name(context.device)
    tree = {
        section: {name: _shown(name, value) for name, value in fields.items()}
        for section, fields in config.model_dump(mode="json").items()
    }
    return {
        "command": _command(),
        "world_size": context.world_size,
        "layout": {axis: context.grid[axis] for axis in AXES} | {"zero_stage": config.zero.stage},
        "device": device,
        "versions": {
            "megazero": VERSION,
            "git": git_revision(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "CUDA": torch.version.cuda,
        },
        "settings": {
            spec.path: tree[spec.section][spec.name]
            for spec in FIELDS
            if value_at(config, spec.path) != spec.default
        },
        "config": tree,
        "flops_per_token": meters.flops_per_token(config.model.seq_length, NOTHING_SKIPPED),
        "matmul_rate": meters.matmul_rate,
        "nominal_rate": nominal_matmul_rate(device),
        "end": {"iteration": end.iteration, "samples": end.samples, "tokens": end.tokens},
    }


def _shown(name: str, value: object) -> object:
    """A setting as it is recorded: no secret, and of an address nothing but its host."""
    hidden = value is not None and _SECRET.search(name)
    return HIDDEN if hidden else json.loads(_URL.sub(r"\1\2/...", json.dumps(to_json(value))))


def _command() -> str:
    """This process's command line, without secrets."""
    words, flag = [], ""
    for word in sys.orig_argv:
        name, _, value = word.partition("=")
        hidden = _SECRET.search((name if value else flag).replace("-", "_"))
        secret = f"{name}={HIDDEN}" if value else HIDDEN
        words.append(secret if hidden else _URL.sub(r"\1\2/...", word))
        flag = word if word.startswith("--") and not value else ""
    return shlex.join(words)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError):
        cpu = Path("/proc/cpuinfo").read_text()
        if match := re.search(r"^model name\s*:\s*(.+)$", cpu, re.MULTILINE):
            return match[1]
    return platform.machine() or device.type
