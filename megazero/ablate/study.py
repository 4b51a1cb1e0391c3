"""A folder of configurations to compare: which files are members, and every reason to refuse them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megazero.config.coerce import nearest
from megazero.config.document import BASE, read_file
from megazero.config.flags import scan
from megazero.config.metric_text import as_mapping
from megazero.config.resolve import parse_config
from megazero.config.tree import Config
from megazero.errors import ConfigError

_METRICS = "data_sampling.curriculum_metrics"
_SOURCES = ("data_path", "train_data_path", "valid_data_path", "test_data_path", "mock_data")


@dataclass(frozen=True)
class Wishes:
    """What the command line asks of every member.

    Attributes:
        ranks: processes of each run.
        steps: optimizer steps of each run; None leaves what the files say.
        flags: flags of pretrain_gpt.py, which take precedence over the files.
        corpus: the flags that name the prepared corpus, for members that name no data.
    """

    ranks: int = 1
    steps: int | None = None
    flags: tuple[str, ...] = ()
    corpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class Member:
    """One configuration of a study.

    Attributes:
        name: the name of its file, without ``.yaml``.
        title: the first comment of its file; empty without one.
        config: its settings, complete but for what tells its runs apart.
        takes_corpus: whether it names no data, so that it is trained on the prepared corpus.
        teacher: the name of the member that it learns from; None if it has no teacher, or one from elsewhere.
        analyzed: names of its curriculum's metrics that name no index, so that the corpus is analyzed.
    """

    name: str
    title: str
    config: Config
    takes_corpus: bool
    teacher: str | None = None
    analyzed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Study:
    """The members of a folder, by name, and what the configuration warns of."""

    members: tuple[Member, ...]
    warnings: tuple[str, ...]


def read_study(folder: Path, wishes: Wishes) -> Study:
    """Read a folder. Every ``*.yaml`` is a member but those whose names begin with ``base``.

    Raises:
        ConfigError: there is no member, or rules refuse some of them. Every reason is listed, with the names
            of the members that it concerns.
    """
    members: list[Member] = []
    problems: dict[str, list[str]] = {}
    warnings: dict[str, None] = {}
    files = _files(folder)
    named = {path.stem for path in files}
    for path in files:
        document = read_file(str(path))
        given = {s.spec.path: s.value for s in [*document.settings, *scan(wishes.flags).settings]}
        takes_corpus = not {f"data.{name}" for name in _SOURCES} & set(given)
        analyzed, indexes = _indexes(given) if takes_corpus else ((), [])
        corpus = (*wishes.corpus, *indexes) if takes_corpus else ()
        flags = [*wishes.flags, *corpus, *_length(given, wishes.steps)]
        try:
            resolved = parse_config(["--config", str(path), *flags], world_size=wishes.ranks)
        except ConfigError as error:
            reasons = error.violations
        else:
            teacher = resolved.config.distillation.load_teacher
            inside = teacher if teacher in named else None
            told = (_title(path), resolved.config, takes_corpus, inside, analyzed)
            members.append(Member(path.stem, *told))
            warnings |= dict.fromkeys(resolved.warnings)
            reasons = _unfit(members[-1])
        for reason in reasons:
            problems.setdefault(reason, []).append(path.stem)
    for name in _circle(members):
        problems.setdefault(
            "`load_teacher` must name a member that does not learn from it; correct it.", []
        ).append(name)
    if problems:
        raise ConfigError([f"{', '.join(names)}: {reason}" for reason, names in problems.items()])
    return Study(tuple(members), tuple(warnings))


def with_teachers(wanted: Sequence[Member], members: Sequence[Member]) -> tuple[Member, ...]:
    """The `wanted` members and those that they learn from: each after its teacher, else in their order."""
    by_name = {member.name: member for member in members}
    found: dict[str, Member] = {}

    def add(member: Member) -> None:
        if member.teacher is not None:
            add(by_name[member.teacher])
        found.setdefault(member.name, member)

    for member in wanted:
        add(member)
    return tuple(found.values())


def _circle(members: Sequence[Member]) -> list[str]:
    """The names of members that learn from themselves, by way of others or not."""
    teacher = {member.name: member.teacher for member in members}
    found = []
    for name in teacher:
        at = teacher[name]
        for _ in members:
            if at == name:
                found.append(name)
                break
            at = teacher.get(at)
    return found


def chosen(members: Sequence[Member], names: Sequence[str], flag: str) -> tuple[Member, ...]:
    """The members of these names, in their own order; all of them if no name is given.

    Raises:
        ConfigError: there is no member of a name that `flag` gave.
    """
    known = [member.name for member in members]
    unknown = [
        f"`{flag}` must name members ({', '.join(known)}), but is {name}"
        + (f"; did you mean {close}?" if (close := nearest(name, known)) else "; correct it.")
        for name in names
        if name not in known
    ]
    if unknown:
        raise ConfigError(unknown)
    return tuple(member for member in members if not names or member.name in names)


def _files(folder: Path) -> list[Path]:
    """The files of the members."""
    if not folder.is_dir():
        raise ConfigError(
            f"the folder of configurations must exist, but {folder} does not; correct the path."
        )
    found = [path for path in sorted(folder.glob("*.yaml")) if not path.name.startswith(BASE)]
    if not found:
        raise ConfigError(
            f"{folder} must hold a configuration (*.yaml) whose name does not begin with `{BASE}`, but has "
            "none; add one."
        )
    return found


def _length(given: dict[str, object], steps: int | None) -> list[str]:
    """The flags that train for so many steps, with the evaluations and the end of a teacher's lessons at the
    same shares of the training.
    """
    if steps is None:
        return []
    flags = ["--train-iters", str(steps)]
    whole = given.get("training.train_iters")
    for path, flag in (
        ("training.eval_interval", "--eval-interval"),
        ("distillation.kd_train_iters", "--kd-train-iters"),
    ):
        number = given.get(path)
        if isinstance(whole, int) and isinstance(number, int) and whole > 0:
            flags += [flag, str(max(1, round(number * steps / whole)))]
    return flags


def _indexes(given: dict[str, object]) -> tuple[tuple[str, ...], list[str]]:
    """The names of the metrics without an index, and the flags that say of these that there will be one."""
    metrics = given.get(_METRICS) or ()
    names = tuple(metric.name for metric in metrics if not metric.index_to_sample_path)
    if not names:
        return (), []
    later = dict.fromkeys(("index_to_sample_path", "index_to_metric_path"), "made by the analyzer")
    found = tuple(m.model_copy(update=later) if m.name in names else m for m in metrics)
    return names, ["--curriculum-metrics", json.dumps(as_mapping(found))]


def _title(path: Path) -> str:
    """The first comment before the settings."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if title := line.strip("# \t"):
            return title
    return ""


def _unfit(member: Member) -> list[str]:
    """Why an accepted configuration cannot be a member."""
    config, reasons = member.config, []
    for section, name in (("checkpoint", "save"), ("checkpoint", "load"), ("logging", "metrics_jsonl")):
        path = getattr(getattr(config, section), name)
        if path is not None:
            reasons.append(
                f"`{section}.{name}` must be left to the command, which gives each run a folder of its own, "
                f"but is {path}; leave it out."
            )
    if config.training.eval_iters == 0:
        reasons.append(
            "`eval_iters` must be at least 1, because losses on validation data are compared, but is 0."
        )
    if config.training.skip_train:
        reasons.append("`skip_train` must be off, because runs are compared by what they learn, but is on.")
    if config.finetune.task is not None:
        reasons.append(
            f"`task` must be left out of pretraining, but is {config.finetune.task}; leave it out."
        )
    if member.takes_corpus and config.model.family != "gpt":
        reasons.append(
            f"`family` must be gpt for the corpus that is prepared, but is {config.model.family}; name data "
            "of your own, as in `megazero ablate FOLDER -- --data-path PREFIX`."
        )
    return reasons
