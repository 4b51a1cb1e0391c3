"""A configuration with a seed: the files of its run, and its progress."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megazero.ablate.corpus import Corpus
from megazero.ablate.study import Member, with_teachers
from megazero.config.derive import data_parallel_size
from megazero.config.document import to_yaml
from megazero.config.fields import names_with
from megazero.config.training_plan import training_plan_of
from megazero.config.tree.checkpoint import CheckpointConfig
from megazero.config.tree.config import Config
from megazero.config.tree.data_sampling import CurriculumMetric
from megazero.config.tree.logging import LoggingConfig
from megazero.config.tree.roles import Role

_SAVES = 4  # checkpoints of a run that asks for no number of its own
_CHARTS = ("tensorboard_dir", "csv_dir")


@dataclass(frozen=True)
class Trial:
    """The training of a member of a study with one seed.

    Attributes:
        member: the configuration.
        seed: the seed.
        ranks: the number of processes.
        fingerprint: a hash of everything that decides the result, except the seed; see `fingerprint`.
        folder: the folder of the run's files; its name contains the fingerprint.
        corpus: the corpus for a member that names no data.
        teacher: the trial of the member's teacher with the same seed; None without a teacher.
    """

    member: Member
    seed: int
    ranks: int
    fingerprint: str
    folder: Path
    corpus: Corpus
    teacher: Trial | None = None

    @property
    def name(self) -> str:
        """The trial's name in messages."""
        return f"{self.member.name}, seed {self.seed}"

    @property
    def settings(self) -> Path:
        """The file with the whole configuration."""
        return self.folder / "config.yaml"

    @property
    def metrics(self) -> Path:
        """The file with a JSON object per step; the evaluations' file lies beside it."""
        return self.folder / "metrics.jsonl"

    @property
    def log(self) -> Path:
        """The file with the processes' output."""
        return self.folder / "log.txt"

    @property
    def steps(self) -> int:
        """The length of the training in optimizer steps."""
        config = self.member.config
        return training_plan_of(config, data_parallel_size(config, self.ranks)).end.iteration

    @property
    def saved(self) -> str:
        """The folder of the checkpoints."""
        return str(self.folder / "checkpoint")

    def config(self) -> Config:
        """The whole configuration, with the seed and this run's own folders."""
        config, saved = self.member.config, self.saved
        interval = config.checkpoint.save_interval or max(1, self.steps // _SAVES)
        last = config.checkpoint.keep_last or (None if config.checkpoint.save_retain_interval else 1)
        charts = {
            name: str(Path(folder, self.member.name, f"seed-{self.seed}"))
            for name in _CHARTS
            if (folder := getattr(config.logging, name)) is not None
        }
        changes: dict[str, dict[str, object]] = {
            "training": {"seed": self.seed},
            "checkpoint": {"save": saved, "load": saved, "save_interval": interval, "keep_last": last},
            "logging": {"metrics_jsonl": str(self.metrics), **charts},
        }
        if self.teacher is not None:
            changes["distillation"] = {"load_teacher": self.teacher.saved}
        whole = _changed(config, changes)
        indexed = tuple(
            self.corpus.indexed(metric, whole) if metric.name in self.member.analyzed else metric
            for metric in config.data_sampling.curriculum_metrics
        )
        return _changed(whole, {"data_sampling": {"curriculum_metrics": indexed}})

    @property
    def to_analyze(self) -> tuple[CurriculumMetric, ...]:
        """The curriculum's metrics for which the corpus must be analyzed."""
        metrics = self.member.config.data_sampling.curriculum_metrics
        return tuple(metric for metric in metrics if metric.name in self.member.analyzed)

    def steps_done(self) -> int:
        """The last step in the metrics; 0 without any."""
        return max((record["iteration"] for record in records(self.metrics)), default=0)

    def evaluations(self) -> list[dict[str, Any]]:
        """The records of the evaluations on validation data, in order."""
        evaluated = records(self.metrics.with_name("metrics.eval.jsonl"))
        return [record for record in evaluated if record["split"] == "validation"]

    def finished(self) -> bool:
        """Whether the run has been trained to its end and evaluated there."""
        steps = self.steps
        return any(record["iteration"] == steps for record in self.evaluations())


def trials_of(members: Sequence[Member], seeds: int, ranks: int, out: Path) -> tuple[Trial, ...]:
    """The trials of every member with `seeds` seeds: the configuration's own and the next ones.

    All members with one seed come before the next seed, so that early results compare all members. A student
    comes after its teacher.
    """
    trials: list[Trial] = []
    for number in range(seeds):
        by_name: dict[str, Trial] = {}
        for member in with_teachers(members, members):
            teacher = None if member.teacher is None else by_name[member.teacher]
            digits = fingerprint(member.config, ranks, "" if teacher is None else teacher.fingerprint)
            seed = member.config.training.seed + number
            folder = out / "runs" / f"{member.name}-{digits}" / f"seed-{seed}"
            corpus = Corpus(out / "corpus", member.config.model.family)
            by_name[member.name] = Trial(member, seed, ranks, digits, folder, corpus, teacher)
        trials += by_name.values()
    return tuple(trials)


def fingerprint(config: Config, ranks: int, teacher: str = "") -> str:
    """Hash everything that decides a result, except the seed and the code, to eight hexadecimal digits.

    Files of data and of the tokenizer enter by name and size, so that they can be moved. The settings of
    checkpoints and logging do not enter.

    Args:
        config: the member's configuration.
        ranks: the number of processes.
        teacher: the teacher's fingerprint; empty without a teacher.
    """
    neutral: dict[str, dict[str, object]] = {"training": {"seed": 0}, "data": {"data_cache_path": None}}
    for section in ("data", "tokenizer"):
        values = {name: getattr(getattr(config, section), name) for name in names_with(Role.FILE, section)}
        neutral.setdefault(section, {}).update({name: _described(value) for name, value in values.items()})
    plain = config.model_copy(update={"checkpoint": CheckpointConfig(), "logging": LoggingConfig()})
    distilled = f"teacher: {teacher}\n" if teacher else ""
    text = f"{to_yaml(_changed(plain, neutral))}ranks: {ranks}\n{distilled}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def records(path: Path) -> list[dict[str, Any]]:
    """The objects in a file of JSON lines, without an incomplete last line; none if there is no file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.split("\n")[:-1]]


def _changed(config: Config, changes: dict[str, dict[str, object]]) -> Config:
    sections = {name: getattr(config, name).model_copy(update=values) for name, values in changes.items()}
    return config.model_copy(update=sections)


def _described(value: object) -> object:
    """Replace paths of files and of datasets by names and sizes; keep other values."""
    if isinstance(value, tuple):
        return tuple(map(_described, value))
    for path in (Path(value), Path(f"{value}.bin")) if isinstance(value, (str, Path)) else ():
        if path.is_file():
            return f"{path.name}, {path.stat().st_size} bytes"
    return value
