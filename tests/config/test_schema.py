"""The schema for editors: it takes what the parser takes, and refuses misspelt keys and wrong types."""

from __future__ import annotations

import json
import re
from typing import Any, get_type_hints

import pytest
import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from megazero import cli
from megazero.config.coerce import coerce
from megazero.config.fields import FIELDS, SECTIONS, FieldSpec, Kind
from megazero.config.numbers import Unreadable
from megazero.config.schema import schema
from tests.source_tree import ROOT

jsonschema = pytest.importorskip("jsonschema")
WRITTEN = (
    *(
        None,
        True,
        False,
        0,
        1,
        2,
        -1,
        3.0,
        0.5,
        1e6,
        [],
        [1],
        [1, 2],
        [1, 2, 3],
        [0.5],
        ["a"],
        [True],
        {},
        {"a": 1},
    ),
    *(
        "",
        "a",
        "true",
        "False",
        "1",
        "1e6",
        "1e-5",
        ".5",
        "300_000",
        "-1",
        "1 2",
        "1,2,3",
        "([0]*3+[1])*2",
        "inf",
    ),
)


@pytest.fixture(scope="module")
def whole() -> Any:
    return json.loads(json.dumps(schema()))


@pytest.fixture(scope="module")
def validator(whole: Any) -> Any:
    jsonschema.Draft7Validator.check_schema(whole)
    return jsonschema.Draft7Validator(whole)


@pytest.mark.parametrize("path", sorted((ROOT / "examples_3d").rglob("*.yaml")), ids=lambda path: path.name)
def test_examples_pass(validator: Any, path: Any) -> None:
    assert [error.message for error in validator.iter_errors(yaml.safe_load(path.read_text()))] == []


@pytest.mark.parametrize(
    "text",
    [
        "model: {num_layer: 2}",
        "models: {num_layers: 2}",
        "model: {num-layers: 2}",
        "model: {num_layers: two}",
        "model: {num_layers: 2.5}",
        "model: {num_layers: true}",
        "model: {num_layers: 0}",
        "model: {num_layers: null}",
        "model: {normalization: BatchNorm}",
        "model: [1]",
        "training: {skip_train: 1}",
        "checkpoint: {save: 5}",
        "batch: {rampup_batch_size: [1, 2]}",
        "zero: {stage: 4}",
        "data_sampling: {curriculum_metrics: {seqlen: {schedule: fixed_linear}}}",
        "data_sampling: {curriculum_metrics: {seqlen: {schedule_config: {root: 2}}}}",
        "base: 3",
    ],
)
def test_mistakes_do_not(validator: Any, text: str) -> None:
    assert not validator.is_valid(yaml.safe_load(text))


def taken(spec: FieldSpec, annotation: Any, value: object) -> bool | None:
    """Whether the parser takes a value; None if it cannot read it at all."""
    try:
        read = coerce(spec, value)
    except Unreadable:
        return None
    try:
        TypeAdapter(annotation, config=ConfigDict(allow_inf_nan=False)).validate_python(read)
    except ValidationError:
        return False
    return True


def test_what_the_parser_takes_the_schema_takes(whole: Any) -> None:
    """And, texts and lists aside, it refuses what the parser cannot read."""
    wrong, seen = [], set()
    hints = {name: get_type_hints(section, include_extras=True) for name, section in SECTIONS.items()}
    for spec in FIELDS:
        key = {**whole["properties"][spec.section]["properties"][spec.name], "description": "", "default": 0}
        annotation = hints[spec.section][spec.name]
        if (alike := (json.dumps(key), str(annotation))) in seen:
            continue
        seen.add(alike)
        validator = jsonschema.Draft7Validator({**key, "definitions": whole["definitions"]})
        words = [str(choice) for choice in (*spec.choices, *spec.synonyms)]
        joined = [" ".join(words[:2]), words[:2]] if spec.kind is Kind.CHOICES else []
        for value in (
            *WRITTEN,
            *words[:3],
            *(word.upper() for word in words[-2:]),
            *joined,
            *spec.choices[:2],
        ):
            verdict, valid = taken(spec, annotation, value), validator.is_valid(value)
            refused = verdict is None and not isinstance(value, str | list | dict)
            if (verdict and not valid) or (refused and valid):
                wrong.append(f"{spec.path} {value!r}: parser {verdict}, schema {valid}")
    assert wrong == []


def test_an_editor_shows_meaning_unit_flag_and_default(whole: Any) -> None:
    size = whole["properties"]["zero"]["properties"]["bucket_size"]
    assert size["description"] == (
        "parameters per bucket; a bucket is reduced or gathered by one call (elements); --bucket-size"
    )
    assert size["default"] == 16_000_000
    assert whole["properties"]["model"]["properties"]["normalization"]["anyOf"][0]["enum"] == [
        "LayerNorm",
        "RMSNorm",
    ]
    assert all(entry["description"] for name in SECTIONS for entry in [whole["properties"][name]])


def test_patterns_are_those_of_javascript_too(whole: Any) -> None:
    """Where a dash, a blank or a slash with a backslash before it is an error in a pattern of Unicode."""
    assert not re.search(r"\\\\[^dswSDW.+*?()\[\]{}^$|\\]", json.dumps(whole))


def test_the_command_prints_it_alone(whole: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == whole
    assert cli.main(["config", "--schema", "--lr", "3"]) == 2
    assert capsys.readouterr().err == (
        "error: `--schema` must stand alone, but has --lr 3 beside it; leave that out\n"
    )
    with pytest.raises(SystemExit):
        cli.main(["config", "--help"])
    assert "megazero config --schema" in capsys.readouterr().out
