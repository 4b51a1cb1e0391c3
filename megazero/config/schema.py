"""A JSON Schema of the YAML file, with which editors complete and check it.

Types, bounds and defaults are those of pydantic's own schema. Beside them stand the other forms that
`coerce.py` reads: a number as text, a choice in any case, a list as one text or as its only item. What spans
settings, the schema leaves to the rules. It is of draft 7, which all editors know.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

from pydantic import BeforeValidator

from megazero.config.document import BASE
from megazero.config.fields import FIELD_BY_PATH, SECTIONS, FieldSpec, Kind, section_title
from megazero.config.help import meanings
from megazero.config.metric_text import METRIC_READERS, SCHEDULE, SCHEDULE_READERS
from megazero.config.tree.data_sampling import CurriculumMetric

Schema = dict[str, Any]

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_TEXTS = MappingProxyType(
    {
        "number": r"^\s*[-+]?(\d[\d_]*\.?[\d_]*|\.\d+)([eE][-+]?\d+)?\s*$",
        "numbers": r"^[-+\d\s\[\]()*,._eE]*$",
    }
)


def schema() -> Schema:
    """Return the schema of a document: its sections, their keys, and `base`."""
    base = {"type": "string", "description": "the document that this one is built on, relative to its folder"}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "a configuration of megazero",
        **_mapping({BASE: base} | {section: _section(section) for section in SECTIONS}),
        "definitions": {name: {"type": "string", "pattern": pattern} for name, pattern in _TEXTS.items()},
    }


def _section(section: str) -> Schema:
    raw, texts = SECTIONS[section].model_json_schema()["properties"], meanings(section)
    specs = (FIELD_BY_PATH[f"{section}.{name}"] for name in raw)
    keys = {spec.name: _key(spec, raw[spec.name], texts[spec.name]) for spec in specs}
    return {"description": section_title(section), **_mapping(keys)}


def _key(spec: FieldSpec, raw: Schema, meaning: str) -> Schema:
    """The schema of one setting; `raw` is pydantic's."""
    facts = SECTIONS[spec.section].model_fields[spec.name].metadata
    # What is read before pydantic compares it, such as 0 for never, may lie beyond the bounds.
    bounds = () if any(isinstance(fact, BeforeValidator) for fact in facts) else _BOUNDS
    forms = _metrics() if spec.kind is Kind.METRICS else _forms(raw, bounds, tuple(spec.synonyms))
    unit = f" ({spec.unit})" if spec.unit else ""
    default = {"default": raw["default"]} if spec.default_text is not None else {}
    return {"description": f"{meaning}{unit}; {spec.flag}", **default, **_one_of(forms)}


def _forms(raw: Schema, bounds: tuple[str, ...] = _BOUNDS, words: tuple[str, ...] = ()) -> list[Schema]:
    """The forms in which a value of pydantic's schema `raw`, or one of `words`, may be written."""
    if "anyOf" in raw:
        return [form for part in raw["anyOf"] for form in _forms(part, bounds, words)]
    plain = {key: raw[key] for key in ("type", "enum", *bounds) if key in raw}
    if raw["type"] == "array":  # a list, a text that has its items, or its only item
        item = raw["items"] if "items" in raw else raw["prefixItems"][0]
        items, text = [*_forms(item, bounds, words), _text("numbers")], _text("numbers")
        if item["type"] == "string":
            items = [*_forms(item, bounds, words), *([] if "enum" in item else [{"type": "number"}])]
            text = _any_case((*item["enum"], *words), several=True) if "enum" in item else items[0]
        length: Schema = {key: raw[key] for key in ("minItems", "maxItems") if key in raw}
        only = [] if "prefixItems" in raw else items
        return [{"type": "array", "items": _one_of(items), **length}, text, *only]
    if raw["type"] in ("integer", "number"):
        return [plain, _text("number"), *([_any_case(words)] if words else [])]
    if raw["type"] == "boolean":
        return [plain, _any_case(("true", "false"))]
    return [plain, _any_case((*raw["enum"], *words))] if "enum" in raw else [plain]


def _text(name: str) -> Schema:
    return {"$ref": f"#/definitions/{name}"}


def _metrics() -> list[Schema]:
    """A curriculum's metrics by name, or a text: their JSON, or a file that has them."""
    raw = CurriculumMetric.model_json_schema()["properties"]
    keys = {name: _one_of([*_forms(raw[name]), {"type": "null"}]) for name in raw}
    metric = {name: keys[name] for name in METRIC_READERS if name in keys}
    metric[SCHEDULE] = _mapping({name: keys[name] for name in SCHEDULE_READERS})
    return [{"type": "object", "additionalProperties": _mapping(metric)}, {"type": "string"}]


def _mapping(keys: Schema) -> Schema:
    return {"type": ["object", "null"], "properties": keys, "additionalProperties": False}


def _one_of(forms: list[Schema]) -> Schema:
    forms = [form for i, form in enumerate(forms) if form not in forms[:i]]
    return forms[0] if len(forms) == 1 else {"anyOf": forms}


def _any_case(words: Iterable[str], several: bool = False) -> Schema:
    """One of the words in any case, or several, in a pattern that JavaScript reads too."""
    plain = (re.sub(r"[.+*?()\[\]{}^$|\\]", r"\\\g<0>", word) for word in words)
    word = "|".join(re.sub("[a-zA-Z]", lambda c: f"[{c[0].upper()}{c[0].lower()}]", text) for text in plain)
    return {"type": "string", "pattern": f"^({word})$" if not several else rf"^\s*(({word})(\s+|$))*$"}
