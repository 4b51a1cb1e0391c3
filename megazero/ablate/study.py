"""Read a folder of configurations to compare, and list every reason to refuse them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from megazero.ablate.lengths import METRICS, as_flags, scaled, share_of
from megazero.config.document import BASE, read_file
from megazero.config.fields import fields_with
from megazero.config.flags import scan
from megazero.config.resolve import parse_config
from megazero.config.tree.config import Config
from megazero.config.tree.data_sampling import CurriculumMetric
from megazero.config.tree.roles import Role
from megazero.config.words import nearest
from megazero.errors import ConfigError
from megazero.regular_file import read_regular_text
from megazero.train.folders import read_folder


@dataclass(frozen=True)
class StudyOptions:
    """The settings that the command line gives every member.

    Attributes:
        ranks: processes of each run.
        steps: optimizer steps of each run; None keeps the files' lengths.
        shares: multiples of the length; each file is trained at all of them.
        flags: flags of pretrain_gpt.py, which take precedence over the files.
        corpus: by model family, the flags that name the prepared corpus, for members that name no data.
    """

    ranks: int = 1
    steps: int | None = None
    shares: tuple[float, ...] = (1.0,)
    flags: tuple[str, ...] = ()
    corpus: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Member:
    """One configuration of a study.

    Attributes:
        file: the file's name, without ``.yaml``.
        name: the same, or ``FILE@SHARE`` if the training is `SHARE` times as long as the file says.
        title: the first comment of the file; empty without one.
        config: the settings, without those that differ between runs, such as the seed.
        takes_corpus: whether the file names no data, so that the prepared corpus is used.
        teacher: the name of the member that is the teacher; None without a teacher, or with another one.
        analyzed: names of the curriculum's metrics without an index, for which the corpus is analyzed.
    """

    file: str
    name: str
    title: str
    config: Config
    takes_corpus: bool
    teacher: str | None = None
    analyzed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Study:
    """The members of a folder, in the order of their names, and the warnings about their configurations."""

    members: tuple[Member, ...]
    warnings: tuple[str, ...]


def read_study(folder: Path, options: StudyOptions) -> Study:
    """Read a folder, in which every ``*.yaml`` is a member unless its name begins with ``base``.

    Raises:
        ConfigError: there is no member, or members are refused; each reason is listed with their names.
    """
    members: list[Member] = []
    problems: dict[str, list[str]] = {}
    warnings: dict[str, None] = {}
    files = _files(folder)
    named = {path.stem for path in files}
    for path, share in product(files, options.shares):
        name = _named(path.stem, share)
        document = read_file(str(path))
        settings = {s.spec.path: s.value for s in [*document.settings, *scan(options.flags).settings]}
        takes_corpus = not any(spec.path in settings for spec in fields_with(Role.SOURCE))
        changed = _length(settings, options.steps, share)
        metrics = settings.get(METRICS) or () if takes_corpus else ()
        analyzed = tuple(metric.name for metric in metrics if not metric.index_to_sample_path)
        if analyzed:
            changed[METRICS] = _indexed_later(changed.get(METRICS, metrics), analyzed)
        corpus = options.corpus.get(str(settings.get("model.family", "gpt")), ()) if takes_corpus else ()
        flags = [*options.flags, *corpus, *as_flags(changed)]
        try:
            resolved = parse_config(
                ["--config", str(path), *flags], world_size=options.ranks, reader=read_folder
            )
        except ConfigError as error:
            reasons = error.violations
        else:
            teacher = resolved.config.distillation.load_teacher
            inside = _named(teacher, share) if teacher in named else None
            title = _title(path)
            members.append(Member(path.stem, name, title, resolved.config, takes_corpus, inside, analyzed))
            warnings |= dict.fromkeys(resolved.warnings)
            reasons = _unfit(members[-1])
        for reason in reasons:
            problems.setdefault(reason, []).append(name)
    for name in _own_teachers(members):
        problems.setdefault(
            "`load_teacher` must name a member that does not learn from it; correct it.", []
        ).append(name)
    if problems:
        raise ConfigError([f"{', '.join(names)}: {reason}" for reason, names in problems.items()])
    return Study(tuple(members), tuple(warnings))


def with_teachers(wanted: Sequence[Member], members: Sequence[Member]) -> tuple[Member, ...]:
    """The `wanted` members and their teachers in the given order, except that a teacher comes first."""
    by_name = {member.name: member for member in members}
    ordered: dict[str, Member] = {}

    def add(member: Member) -> None:
        if member.teacher is not None:
            add(by_name[member.teacher])
        ordered.setdefault(member.name, member)

    for member in wanted:
        add(member)
    return tuple(ordered.values())


def _own_teachers(members: Sequence[Member]) -> list[str]:
    """The names of members that are their own teachers, directly or through other members."""
    teacher = {member.name: member.teacher for member in members}
    circular = []
    for name in teacher:
        at = teacher[name]
        for _ in members:
            if at == name:
                circular.append(name)
                break
            at = None if at is None else teacher.get(at)
    return circular


def chosen(members: Sequence[Member], names: Sequence[str], flag: str) -> tuple[Member, ...]:
    """The members with these names, in the order of `members`; all members if no name is given.

    The name of a file chooses its trainings of all lengths.

    Raises:
        ConfigError: a name, given by the flag `flag`, is no member's.
    """
    known = list(dict.fromkeys(name for m in members for name in (m.file, m.name)))
    unknown = [
        f"`{flag}` must name members ({', '.join(known)}), but is {name}"
        + (f"; did you mean {close}?" if (close := nearest(name, known)) else "; correct it.")
        for name in names
        if name not in known
    ]
    if unknown:
        raise ConfigError(unknown)
    return tuple(m for m in members if not names or {m.name, m.file} & set(names))


def _files(folder: Path) -> list[Path]:
    """The files of the members, sorted by name.

    Raises:
        ConfigError: the folder does not exist, or has no such file.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"the folder of configurations must exist, but {folder} does not; correct the path."
        )
    files = [path for path in sorted(folder.glob("*.yaml")) if not path.name.startswith(BASE)]
    if not files:
        raise ConfigError(
            f"{folder} must hold a configuration (*.yaml) whose name does not begin with `{BASE}`, but has "
            "none; add one."
        )
    return files


def _named(stem: str, share: float) -> str:
    return stem if share == 1 else f"{stem}@{share:g}"


def _length(settings: Mapping[str, Any], steps: int | None, share: float) -> dict[str, Any]:
    """The changed settings of a training of `steps` x `share` steps; None is the length of the file."""
    if steps is None:
        return {} if share == 1 else scaled(settings, share)
    whole = share_of(settings, steps)
    changed = {} if whole is None else scaled(settings, whole * share)
    return {**changed, "training.train_iters": max(1, round(steps * share))}


def _indexed_later(metrics: Sequence[CurriculumMetric], names: Sequence[str]) -> tuple[CurriculumMetric, ...]:
    """Set placeholder index paths on the metrics in `names`, whose index the analyzer makes later."""
    later = dict.fromkeys(("index_to_sample_path", "index_to_metric_path"), "made by the analyzer")
    return tuple(m.model_copy(update=later) if m.name in names else m for m in metrics)


def _title(path: Path) -> str:
    """The first comment above the settings; empty without one."""
    for line in read_regular_text(path).splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if title := line.strip("# \t"):
            return title
    return ""


def _unfit(member: Member) -> list[str]:
    """The reasons why a configuration that the rules accept cannot be a member."""
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
    return reasons
