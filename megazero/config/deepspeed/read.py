"""Read a DeepSpeed JSON into settings of the same tree that flags and YAML give.

`sections/` says what happens to each key. Nothing is guessed and nothing is raised: problems with the
file are collected, to be reported together with all others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from megazero.config.deepspeed.batch import BatchTriangle, resolve_batch
from megazero.config.deepspeed.beside import leave_batch_to_flags
from megazero.config.deepspeed.extras import Extras, Named
from megazero.config.deepspeed.load import load_json, plain_paths
from megazero.config.deepspeed.section import AUTO, NOTHING, OR_NEVER, SECTION, KeyRow, Values, say
from megazero.config.deepspeed.sections.optimizer import optimizer_faults, uncorrected
from megazero.config.deepspeed.sections.training import BatchSizes
from megazero.config.deepspeed.sections.zero import AT_STAGE_3
from megazero.config.deepspeed.table import (
    ALIASES,
    LOOSE,
    PYDANTIC,
    ROWS,
    SECTIONS,
    is_remark,
    near_miss,
    unknown_key,
)
from megazero.config.fields import FIELD_BY_PATH
from megazero.config.flags import Setting
from megazero.config.numbers import LARGEST
from megazero.config.words import Few
from megazero.errors import ConfigError

_LONGEST_SHOWN = 80  # characters of a value in a message
_DEEPEST = 32  # levels; DeepSpeed's own keys need eight
_NOTHING_GIVEN: Values = MappingProxyType({})
_NO_FLAGS: Mapping[str, Setting] = MappingProxyType({})
_NEEDED: Mapping[str, frozenset[str]] = MappingProxyType(
    {"optimizer": frozenset({"lr"}), "scheduler": frozenset({"total_num_steps", "warmup_num_steps"})}
)
"""Arguments that stay "auto" where nothing replaces it; others are left out, and have their defaults."""
_SCRIPTS_ALONE = "optimizer."
"""The beginning of keys whose values `megazero.initialize` leaves to the optimizer's class to judge."""


@dataclass(frozen=True)
class IgnoredKey:
    """A key that was given and has no effect, with the reason."""

    key: str
    reason: str


@dataclass
class DeepSpeedSettings:
    """The result of reading a DeepSpeed JSON.

    Attributes:
        name: what messages call the file.
        settings: the fields of the tree that it sets, with the key as the source.
        defaults: fields that it implies, by DeepSpeed's defaults or a resolved "auto"; all other sources
            override them.
        ignored: keys without effect.
        script_ignored: keys that have an effect in `megazero.initialize` but not in a training script.
        script_problems: why a training script refuses it.
        unknown: keys that are not in the table, of sections in which DeepSpeed ignores such keys.
        problems: why it is refused.
        broken: paths of fields whose value could not be read.
        extras: the settings that no field of the tree has.
        batch: the batch sizes, if they could be resolved.
        overruled: sentences on its batch sizes that flags override.
    """

    name: str
    settings: list[Setting] = field(default_factory=list)
    defaults: list[Setting] = field(default_factory=list)
    ignored: list[IgnoredKey] = field(default_factory=list)
    script_ignored: list[IgnoredKey] = field(default_factory=list)
    script_problems: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    extras: Extras = field(default_factory=Extras)
    batch: BatchTriangle | None = None
    overruled: list[str] = field(default_factory=list)

    @property
    def values(self) -> dict[str, Any]:
        """Path -> value of all fields that it sets or implies."""
        return {setting.spec.path: setting.value for setting in [*self.defaults, *self.settings]}

    @property
    def strangers(self) -> tuple[str, ...]:
        """One line on the unknown keys that DeepSpeed ignores, with the keys that they resemble."""
        listed = []
        for path in (path for path in self.unknown if not path.startswith("optimizer.params.")):
            near = near_miss(path)
            listed.append(f"`{path}`" + (f" (did you mean `{near}`?)" if near else ""))
        return (f"unknown keys of {self.name} without effect: {', '.join(listed)}.",) if listed else ()


def read_deepspeed(
    source: str | os.PathLike[str] | Values,
    *,
    data_parallel: int | None = None,
    given: Values = _NOTHING_GIVEN,
    flags: Mapping[str, Setting] = _NO_FLAGS,
) -> DeepSpeedSettings:
    """Read a JSON file, or its content as a mapping.

    Args:
        source: path of the file, or its content.
        data_parallel: ranks that samples are split over; None leaves the batch sizes unresolved.
        given: path -> value of fields that are known from elsewhere; they resolve "auto" and complete the
            batch sizes.
        flags: path -> the flag that sets it; a batch size of the file gives way to one.
    """
    if isinstance(source, Mapping):
        result, document = DeepSpeedSettings("the DeepSpeed configuration"), plain_paths(source)
    else:
        result = DeepSpeedSettings(os.fspath(source))
        document, result.problems = load_json(source)
        if result.problems and not document:  # nothing is known of what it would set
            result.broken = {path for row in ROWS.values() for path in row.fields}
    if _nested_deeply(document):
        result.problems.append(f"{result.name}: the file must not be nested this deeply.")
        return result
    document = _as_deepspeed_takes(result, document)
    values, resolved = _read_keys(result, document, given)
    extras: dict[str, object] = {}
    for row in ROWS.values():
        _apply(result, row, values, resolved, extras)
    result.script_problems += [f"{result.name}: {line}" for line in optimizer_faults(values)]
    result.script_ignored += [IgnoredKey(key, reason) for key, reason in uncorrected(values)]
    extras |= {kind: _named(document.get(kind), values, kind) for kind in ("optimizer", "scheduler")}
    result.extras = Extras.of(extras)
    result.overruled = leave_batch_to_flags(result.name, values, flags, data_parallel)
    _set_batch(result, values, given, data_parallel)
    _settle(result)
    return result


def _as_deepspeed_takes(result: DeepSpeedSettings, document: Values) -> Values:
    """Return the document with spellings of older releases, which DeepSpeed still takes, made current."""
    changed = dict(document)
    if isinstance(stage := document.get("zero_optimization"), bool):  # how the first releases said stage 1
        changed["zero_optimization"] = {"stage": int(stage)}
    if isinstance(sparse := document.get("sparse_attention"), Mapping):
        changed["sparse_attention"] = {"mode": "fixed", **sparse}
    clip = document.get("gradient_clipping")
    if isinstance(clip, bool) or (isinstance(clip, int | float) and clip < 0):
        changed["gradient_clipping"] = 1.0 if clip is True else 0.0
    if "bf16" in document and "bfloat16" in document:
        changed.pop("bfloat16")
        result.ignored.append(IgnoredKey("bfloat16", "`bf16` is given too, and counts"))
    return changed


def _named(section: object, values: Values, kind: str) -> Named | None:
    """Return the class that a section names, with its arguments, as read or else as given."""
    if not isinstance(section, Mapping) or not isinstance(section.get("type"), str):
        return None
    given = section.get("params")
    given = given if isinstance(given, Mapping) else {}
    kept = {name: values.get(f"{kind}.params.{name}", value) for name, value in given.items()}
    needed = _NEEDED[kind]
    params = {name: v for name, v in kept.items() if v is not None and (v != AUTO or name in needed)}
    return Named(section["type"], params)


def _nested_deeply(document: Values) -> bool:
    level: list[object] = [document]
    for _ in range(_DEEPEST):
        holders = [holder for holder in level if isinstance(holder, Mapping | list | tuple)]
        level = [
            child
            for holder in holders
            for child in (holder.values() if isinstance(holder, Mapping) else holder)
        ]
    return bool(level)


def _read_keys(result: DeepSpeedSettings, document: Values, given: Values) -> tuple[dict[str, Any], set[str]]:
    """Return key path -> value of the readable keys, and the paths whose value was "auto"."""
    values: dict[str, Any] = {}
    resolved: set[str] = set()
    unknown, left = Few("unknown keys"), Few("unknown keys")
    for path, value in _leaves(result, document, unknown):
        row = ROWS[path]
        if path in values:
            result.problems.append(f"{result.name}: `{path}` must be given once, but is given as two names.")
        elif value is None and row.shape is not OR_NEVER:
            continue  # null is how JSON leaves a key out
        elif value == AUTO and row.auto is not None:
            automatic = row.auto(given)
            values[path] = AUTO if automatic is NOTHING else automatic
            resolved.add(path)
        elif value != AUTO or path.partition(".")[0] not in PYDANTIC:
            _read_value(result, row, value, values)
    result.problems += [f"{result.name}: {line}" for line in unknown.rest()]
    for path in result.unknown:
        left.add(result.script_problems, partial(_unknown, result.name, path))
    result.script_problems += [f"{result.name}: {line}" for line in left.rest()]
    return values, resolved


def _leaves(
    result: DeepSpeedSettings, node: Values, unknown: Few, section: str = ""
) -> Iterator[tuple[str, object]]:
    """Yield path and value of each key that has a row, and note the other keys as unknown."""
    for key, value in node.items():
        path = f"{section}.{key}" if section else str(key)
        path = ALIASES.get(path, path)
        if not section and "." in str(key):
            result.unknown.append(path)  # a path is no name; trl writes some
        elif path in ROWS:
            yield path, value
        elif path in SECTIONS:
            if isinstance(value, Mapping):
                yield from _leaves(result, value, unknown, path)
            elif value is not None and not (value == AUTO and path.partition(".")[0] in PYDANTIC):
                result.problems.append(f"{result.name}: `{path}` must be an object, but is {_shown(value)}.")
        elif is_remark(path):
            continue
        elif section in LOOSE or section.startswith(_SCRIPTS_ALONE):
            result.unknown.append(path)
        else:
            unknown.add(result.problems, partial(_unknown, result.name, path))


def _unknown(name: str, path: str) -> str:
    return f"{name}: {unknown_key(path)}"


def _read_value(result: DeepSpeedSettings, row: KeyRow, value: object, values: dict[str, object]) -> None:
    readable = row.shape.read(value)
    if readable is NOTHING:
        must = f"{row.shape.says}{_limit(row, value)}" + (' or "auto"' if row.auto else "")
        result.problems.append(f"{result.name}: `{row.key}` must be {must}, but is {_shown(value)}.")
        result.broken.update(row.fields)
        return
    if not row.takes(readable) and not row.is_of_another:
        _refuse(result, row, value)
        return
    values[row.key] = readable


def _refuse(result: DeepSpeedSettings, row: KeyRow, value: object) -> None:
    as_this = "" if row.shape is SECTION else f" as {_shown(value)}"
    into = result.script_problems if row.key.startswith(_SCRIPTS_ALONE) else result.problems
    into.append(f"{result.name}: `{row.key}` is not accepted{as_this}: {row.refused}.")
    result.broken.update(row.fields)


def _limit(row: KeyRow, value: object) -> str:
    """Return the clause that asks for a number of 64 bits; empty if the value fits."""
    if not isinstance(value, int | float) or abs(value) <= LARGEST:
        return ""
    return " of at most 64 bits" if "integer" in row.shape.says else ", that a float can hold"


def _shown(value: object) -> str:
    """Return a value for a message, cut short."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    text = json.dumps(value, default=str)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]} ..."


def _apply(
    result: DeepSpeedSettings, row: KeyRow, values: Values, resolved: Set[str], extras: dict[str, object]
) -> None:
    """Apply the meaning of one row's value, or of its absence, to the result."""
    off = _off(row, values)
    if off is not None:
        if row.key in values:
            result.ignored.append(IgnoredKey(row.key, off))
        return
    if row.key not in values:
        if row.upstream.absent is not NOTHING:
            source = f"{result.name}: DeepSpeed's default of `{row.key}`"
            _set_fields(row, row.upstream.absent, values, source, result.defaults)
        return
    value, source = values[row.key], f"{result.name}: `{row.key}`"
    if row.is_of_another and not row.takes(value):
        _refuse(result, row, value)
        return
    if row.faults is not None and (faults := row.faults(value, values)):
        result.problems += [f"{result.name}: {fault}{'' if fault.endswith('?') else '.'}" for fault in faults]
        result.broken.update(row.fields)
        return
    if value == AUTO and row.key in resolved:
        if row.extra:
            extras[row.extra] = None
        return
    converted = _set_fields(
        row, value, values, source, result.defaults if row.key in resolved else result.settings
    )
    if row.extra and converted is not NOTHING:
        extras[row.extra] = value if len(row.fields) > 1 else converted
    if converted is NOTHING and row.script_refused:
        return
    if row.script_refused:
        result.script_problems.append(f"{source} is not accepted: {row.script_refused}.")
    if row.accepted:
        ignored = result.script_ignored if row.extra else result.ignored
        ignored.append(IgnoredKey(row.key, row.accepted))


def _off(row: KeyRow, values: Values) -> str | None:
    """Return why a key has no effect beside the others; None if it has one."""
    stage = values.get("zero_optimization.stage")
    if row.key in AT_STAGE_3 and stage in (0, 1, 2):
        return f"DeepSpeed reads it at stage 3 alone, and `zero_optimization.stage` is {stage}"
    key = row.when
    while key is not None:
        if key not in values:
            return f"`{key}` is missing"
        if values[key] in (False, AUTO):
            return f"`{key}` is {'false' if values[key] is False else 'auto, and nothing turns it on'}"
        key = ROWS[key].when
    return None


def _set_fields(row: KeyRow, value: object, values: Values, source: str, into: list[Setting]) -> object:
    """Set the fields of a row; returns its converted value."""
    if row.convert is None:
        return value
    converted = row.convert(value, values)
    if converted is not NOTHING and row.fields:
        items = converted if isinstance(converted, tuple) and len(row.fields) > 1 else (converted,)
        pairs = zip(row.fields, items, strict=True)
        into += [Setting(FIELD_BY_PATH[path], v, source) for path, v in pairs if v is not NOTHING]
    return converted


def _set_batch(result: DeepSpeedSettings, values: Values, given: Values, data_parallel: int | None) -> None:
    """Resolve the batch sizes, with what flags and YAML give, and set them."""
    keys = BatchSizes.names()
    paths = ("batch.global_batch_size", "batch.micro_batch_size")
    stated = {key: values[key] for key in keys if values.get(key, AUTO) != AUTO}
    known = {**dict(zip(keys, map(given.get, paths), strict=False)), **stated}
    if not stated or result.broken.intersection(paths):
        return
    if data_parallel is None:
        sizes = [stated.get(key) for key in keys[:2]]
    else:
        try:
            train, micro, accumulation = (known.get(key) for key in keys)
            batch = resolve_batch(train, micro, accumulation, data_parallel)
        except ConfigError as error:
            result.problems += [f"{result.name}: {line}" for line in error.violations]
            result.broken.update(paths)
            return
        result.batch, sizes = batch, [batch.train, batch.micro]
    for key, path, size in zip(keys, paths, sizes, strict=False):
        by = f"`{key}`" if key in stated else " and ".join(f"`{k}`" for k in stated)
        if size is not None:
            result.settings.append(Setting(FIELD_BY_PATH[path], size, f"{result.name}: {by}"))


def _settle(result: DeepSpeedSettings) -> None:
    """Keep one setting per field; keys that set one field differently are a problem."""
    by_path: dict[str, Setting] = {}
    for setting in result.settings:
        first = by_path.setdefault(setting.spec.path, setting)
        if first.value != setting.value:
            result.problems.append(
                f"`{setting.spec.path}` must be set one way, but {first.source} says {say(first.value)} and "
                f"{setting.source} says {say(setting.value)}; keep one of these keys."
            )
            result.broken.add(setting.spec.path)
    result.settings = list(by_path.values())
