"""The command line: flags generated from the tree, and a reader that reports every problem at once.

`argparse` is not used: it stops at the first bad value, and its help text differs between Python
versions, while ours is frozen by a snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from megazero.config.coerce import coerce
from megazero.config.compat.dialects import translate
from megazero.config.compat.foreign import FOREIGN_FLAGS, Ignored, verdict
from megazero.config.fields import FIELD_BY_PATH, FIELDS, FieldSpec, Kind, spoken
from megazero.config.numbers import Unreadable
from megazero.config.words import Few, dashed, is_flag, nearest, says_on, values_after


@dataclass(frozen=True)
class Flag:
    """One of a field's spellings on the command line.

    A switch sets `constant` and takes no value. A yielding flag gives way to the field's other flags.
    """

    name: str
    spec: FieldSpec
    is_switch: bool = False
    constant: object = None
    yields: bool = False


@dataclass(frozen=True)
class Setting:
    """A value for one field, and where it was given: a flag's name or `file:line`."""

    spec: FieldSpec
    value: Any
    source: str


@dataclass
class Unread:
    """The words of a command line that have no meaning, by kind."""

    unknown: Few = field(default_factory=lambda: Few("unknown flags"))
    stray: Few = field(default_factory=lambda: Few("unexpected arguments"))


@dataclass(frozen=True)
class LeftOut:
    """Defaults of forks for the fields that a command line of theirs leaves out."""

    forks: tuple[str, ...] = ()
    settings: tuple[Setting, ...] = ()


@dataclass
class Scan:
    """The result of reading a command line. `broken` are paths of fields whose value could not be read."""

    settings: list[Setting] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    ignored: list[Ignored] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    left_out: LeftOut = LeftOut()
    config_file: str | None = None
    deepspeed: bool = False
    deepspeed_config: str | None = None
    check_only: bool = False
    unread: Unread = field(default_factory=Unread)


COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "--config": "FILE: read settings from a YAML file; flags take precedence over it",
        "--deepspeed": "read the file of --deepspeed_config, as scripts for DeepSpeed say",
        "--deepspeed_config": "FILE: read settings from a DeepSpeed JSON; it takes precedence over the YAML "
        "file; flags take precedence over its batch sizes, learning rate and folder of events, and others "
        "that contradict it are refused (also --deepspeed-config)",
        "--dialect": "NAME: read the flags of a fork of a Megatron as what they mean here; default: of the "
        "fork that knows the most of those that are unknown",
        "--check-config": "print the resolved configuration and exit; 0 accepted, 2 refused",
        "--help": "print this text and exit",
        "--version": "print the version and exit",
    }
)
"""Flags that are not fields of the tree, with their help."""


def _flags_of(spec: FieldSpec) -> list[Flag]:
    names = (spec.flag, *spec.aliases)
    if spec.kind is Kind.BOOL:
        own = [Flag(name, spec, is_switch=True, constant=spec.flag_value) for name in names]
    else:
        own = [Flag(name, spec, yields=name in spec.yielding) for name in names]
    switches = [
        Flag(name, spec, is_switch=True, constant=constant, yields=name in spec.yielding)
        for name, constant in spec.switches.items()
    ]
    return own + switches


def _all_flags() -> dict[str, Flag]:
    table: dict[str, Flag] = {}
    for flag in (flag for spec in FIELDS for flag in _flags_of(spec)):
        assert flag.name not in {*table, *COMMANDS}, f"{flag.name} is declared twice"
        table[flag.name] = flag
    return table


FLAGS: Mapping[str, Flag] = MappingProxyType(_all_flags())
"""Every flag of the tree: name -> Flag."""

_FILE_OF_SETTINGS = "--yaml-cfg"
"""A refused flag that names a file of settings: beside it, no field can be called missing or wrong."""

_SPELLINGS: Mapping[str, str] = MappingProxyType(
    {dashed(name): name for name in (*FOREIGN_FLAGS, *FLAGS, *COMMANDS, "-h")}
)
"""Every flag: its name with dashes -> its name."""


def scan(argv: Sequence[str]) -> Scan:
    """Read a command line. Problems are collected, never raised."""
    reading = translate(argv, _SPELLINGS)
    result = Scan(problems=reading.problems, warnings=reading.warnings(), ignored=reading.ignored)
    _read_all(result, reading.argv)
    result.settings = _settle(result)
    meant = Scan(problems=result.problems)
    _read_all(meant, reading.left_out.argv)
    result.left_out = LeftOut(reading.left_out.forks, tuple(meant.settings))
    result.problems += [*result.unread.unknown.rest(), *result.unread.stray.rest(), *_deepspeed_pair(result)]
    if result.unread.unknown.count and reading.assumed:
        fork = reading.assumed[0]
        result.problems.append(
            f"unknown flags are not those of `--dialect {fork}` either, as others of this line are."
        )
    return result


def _read_all(result: Scan, argv: Sequence[str]) -> None:
    position = 0
    while position < len(argv):
        token = argv[position]
        position += 1
        if not is_flag(token):
            result.unread.stray.add(result.problems, partial(_stray, token))
            continue
        name, equals, inline = token.partition("=")
        values = [inline] if equals else []
        following = [] if equals else values_after(argv, position)
        if not equals and not following and _is_value(name, argv[position : position + 1]):
            # Read it as meant, so that no other complaint follows from this one.
            following = [argv[position]]
            result.problems.append(
                f"`{name}` must be followed by a value; one that begins with a dash is joined to it by an "
                f"equals sign: `{name}={argv[position]}`."
            )
        position += _read_flag(result, name, values, following)


def _is_value(name: str, following: Sequence[str]) -> bool:
    """Whether the word after a text flag is its value despite a dash at its start: it resembles no flag."""
    if name not in FLAGS or FLAGS[name].is_switch or FLAGS[name].spec.kind not in (Kind.TEXT, Kind.TEXTS):
        return False
    return any(
        dashed(token.partition("=")[0]) not in _SPELLINGS and nearest(token, FLAGS) is None
        for token in following
    )


def _deepspeed_pair(result: Scan) -> list[str]:
    """Return the problem of a `--deepspeed` without `--deepspeed_config`, or of the reverse."""
    if result.deepspeed and result.deepspeed_config is None:
        return [
            "`--deepspeed` must go with `--deepspeed_config FILE`, but no file is given; name it, or leave "
            "`--deepspeed` out: the engine is the same."
        ]
    if result.deepspeed_config is not None and not result.deepspeed:
        return ["`--deepspeed_config` must go with `--deepspeed`, but it is missing; add it."]
    return []


def _read_flag(result: Scan, name: str, inline: list[str], following: list[str]) -> int:
    """Read one flag with its values into `result`; returns how many of `following` it took."""
    if name in FLAGS:
        return _read_field(result, FLAGS[name], inline, following)
    if name in COMMANDS or name in ("-h", "--deepspeed-config"):
        return _read_command(result, name, inline, following)
    if name in FOREIGN_FLAGS:
        foreign = FOREIGN_FLAGS[name]
        if foreign.accepted and foreign.arity.most == 0 and inline and not says_on(inline[0]):
            result.problems.append(
                f"`{name}` is a switch that must stand alone or be true, but is `{inline[0]}`; leave it out."
            )
            return 0
        taken = 0 if inline else min(len(following), foreign.arity.most)
        outcome = verdict(foreign, inline or following[:taken])
        if isinstance(outcome, Ignored):
            result.ignored.append(outcome)
        else:
            result.problems.append(outcome)
            if name == _FILE_OF_SETTINGS:
                result.broken |= FIELD_BY_PATH.keys()
        return taken
    result.unread.unknown.add(result.problems, partial(_unknown, name))
    return len(following)


def _unknown(name: str) -> str:
    close = nearest(name, [*FLAGS, *COMMANDS])
    hint = f"; did you mean `{close}`?" if close else "; see --help."
    return f"unknown flag `{name}`{hint}"


def _stray(token: str) -> str:
    return f"unexpected argument `{token}`: values belong after a flag; quote those that hold blanks."


def _read_command(result: Scan, name: str, inline: list[str], following: list[str]) -> int:
    if name == "--config":
        result.config_file = _read_file_name(result, name, inline or following[:1], result.config_file)
        return 0 if inline else len(following[:1])
    if name in ("--deepspeed_config", "--deepspeed-config"):
        result.deepspeed_config = _read_file_name(
            result, name, inline or following[:1], result.deepspeed_config
        )
        return 0 if inline else len(following[:1])
    if inline:
        result.problems.append(f"`{name}` must stand without a value, but has `{inline[0]}`.")
    if name == "--check-config":
        result.check_only = True
    if name == "--deepspeed":
        result.deepspeed = True
    return 0


def _read_file_name(result: Scan, name: str, values: list[str], earlier: str | None) -> str | None:
    if not values or not values[0]:
        result.problems.append(f"`{name}` must be followed by a file, but no value follows.")
        result.broken |= FIELD_BY_PATH.keys()
        return earlier
    if earlier is not None:
        result.problems.append(f"`{name}` must be given once, but is given as {earlier} and {values[0]}.")
        return earlier
    return values[0]


def _read_field(result: Scan, flag: Flag, inline: list[str], following: list[str]) -> int:
    spec = flag.spec
    if flag.is_switch:
        _read_switch(result, flag, inline)
        return 0
    values = inline or (following if spec.is_list else following[:1])
    if not values:
        result.problems.append(f"`{flag.name}` must be followed by a value ({spec.type_name}).")
        result.broken.add(spec.path)
        return 0
    try:
        value = coerce(spec, values if spec.is_list and not inline else values[0])
        _set(result, flag, value)
    except Unreadable as error:
        result.problems.append(f"`{flag.name}` {error}, but is `{' '.join(values)}`.")
        result.broken.add(spec.path)
    return 0 if inline else len(values)


def _set(result: Scan, flag: Flag, value: object) -> None:
    """Set the flag's field, and the other field that the flag implies."""
    spec = flag.spec
    result.settings.append(Setting(spec, value, flag.name))
    if flag.name in spec.implies:
        sibling, implied = spec.implies[flag.name]
        result.settings.append(Setting(FIELD_BY_PATH[f"{spec.section}.{sibling}"], implied, flag.name))


def _read_switch(result: Scan, flag: Flag, inline: list[str]) -> None:
    """Set the field of a switch. `--switch=false` sets a boolean the other way, to override a YAML file."""
    text = inline[0].lower() if inline else "true"
    if not inline or (flag.spec.kind is Kind.BOOL and text in ("true", "false")):
        value = flag.constant if text == "true" else not flag.constant
        _set(result, flag, value)
        return
    allowed = "true or false" if flag.spec.kind is Kind.BOOL else "no value"
    result.problems.append(f"`{flag.name}` is a switch that takes {allowed}, but is `{inline[0]}`.")
    result.broken.add(flag.spec.path)


def _settle(result: Scan) -> list[Setting]:
    """Settle on one setting per field: yielding flags give way, a repeated flag's last value counts."""
    by_path: dict[str, list[Setting]] = {}
    for setting in result.settings:
        by_path.setdefault(setting.spec.path, []).append(setting)
    settled = []
    for path, given in by_path.items():
        # Scripts of both Megatrons give such flags beside the ones that overrule them there.
        given = [s for s in given if not FLAGS[s.source].yields] or given
        last_of_flag = {setting.source: setting for setting in given}
        for name, last in last_of_flag.items():
            earlier = next((s for s in given if s.source == name and s.value != last.value), None)
            if earlier:
                result.warnings.append(
                    f"`{name}` is given more than once (as {spoken(earlier.value)}, then "
                    f"{spoken(last.value)}); "
                    "the last is used."
                )
        rivals = list(last_of_flag.values())
        if any(setting.value != rivals[0].value for setting in rivals[1:]):
            says = " and ".join(f"`{s.source}` says {spoken(s.value)}" for s in rivals)
            result.problems.append(f"`{path}` must be set one way, but {says}; keep one of these flags.")
            result.broken.add(path)
        else:
            settled.append(given[-1])
    return settled
