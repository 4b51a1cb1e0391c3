"""Metrics of a curriculum over samples as users write them: mappings by name, as in DeepSpeed's JSON."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, get_args

import yaml

from megazero.config.bounded import bounded_text, expansion_fault
from megazero.config.numbers import Unreadable, plain_text, read_float, read_int
from megazero.config.tree.data_sampling import CurriculumMetric
from megazero.config.words import nearest
from megazero.regular_file import why_unreadable

SCHEDULE = "schedule_config"
_SHOWN = 80  # characters of a value in a message


def read_metrics(given: object) -> tuple[CurriculumMetric, ...]:
    """Read the metrics of a mapping, of its JSON, or of a JSON or YAML file that is named.

    Raises:
        Unreadable: some are not sound; the message names every fault.
    """
    mapping = _load(given) if isinstance(given, str) else given
    if not isinstance(mapping, Mapping):
        raise Unreadable("must be a mapping of metrics' names to their settings, JSON, or a file that has it")
    metrics, problems = metrics_of(mapping)
    if problems:
        raise Unreadable(f"must be metrics without a fault ({'; '.join(problems)})")
    return metrics


def metrics_of(given: Mapping[Any, object], at: str = "") -> tuple[tuple[CurriculumMetric, ...], list[str]]:
    """Return the sound metrics of a mapping, and the faults of the others, as clauses.

    In the clauses, `at` stands before a metric's name, such as ``a.b.``.
    """
    metrics, problems = [], []
    for name, settings in given.items():
        if settings is None:
            continue
        path = f"{at}{name}"
        faults: list[str] = []
        if not re.fullmatch(r"[\w.-]+", str(name)):
            faults.append(f"`{path}` must be named with letters, digits, `_`, `.` and `-` alone")
        values = _values(settings, path, METRIC_READERS, faults)
        schedule = values.pop(SCHEDULE, {})
        if "schedule_type" not in values and not faults:
            faults.append(f"`{path}.schedule_type` must be given, but is missing")
        problems += faults
        if not faults:
            metrics.append(CurriculumMetric(name=str(name), **values, **schedule))
    return tuple(metrics), problems


def as_mapping(metrics: tuple[CurriculumMetric, ...]) -> dict[str, dict[str, object]]:
    """The inverse of `metrics_of`; settings that are not given are left out."""
    mapping = {}
    for metric in metrics:
        plain = {key: list(v) if isinstance(v, tuple) else v for key, v in metric if v not in (None, (), "")}
        schedule = {key: plain.pop(key) for key in SCHEDULE_READERS if key in plain}
        del plain["name"]
        mapping[metric.name] = {**plain, SCHEDULE: schedule}
    return mapping


def repeated_key(node: yaml.Node) -> str | None:
    """Return a key that occurs twice in one mapping of a YAML document; None if there is none."""
    seen, waiting = set(), [node]
    while waiting:
        node = waiting.pop()
        if id(node) in seen or not isinstance(node, yaml.CollectionNode):
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            again: str | None = next((key for key, count in keys.items() if count > 1), None)
            if again is not None:
                return again
            waiting += [value for _, value in node.value]
        else:
            waiting += node.value
    return None


def _load(text: str) -> object:
    if text.lstrip().startswith("{"):
        return _json(text)
    try:
        content = bounded_text(text)
    except (OSError, ValueError) as error:
        reason = why_unreadable(error) if isinstance(error, OSError) else "it is not UTF-8 text"
        raise Unreadable(f"must be JSON or the name of a file that can be read ({reason})") from error
    return _json(content) if content.lstrip().startswith("{") else _yaml(content)


def _json(text: str) -> object:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        # json itself takes the last of repeated keys, and says nothing.
        again = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        if again:
            raise Unreadable(f"must have each key once (`{again[0]}` is given again)")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=unique)
    except Unreadable:
        raise
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"must be valid JSON ({error})") from error


def _yaml(text: str) -> object:
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader) or yaml.ScalarNode("", "")
        fault, again = expansion_fault(root), repeated_key(root)
        if fault is not None:
            raise Unreadable(f"must {fault}")
        if again is not None:
            raise Unreadable(f"must have each key once (`{again}` is given again)")
        return yaml.safe_load(text)
    except Unreadable:
        raise
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise Unreadable(f"must be valid YAML ({' '.join(str(error).split())[:_SHOWN]})") from error


def _values(
    given: object, path: str, readers: Mapping[str, Callable[[object], object]], faults: list[str]
) -> dict[str, Any]:
    """Read the settings of a mapping; their faults are added to `faults`."""
    if not isinstance(given, Mapping):
        faults.append(f"`{path}` must be a mapping of names to values, but is {_shown(given)}")
        return {}
    settings: dict[str, object] = {}
    for key, value in given.items():
        where = f"{path}.{key}"
        if key == SCHEDULE and key in readers:
            settings[key] = _values({} if value is None else value, where, SCHEDULE_READERS, faults)
        elif key not in readers:
            faults.append(_unknown(where, str(key), readers))
        elif value is not None:
            try:
                settings[key] = readers[key](value)
            except Unreadable as error:
                faults.append(f"`{where}` {error}, but is {_shown(value)}")
    return settings


def _unknown(where: str, key: str, readers: Mapping[str, object]) -> str:
    if key in SCHEDULE_READERS:
        return f"unknown key `{where}`, which belongs in `{SCHEDULE}`"
    if key in METRIC_READERS:
        return f"unknown key `{where}`, which belongs beside `{SCHEDULE}`"
    close = nearest(key, readers)
    return f"unknown key `{where}`" + (f"; did you mean `{close}`?" if close else "")


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return "a mapping"
    text = json.dumps(value, default=str) if not isinstance(value, int) or abs(value) < 2**64 else "too large"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise Unreadable("must be text")
    return plain_text(value)


def _choice(field: str, refused: Mapping[str, str] = MappingProxyType({})) -> Callable[[object], str]:
    """Make a reader of one of a metric's choices; the message about a refused choice gives its reason."""
    choices: tuple[str, ...] = get_args(CurriculumMetric.model_fields[field].annotation)

    def read(value: object) -> str:
        if isinstance(value, str) and value in choices:
            return value
        why = f" ({value} {refused[value]})" if isinstance(value, str) and value in refused else ""
        raise Unreadable(f"must be one of {', '.join(choices)}{why}")

    return read


def _positive(value: object) -> int:
    number = read_int(value)
    if number < 1:
        raise Unreadable("must be a positive integer")
    return number


def _degree(value: object) -> float:
    number = read_float(value)
    if not (math.isfinite(number) and number > 0):
        raise Unreadable("must be a positive number")
    return number


def _each(read: Callable[[object], int]) -> Callable[[object], tuple[int, ...]]:
    def items(value: object) -> tuple[int, ...]:
        if not isinstance(value, list | tuple):
            raise Unreadable("must be a list of integers")
        return tuple(read(item) for item in value)

    return items


SCHEDULE_READERS: Mapping[str, Callable[[object], object]] = MappingProxyType(
    {
        "total_curriculum_step": _positive,
        "difficulty_step": _positive,
        "root_degree": _degree,
        "difficulty": _each(read_int),
        "max_step": _each(_positive),
    }
)
METRIC_READERS: Mapping[str, Callable[[object], object]] = MappingProxyType(
    {
        "index_to_sample_path": _text,
        "index_to_metric_path": _text,
        "difficulty_type": _choice("difficulty_type"),
        "clustering_type": _choice("clustering_type"),
        "min_difficulty": read_int,
        "max_difficulty": read_int,
        "schedule_type": _choice(
            "schedule_type",
            {"custom": "is a schedule of one's own, which is not offered: give its values to fixed_discrete"},
        ),
        SCHEDULE: _text,  # has readers of its own
    }
)
