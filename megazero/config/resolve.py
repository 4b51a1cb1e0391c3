"""From a command line to a configuration: defaults, YAML file, DeepSpeed JSON, flags; then every check."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TextIO

from pydantic import ValidationError

from megazero.config.compat.foreign import Ignored, contradiction
from megazero.config.compat.hub import notice
from megazero.config.compat.left_out import fewer_expert_ranks, megatron_deepspeed, ungrouped
from megazero.config.deepspeed.beside import conflicts, flags_without_effect, overruled, without_effect
from megazero.config.deepspeed.read import DeepSpeedSettings, read_deepspeed
from megazero.config.derive import DEFAULT_TOKENIZERS
from megazero.config.document import Document, read_file
from megazero.config.fields import FIELD_BY_PATH, FIELDS, SECTIONS, FieldSpec, spoken
from megazero.config.flags import LeftOut, Scan, Setting, scan
from megazero.config.help import format_help, meanings
from megazero.config.rules.notes import cut_short, notes_on
from megazero.config.rules.rule import Case, value_at
from megazero.config.rules.table import check
from megazero.config.shown import shown_config
from megazero.config.stated import Reader, Stated
from megazero.config.tree.config import Config
from megazero.config.tree.option import Section
from megazero.config.tree.roles import Role
from megazero.errors import CheckpointError, ConfigError, printable
from megazero.version import VERSION

_CODE = "curriculum.seqlen_custom_schedule"
_SHARERS = "parallel.context_parallel_size"
_MODEL_RANKS = ("parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size", _SHARERS)


@dataclass(frozen=True)
class Resolved:
    """An accepted configuration, its warnings, and whether only a check was asked for."""

    config: Config
    warnings: tuple[str, ...]
    check_only: bool


class BrokenRules(ConfigError):
    """The error of settings that can all be read, but break rules; `config` is made of them."""

    def __init__(self, violations: list[str], config: Config):
        super().__init__(violations)
        self.config = config


def parse_config(
    argv: Sequence[str],
    *,
    world_size: int | None = None,
    reader: Reader | None = None,
    only_look: bool = False,
) -> Resolved:
    """Resolve a command line.

    Args:
        argv: the arguments.
        world_size: the number of ranks; default: the environment's WORLD_SIZE, as torchrun sets it, or 1.
        reader: reads what the folder of the weights says of the model, which completes the command line;
            None leaves the folder unread.
        only_look: run no code that a file names, as with `--check-config`.

    Raises:
        ConfigError: every violation: unknown flags and keys, unreadable values, missing fields, values out of
            range and broken rules; `BrokenRules` if rules are all that is broken.
    """
    flags = scan(argv)
    document = Document() if flags.config_file is None else read_file(flags.config_file)
    problems = [*document.problems, *flags.problems]
    ranks = world_size_of_environment(problems) if world_size is None else world_size
    given = [*document.settings, *flags.settings]
    deepspeed = _read_deepspeed(flags, given, ranks)
    said = deepspeed.overruled + overruled(flags.settings, deepspeed.settings)
    problems += [*deepspeed.problems, *deepspeed.script_problems]
    idle = flags_without_effect(flags.settings, deepspeed.values)
    # An idle flag neither contradicts the JSON nor overrides it.
    effective = [setting for setting in flags.settings if setting not in idle]
    problems += conflicts(effective, deepspeed.settings)
    layers = (deepspeed.defaults, document.settings, deepspeed.settings, effective)
    settings = {setting.spec.path: setting for layer in layers for setting in layer}
    names = _names(flags)
    broken = flags.broken | ((document.broken | deepspeed.broken) - {s.spec.path for s in flags.settings})
    stated = _state(reader, settings)
    said += _take(stated, settings, broken)
    said += _leave_to_fork(flags.left_out, settings)
    said += _leave_to_megatron_deepspeed(names, settings)
    if fewer := fewer_expert_ranks(names, {path: setting.value for path, setting in settings.items()}):
        path = "parallel.expert_model_parallel_size"
        settings[path], said = replace(settings[path], value=fewer[0]), [*said, fewer[1]]
    sections = {name: _build_section(name, settings, broken, problems) for name in SECTIONS}
    config = _with_default_tokenizer(Config.model_construct(None, **sections), broken)
    # A file may come from somebody else: whoever only looks at it does not run its code.
    code = settings.get(_CODE)
    if code is not None and code not in effective and (only_look or flags.check_only):
        config = config.model_copy(update={"curriculum": config.curriculum.without_code()})
        said.append(f"the function that {code.source} names as `{_CODE}` is not run, and not checked, here.")
    problems += [line for flag in flags.ignored if (line := _contradiction(flag, config, broken))]
    if stated is not None and not problems:
        stated.check(config)
    rules = check(config, ranks, broken)
    if problems:
        raise ConfigError([*problems, *rules])
    if rules:
        raise BrokenRules(rules, config)
    said += [without_effect(flag, deepspeed.name, config.precision) for flag in idle]
    said += [
        line for line in (ungrouped(names, config.model), notice(config.tokenizer.tokenizer_model)) if line
    ]
    said += [*notes_on(config), *cut_short(Case(config, ranks))]
    return Resolved(config, (*_warnings(flags, deepspeed), *said), flags.check_only)


def _state(reader: Reader | None, settings: Mapping[str, Setting]) -> Stated | None:
    """Read what the folder of the weights says of the model. ConfigError if it cannot be read."""
    try:
        return None if reader is None else reader({path: s.value for path, s in settings.items()})
    except CheckpointError as error:
        raise ConfigError([f"{error}."]) from error


def _take(stated: Stated | None, settings: dict[str, Setting], broken: set[str]) -> list[str]:
    """Add the folder's settings where nothing else gives them; returns lines for the log."""
    if stated is None:
        return []
    taken = [
        Setting(FIELD_BY_PATH[path], value, stated.place)
        for path, value in stated.values({*settings, *broken}).items()
    ]
    settings |= {setting.spec.path: setting for setting in taken}
    listed = _listed((setting.spec.flag, setting.value) for setting in taken)
    said = [f"as {stated.place} says: `{listed}`."] if taken else []
    given = {path: setting.value for path, setting in settings.items() if path.startswith("tokenizer.")}
    if (other := stated.other_tokenizer(given)) is not None:
        said.append(f"the tokenizer is that of the launch, not that of {stated.place}: `{other}`.")
    return said


def _with_default_tokenizer(config: Config, broken: set[str]) -> Config:
    """Name the tokenizer of the model's family if none is named, as the scripts of both Megatrons do.

    Here `--vocab-size` alone is enough for data that are token ids already: then there is no tokenizer.
    """
    section = config.tokenizer
    named = section.tokenizer_type is not None or "tokenizer.tokenizer_type" in broken
    files = (section.vocab_file, section.merge_file, section.tokenizer_model)
    sized = config.model.vocab_size is not None or "model.vocab_size" in broken
    if named or (sized and not any(files)):
        return config
    section = section.model_copy(update={"tokenizer_type": DEFAULT_TOKENIZERS[config.model.family]})
    return config.model_copy(update={"tokenizer": section})


def _names(flags: Scan) -> set[str]:
    """The names of the given flags, except those of commands."""
    names = {setting.source for setting in flags.settings} | {ignored.name for ignored in flags.ignored}
    return names | {"--deepspeed"} if flags.deepspeed else names


def _leave_to_fork(left_out: LeftOut, settings: dict[str, Setting]) -> list[str]:
    """Add a fork's defaults to the settings of its command line; returns lines for the log."""
    meant = [setting for setting in left_out.settings if setting.spec.path not in settings]
    settings |= {setting.spec.path: setting for setting in meant}
    listed = _listed((setting.source, setting.value) for setting in meant)
    forks = " and ".join(left_out.forks)
    return [f"what a line of {forks} leaves out means what it means there: `{listed}`."] if meant else []


def _listed(settings: Iterable[tuple[str, object]]) -> str:
    """List flags with their values; a switch has none."""
    return " ".join(flag if isinstance(x, bool) else f"{flag} {spoken(x)}" for flag, x in settings)


def _leave_to_megatron_deepspeed(names: set[str], settings: dict[str, Setting]) -> list[str]:
    """Add Megatron-DeepSpeed's defaults to the settings of its command line; returns lines for the log."""
    left_out = megatron_deepspeed(names, {path: setting.value for path, setting in settings.items()})
    if left_out is None or not left_out[1]:
        return []
    spelling, meant = left_out
    implied = [Setting(FIELD_BY_PATH[path], value, spelling) for path, value in meant.items()]
    settings |= {setting.spec.path: setting for setting in implied}
    listed = _listed((setting.spec.flag, setting.value) for setting in implied)
    return [
        f"`{spelling}` is Megatron-DeepSpeed's, so what is left out about experts means what it means there: "
        f"`{listed}`; any of these flags changes it."
    ]


def _read_deepspeed(flags: Scan, given: list[Setting], ranks: int | None) -> DeepSpeedSettings:
    """Read the file of `--deepspeed_config`, completed by all other settings; empty without the flag."""
    if flags.deepspeed_config is None:
        return DeepSpeedSettings("")
    known = {setting.spec.path: setting.value for setting in given}

    def read(path: str, sharers: int) -> DeepSpeedSettings:
        sizes = [known.get(size, sharers if size == _SHARERS else 1) for size in _MODEL_RANKS]
        replica = math.prod(sizes)
        whole = ranks is not None and min(sizes) > 0 and ranks % replica == 0
        return read_deepspeed(
            path,
            data_parallel=ranks // replica if ranks is not None and whole else None,
            given=known,
            flags={setting.spec.path: setting for setting in flags.settings},
        )

    first = read(flags.deepspeed_config, 1)
    sharers = first.extras.ranks.sequence_parallel_size
    if sharers == 1:
        return first
    # Ulysses, by DeepSpeed's name of it.
    settings, source = read(flags.deepspeed_config, sharers), f"{first.name}: `sequence_parallel_size`"
    for path, value in ((_SHARERS, sharers), ("parallel.cp_comm_type", ("a2a",))):
        settings.settings.append(Setting(FIELD_BY_PATH[path], value, source))
    return settings


def _contradiction(ignored: Ignored, config: Config, broken: set[str]) -> str | None:
    if any(condition.path in broken for condition in ignored.foreign.where):
        return None
    return contradiction(ignored, lambda path: value_at(config, path))


def resolve_or_exit(
    argv: Sequence[str], program: str = "pretrain_gpt.py", reader: Reader | None = None
) -> Config:
    """Resolve a script's command line; returns the configuration, or ends the process.

    Answers `--help` and `--version`; prints the tree for `--check-config` (status 0); prints every
    violation on the error stream (status 2). On each node only the first rank prints.
    """
    speaks = os.environ.get("LOCAL_RANK", "0") == "0"
    if "--help" in argv or "-h" in argv:
        _say(format_help(program).rstrip(), speaks, sys.stdout)
        raise SystemExit(0)
    if "--version" in argv:
        _say(f"megazero {VERSION}", speaks, sys.stdout)
        raise SystemExit(0)
    try:
        resolved = parse_config(argv, reader=reader)
        if resolved.check_only and (missing := _missing_packages(resolved.config)):
            raise ConfigError(missing)
    except ConfigError as error:
        count = len(error.violations)
        heading = f"{program}: the configuration is refused for {count} reason{'s' if count > 1 else ''}:"
        _say("\n".join([heading, *(f"  {line}" for line in error.violations)]), speaks, sys.stderr)
        raise SystemExit(error.exit_code) from error
    for warning in resolved.warnings:
        _say(f"{program}: {warning}", speaks, sys.stderr)
    if resolved.check_only:
        ranks = world_size_of_environment([])
        assert ranks is not None, "`parse_config` refuses an unreadable WORLD_SIZE"
        _say(shown_config(resolved.config, ranks).rstrip(), speaks, sys.stdout)
        raise SystemExit(0)
    return resolved.config


def _missing_packages(config: Config) -> list[str]:
    """Return a sentence on each setting whose package is not installed.

    Only `--check-config` refuses it: a run needs the package on the rank that writes, which may be elsewhere.
    """
    return [
        f"`{spec.flag}` must be left out where the package {spec.package} is not installed, but is "
        f"{value_at(config, spec.path)}; run `pip install {spec.package}`."
        for spec in FIELDS
        if spec.package and value_at(config, spec.path) is not None and find_spec(spec.package) is None
    ]


def _say(text: str, speaks: bool, stream: TextIO) -> None:
    if not speaks:
        return
    try:
        print(printable(text), file=stream, flush=True)
    except BrokenPipeError:
        # The reader closed the pipe, as `--help | head` does; Python would complain again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def world_size_of_environment(problems: list[str]) -> int | None:
    """WORLD_SIZE as torchrun sets it, or 1; None and a problem if it is not a positive integer."""
    text = os.environ.get("WORLD_SIZE", "1")
    if text.isdecimal() and len(text) < 10 and int(text) > 0:
        return int(text)
    problems.append(
        f"the environment's `WORLD_SIZE` must be a positive integer, but is `{text[:40]}`; unset it."
    )
    return None


def build_section(section: str, settings: Iterable[Setting]) -> Section:
    """One section of the tree, from the settings that belong to it; ConfigError names every bad value."""
    problems: list[str] = []
    built = _build_section(section, {setting.spec.path: setting for setting in settings}, set(), problems)
    if problems:
        raise ConfigError(problems)
    return built


def _build_section(
    section: str, settings: dict[str, Setting], broken: set[str], problems: list[str]
) -> Section:
    """Build a section. Fields that fail are added to `broken`, with a problem, and keep their default."""
    model = SECTIONS[section]
    given = model.implied({s.spec.name: s.value for s in settings.values() if s.spec.section == section})
    try:
        return model.model_validate(given)
    except ValidationError as error:
        by_name, texts = {spec.name: spec for spec in FIELDS if spec.section == section}, meanings(section)
        for detail in error.errors():
            spec = by_name[str(detail["loc"][0])]
            if spec.path not in broken:
                problems.append(_problem(spec, texts[spec.name], settings.get(spec.path), detail["msg"]))
            broken.add(spec.path)
            given.pop(spec.name, None)
    # Rules still judge the fields that are sound, so that all violations are reported at once.
    return model.model_construct(None, **given)


def _problem(spec: FieldSpec, meaning: str, setting: Setting | None, complaint: str) -> str:
    """Return pydantic's complaint about one field, in the form of this project's sentences."""
    if setting is None:
        return f"`{spec.flag}` must be set ({meaning}), but is missing."
    reason = complaint.removeprefix("Value error, ").removeprefix("Input should be ")
    must = reason if reason.startswith("must") else f"must be {reason}"
    value = " ".join(map(str, setting.value)) if isinstance(setting.value, tuple) else setting.value
    where = f"`{spec.flag}`" if setting.source.startswith("--") else f"{setting.source}: `{spec.path}`"
    return f"{where} {must}, but is {'another text' if Role.SECRET in spec.roles else f'`{value}`'}."


def _warnings(flags: Scan, deepspeed: DeepSpeedSettings) -> tuple[str, ...]:
    """The warnings: at most one line on ignored flags and one on ignored keys, then the rest."""
    keys = [*deepspeed.ignored, *deepspeed.script_ignored]
    # A launcher adds it to each rank's arguments, and sets the environment's LOCAL_RANK to the same.
    own = "--local-rank" if "LOCAL_RANK" in os.environ else None
    reported = [flag for flag in flags.ignored if not flag.foreign.silent and flag.name != own]
    return (
        *_without_effect("flags", [(flag.name, flag.reason) for flag in reported]),
        *_without_effect(f"keys of {deepspeed.name}", [(key.key, key.reason) for key in keys]),
        *flags.warnings,
    )


def _without_effect(what: str, ignored: list[tuple[str, str]]) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for name, reason in dict.fromkeys(ignored):
        by_reason.setdefault(reason, []).append(name)
    listed = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in by_reason.items())
    return [f"{what} without effect here: {listed}."] if ignored else []
